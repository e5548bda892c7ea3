"""Attention from a library instead of from our kernel, for who asks for it by name.

    varlen        torch.nn.attention.varlen, in torch since 2.12: nothing to install
    flash_attn    the package flash-attn: hours of nvcc, and what many engines run on

In, out and what must hold: paged_attention.py says it. Both are FlashAttention-2, which reads pages
of 256 tokens. Nothing is read on the host: the longest sequence is bounded by shapes, so that a
CUDA graph replays them for any lengths.

Source: the paged calls of nano-vllm and of torch's own tests.
"""

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from nanoinfer.kernels.paged_attention import PagedAttention

PAGE = 256  # what FlashAttention-2 can read is a multiple of it


def load_attention(
    name: str, device: torch.device, dtype: torch.dtype, block_size: int, head_dim: int
) -> PagedAttention:
    """The body called `name`. ValueError says what stands in its way, and what to do about it."""
    needs = (
        (device.type == "cuda", f"a GPU, got {device.type}; leave it at auto"),
        (
            dtype in (torch.bfloat16, torch.float16),
            f"bfloat16 or float16, got {dtype}; try dtype='bfloat16'",
        ),
        (
            block_size % PAGE == 0,
            f"blocks of a multiple of {PAGE} tokens, got {block_size}; try block_size={PAGE}",
        ),
        (head_dim <= 256 and head_dim % 8 == 0, f"heads of 8, 16 .. 256, got {head_dim}"),
    )
    for is_met, need in needs:
        if not is_met:
            raise ValueError(f"attention_backend: {name} needs {need}")
    return _make_varlen() if name == "varlen" else _make_flash_attn()


def _make_varlen() -> PagedAttention:
    varlen = _import("varlen", "torch.nn.attention.varlen", "torch 2.12 or newer")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        raise ValueError(
            f"attention_backend: varlen needs torch 2.12 or newer, got {torch.__version__}; "
            "leave it at auto"
        )

    def paged_attention_varlen(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        scale: float,
    ) -> Tensor:
        longest = block_tables.shape[1] * k_cache.shape[1]
        # Of the keys' bounds only the shape is looked at, where there is a table.
        bounds, most = (cu_seqlens_q, cu_seqlens_q), (_most_queries(q, seq_lens), longest)
        where = {"seqused_k": seq_lens, "block_table": block_tables}
        options = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
        return varlen.varlen_attn(q, k_cache, v_cache, *bounds, *most, **where, **options)

    return paged_attention_varlen


def _make_flash_attn() -> PagedAttention:
    library = _import("flash_attn", "flash_attn", "the package flash-attn (pip install flash-attn)")

    def paged_attention_flash(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        scale: float,
    ) -> Tensor:
        options = {"softmax_scale": scale, "causal": True, "block_table": block_tables}
        if len(q) == len(seq_lens):  # decoding: keys are split over programs
            out = library.flash_attn_with_kvcache(
                q[:, None], k_cache, v_cache, cache_seqlens=seq_lens, **options
            )
            return out[:, 0]
        cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        return library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=_most_queries(q, seq_lens),
            max_seqlen_k=block_tables.shape[1] * k_cache.shape[1],
            **options,
        )

    return paged_attention_flash


def _most_queries(q: Tensor, seq_lens: Tensor) -> int:
    return 1 if len(q) == len(seq_lens) else len(q)


def _import(name: str, module: str, need: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"attention_backend: {name} needs {need}: {error}") from error
