"""From the fused projection to attention in one pass: norm of q and k, rotation, store of k and v.

    q -> norm -> rotate ---------------------------> [T, H, D], returned
    k -> norm -> rotate -> k_cache[slot of token]
    v -------------------> v_cache[slot of token]

Done one by one, q and k are written and read again twice, and k a third time, by three calls of
their own; here a head is read once, stays in the CPU's first cache and is written where it belongs.

The reference is the composition, and so is any other body that has the two halves: where
torch.compile makes the first one kernel, the second still scatters.

T tokens in the step, H query heads, KV key-value heads, D head dim.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.quantized_kv import KVScales, hadamard, quantize_heads
from nanoinfer.kernels.rms_norm import rms_norm_ref
from nanoinfer.kernels.rotary import Rope, bad_position, check_rope, rope_axes, rotary_ref
from nanoinfer.kernels.store_kv import bad_slot, check_store, store_kv_ref


class HeadNorms(NamedTuple):
    """Weights [D] of the norms of q and k."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


NormRope = Callable[[Tensor, Tensor, HeadNorms | None, Tensor, Rope], tuple[Tensor, Tensor]]
NormRopeStore = Callable[..., Tensor]


def norm_rope_ref(
    q: Tensor, k: Tensor, norms: HeadNorms | None, positions: Tensor, rope: Rope
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T, KV, D] -> both, normalised (unless norms is None) and turned."""
    if norms is not None:
        q = rms_norm_ref(q, norms.q_weight, norms.eps)
        k = rms_norm_ref(k, norms.k_weight, norms.eps)
    q, turned = rotary_ref(positions, q, k, rope)
    assert turned is not None, "a key was given"
    return q, turned


def make_norm_rope_store(norm_rope: NormRope, store_kv: Callable[..., None]) -> NormRopeStore:
    """Compose the op of its two halves."""

    def norm_rope_store(
        q: Tensor,  # [T, H, D], rows and heads may be strided
        k: Tensor,  # [T, KV, D]
        v: Tensor,  # [T, KV, D]
        norms: HeadNorms | None,
        positions: Tensor,  # [T] or [3, T] int64
        rope: Rope,
        k_cache: Tensor,  # [num_blocks, block_size, KV, D]
        v_cache: Tensor,  # [num_blocks, block_size, KV, D]
        slot_mapping: Tensor,  # [T] int64
        scales: KVScales | None = None,  # of a cache in 8 bits
    ) -> Tensor:
        q, k = norm_rope(q, k, norms, positions, rope)
        if scales is None:
            store_kv(k, v, k_cache, v_cache, slot_mapping)
            return q
        if scales.is_rotated:
            q, k, v = hadamard(q).to(q.dtype), hadamard(k), hadamard(v)
        (k, k_scales), (v, v_scales) = (quantize_heads(x, k_cache.dtype) for x in (k, v))
        values = (x.view(torch.int8) for x in (k, v, k_cache, v_cache))  # bytes are bytes
        store_kv(*values, slot_mapping)
        scales.k.flatten(0, 1).index_copy_(0, slot_mapping, k_scales)
        scales.v.flatten(0, 1).index_copy_(0, slot_mapping, v_scales)
        return q

    return norm_rope_store


norm_rope_store_ref = make_norm_rope_store(norm_rope_ref, store_kv_ref)


def make_norm_rope_store_cpu(library: ctypes.CDLL, threads: int) -> NormRopeStore:
    """Bind the C++ twin: the bits of the three C++ twins, one after the other.

    The function raises ValueError for tensors that the kernel cannot take, for positions without a
    row in the table and for slots outside the cache, before anything is written.
    """
    kernel = library.nanoinfer_norm_rope_store
    tensor_types, sizes = [ctypes.c_void_p] * 14, [ctypes.c_int64] * 14
    kernel.argtypes = [*[ctypes.c_int] * 5, *tensor_types, *sizes, ctypes.c_float, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def norm_rope_store_cpu(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: HeadNorms | None,
        positions: Tensor,
        rope: Rope,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        check_rope(positions, q, k, rope)
        check_store(k, v, k_cache, v_cache, slot_mapping, scales)
        k_scales, v_scales, is_rotated = scales or (None, None, False)
        weights, eps = _weights(norms, q)
        out = torch.empty(q.shape, dtype=q.dtype)
        is_fp32 = weights[0] is not None and weights[0].dtype == torch.float32
        is_e4m3 = k_cache.dtype == torch.float8_e4m3fn
        flags = (q.dtype == torch.bfloat16, is_fp32, rope.is_interleaved, is_e4m3, is_rotated)
        caches = (k_cache, v_cache, k_scales, v_scales)
        where = (positions, rope_axes(positions, rope), rope.cos_sin, slot_mapping)
        addresses = pointers(out, *caches, q, k, v, *weights, *where)
        (T, H, D), num_slots = q.shape, k_cache.shape[0] * k_cache.shape[1]
        sizes = (T, H, k.shape[1], D, *rope.cos_sin.shape, rope.offset, num_slots)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        invalid = kernel(*flags, *addresses, *sizes, *strides, eps, threads)
        if invalid >= T:
            raise bad_slot(slot_mapping, invalid - T, num_slots)
        if invalid >= 0:
            raise bad_position(positions, invalid, rope)
        return out

    return norm_rope_store_cpu


def _weights(
    norms: HeadNorms | None, q: Tensor
) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    if norms is None:
        return (None, None), 0.0
    for name, weight in (("q_weight", norms.q_weight), ("k_weight", norms.k_weight)):
        is_known = weight.dtype in (q.dtype, torch.float32) and weight.dtype == norms.q_weight.dtype
        is_known = is_known and weight.shape == q.shape[-1:] and weight.is_cpu
        if not is_known or not weight.is_contiguous():
            raise ValueError(
                f"{name}: got {weight.dtype} {tuple(weight.shape)} on {weight.device}, need "
                f"{q.dtype} or float32 [{q.shape[-1]}] on cpu, contiguous, the same for both; try "
                "norm_rope_store_ref"
            )
    return (norms.q_weight, norms.k_weight), norms.eps
