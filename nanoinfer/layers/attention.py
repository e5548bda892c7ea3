"""Attention over the paged cache: turn and store this step's keys and values, then attend.

In: q [T, H, D], k and v [T, KV, D] of the step's tokens, as they were projected; the layer's cache;
the batch. Out: [T, H * D]. The norm of q and k (where the model has one), their rotation and the
store are one kernel: done apart, they would write and read q and k twice more.

One entry for prompts, chunks and decoding: all are "the last q_len of seq_len tokens", causal
inside each sequence. Keys are found through the block table:

    sequence of 5 tokens, block size 2, table [7, 3, 9]:
    cache block 7: t0 t1    block 3: t2 t3    block 9: t4 --
"""

import math
import mmap
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.batch import Batch
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.norm_rope_store import HeadNorms
from nanoinfer.kernels.quantized_kv import KVScales
from nanoinfer.layers.rotary_embedding import RotaryEmbedding


class KVCache(NamedTuple):
    """One layer's keys and values, each [num_blocks, block_size, KV, D]. Block 0: null block."""

    k: Tensor
    v: Tensor


KV = KVCache | tuple[Tensor, Tensor, KVScales]  # plain, or in 8 bits


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer needs to cache per token."""

    unit: ClassVar[str] = "block"

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_unit(self, block_size: int) -> int:
        return 2 * block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_units: int, block_size: int, device: torch.device) -> KVCache:
        """Zeros: what an unwritten slot holds must be finite."""
        shape = (num_units, block_size, self.num_kv_heads, self.head_dim)
        return KVCache(*(zeros(shape, self.dtype, device) for _ in range(2)))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like torch.zeros; but on a CPU a page takes no memory (nor time) until it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Attention(nn.Module):
    """`norms`: of the heads of q and k, None where the model has none.

    With `is_gated` (Qwen3.5), q is [T, H, 2 D]: each head's query, then a gate on what it finds.
    """

    def __init__(
        self,
        head_dim: int,
        rope: RotaryEmbedding,
        norms: HeadNorms | None,
        kernels: Kernels,
        is_gated: bool = False,
    ) -> None:
        super().__init__()
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        self._is_gated = is_gated
        self._rope = rope  # shared by all layers
        self._norms = norms
        self._kernels = kernels

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: KV, batch: Batch) -> Tensor:
        gate, q = q[..., self._head_dim :], q[..., : self._head_dim]
        turning = (self._norms, batch.positions, self._rope.rope)
        k_cache, v_cache, *scales = cache
        slots = batch.slot_mapping
        q = self._kernels.norm_rope_store(q, k, v, *turning, k_cache, v_cache, slots, *scales)
        where = (batch.block_tables, batch.seq_lens, batch.cu_seqlens_q)
        out = self._kernels.paged_attention(q, k_cache, v_cache, *where, self._scale, *scales)
        if self._is_gated:
            out = self._kernels.sigmoid_mul(out, gate)
        return out.flatten(-2)
