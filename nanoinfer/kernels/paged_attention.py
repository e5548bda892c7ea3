"""Attention of a step's queries over the paged KV cache.

    out[t, h] = sum over j <= position(t) of softmax_j(scale * q[t, h] . k[j, g]) * v[j, g]
    where g = h // G is the kv head that query head h reads

In: the queries of all sequences, one after the other, and for each sequence the table of blocks
that hold its keys and values (already stored, this chunk's own too). Out: a row for each query.
One entry for prompts, chunks of prompts, decoding and any mixture: a chunk's queries are the last
q_len positions of its sequence.

Invariant: a query never sees a slot after its own position, so that whatever lies there (a
rejected draft, another request's leftovers, NaN) changes nothing. Padding costs no branch: a
sequence of length 0, and rows that no sequence owns, come out as 0.

Source: PagedAttention (vLLM, 2023) for the table, FlashAttention for the loop in the C++ twin.

Shapes: T tokens in the step, S sequences, H query heads, K kv heads, G = H / K, D head dim,
M blocks in a row of the table, L tokens in a sequence, B tokens in a block.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.quantized_kv import (
    KVScales,
    check_cache,
    dequantize_heads,
    hadamard,
)

PagedAttention = Callable[..., Tensor]


def paged_attention_ref(
    q: Tensor,  # [T, H, D], rows may be strided
    k_cache: Tensor,  # [num_blocks, B, K, D]
    v_cache: Tensor,  # [num_blocks, B, K, D]
    block_tables: Tensor,  # [S, M] int32
    seq_lens: Tensor,  # [S] int32, at the end of this chunk
    cu_seqlens_q: Tensor,  # [S + 1] int32, where each sequence's queries begin
    scale: float,
    scales: KVScales | None = None,  # of a cache in 8 bits
) -> Tensor:
    """Gather each sequence's pages, then attend as if there were no pages."""
    _check_shapes(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q)
    check_cache(q.dtype, k_cache, v_cache, scales)
    out = q.new_zeros(q.shape)  # [T, H, D]
    block_size = k_cache.shape[1]
    bounds = cu_seqlens_q.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[i], bounds[i + 1]
        if seq_len == 0 or start == end:
            continue
        pages = block_tables[i, : -(-seq_len // block_size)]
        k, v = k_cache[pages], v_cache[pages]
        if scales is not None:
            k = dequantize_heads(k, scales.k[pages], q.dtype)
            v = dequantize_heads(v, scales.v[pages], q.dtype)
        k, v = k.flatten(0, 1)[:seq_len], v.flatten(0, 1)[:seq_len]  # [L, K, D]
        key_position = torch.arange(seq_len, device=q.device)
        position = key_position[seq_len - (end - start) :]
        out[start:end] = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],  # [1, H, q_len, D]
            k.transpose(0, 1)[None],  # [1, K, L, D]
            v.transpose(0, 1)[None],
            attn_mask=key_position <= position[:, None],  # [q_len, L]
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    if scales is not None and scales.is_rotated:
        return hadamard(out).to(q.dtype)
    return out


def make_paged_attention_cpu(library: ctypes.CDLL, threads: int) -> PagedAttention:
    """Bind the C++ twin: the reference's signature, bf16 or fp32 with sums in fp32.

    The function raises ValueError for tensors that the kernel cannot take, and for lengths or
    block ids that point outside the cache.
    """
    kernel = library.nanoinfer_paged_attention
    tensor_types, sizes = [ctypes.c_void_p] * 9, [ctypes.c_int64] * 9
    kernel.argtypes = [*[ctypes.c_int] * 3, *tensor_types, *sizes, ctypes.c_float, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def paged_attention_cpu(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        scale: float,
        scales: KVScales | None = None,
    ) -> Tensor:
        indices = (block_tables, seq_lens, cu_seqlens_q)
        k_scales, v_scales, is_rotated = scales or (None, None, False)
        _check_shapes(q, k_cache, v_cache, *indices)
        check_cache(q.dtype, k_cache, v_cache, scales)
        _check_memory(q, (k_cache, v_cache, k_scales, v_scales), indices)
        out = torch.empty(q.shape, dtype=q.dtype)
        invalid = kernel(
            q.dtype == torch.bfloat16,
            k_cache.dtype == torch.float8_e4m3fn,
            is_rotated,
            *pointers(out, q, k_cache, v_cache, k_scales, v_scales, *indices),
            q.shape[0],
            *block_tables.shape,
            *k_cache.shape[:2],
            q.shape[1],
            *k_cache.shape[2:],
            q.stride(0),
            scale,
            threads,
        )
        if invalid >= 0:
            raise _bad_sequence(invalid, q, k_cache, *indices)
        return out

    return paged_attention_cpu


def _bad_sequence(
    i: int, q: Tensor, k_cache: Tensor, tables: Tensor, lens: Tensor, bounds: Tensor
) -> ValueError:
    return ValueError(
        f"sequence {i}: got seq_len {lens[i].item()}, queries "
        f"{bounds[i : i + 2].tolist()} of {q.shape[0]}, blocks "
        f"{tables[i].tolist()}; need 0 or q_len <= seq_len <= "
        f"{tables.shape[1] * k_cache.shape[1]}, ascending query bounds from 0, "
        f"blocks in [0, {k_cache.shape[0]}); try the Batch that the scheduler built"
    )


def _check_shapes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, bounds: Tensor
) -> None:
    if q.dim() != 3 or k_cache.dim() != 4 or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"q, k_cache: got {tuple(q.shape)}, {tuple(k_cache.shape)}, "
            "need [T, H, D], [num_blocks, B, K, D]; try q.view(-1, num_heads, head_dim)"
        )
    if k_cache.shape != v_cache.shape:
        raise ValueError(
            f"v_cache: got {tuple(v_cache.shape)}, need k_cache's {tuple(k_cache.shape)}; "
            "try allocating both alike"
        )
    if q.shape[1] % k_cache.shape[2] != 0:
        raise ValueError(
            f"num_heads: got {q.shape[1]}, need a multiple of {k_cache.shape[2]} kv heads; "
            "try repeating kv heads when loading"
        )
    if tables.dim() != 2 or lens.shape != tables.shape[:1] or bounds.shape != (len(lens) + 1,):
        raise ValueError(
            f"block_tables, seq_lens, cu_seqlens_q: got {tuple(tables.shape)}, "
            f"{tuple(lens.shape)}, {tuple(bounds.shape)}, need [S, M], [S], [S + 1]; "
            "try Batch.build"
        )


def _check_memory(
    q: Tensor, caches: tuple[Tensor | None, ...], indices: tuple[Tensor, ...]
) -> None:
    present = [tensor for tensor in caches if tensor is not None]
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"q: got {q.dtype}, need bfloat16 or float32; try paged_attention_ref")
    if q.stride(2) != 1 or (q.shape[1] > 1 and q.stride(1) != q.shape[2]):
        raise ValueError(
            f"q: got strides {q.stride()}, need rows of contiguous heads; try q.contiguous()"
        )
    if not all(tensor.is_contiguous() for tensor in present):
        raise ValueError("cache or scales: got strided, need contiguous; try .contiguous()")
    for tensor in indices:
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"block_tables, seq_lens, cu_seqlens_q: got {tensor.dtype}, strides "
                f"{tensor.stride()}, need contiguous int32; try .int().contiguous()"
            )
    for tensor in (q, *present, *indices):
        if not tensor.is_cpu:
            raise ValueError(f"device: got {tensor.device}, need cpu; try paged_attention_ref")
