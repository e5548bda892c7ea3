"""Norm of q and k, rotation, and store of k and v in one pass on a GPU: the Triton twin.

In, out and what must hold: norm_rope_store.py says it. A program takes one head of one token: of q
(normalised, turned, written), of k (the same, into the cache) or of v (copied into the cache). On
the way into a cache of 8 bits a head is turned by a Hadamard matrix, if asked for, and gets a scale
(quantized_kv.py).

A rotation needs each number's partner in its pair. It is read again instead of exchanged between
threads: the second read comes from the cache, and the kernel stays the formula.

Imported only on a machine with a GPU (or to test).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.norm_rope_store import HeadNorms
from nanoinfer.kernels.quantized_kv import KVScales, piece_of
from nanoinfer.kernels.rotary import Rope, rope_axes


@triton.jit
def _normed(x, weight, at, is_in, factor, IS_WIDE: tl.constexpr, HAS_NORM: tl.constexpr):
    """x[at], rounded where the reference rounds, as fp32."""
    row = tl.load(x + at, is_in, 0.0)
    if HAS_NORM:
        scaled = row.to(tl.float32) * factor
        if IS_WIDE:
            row = (scaled * tl.load(weight + at, is_in, 0.0)).to(row.dtype)
        else:
            row = scaled.to(row.dtype) * tl.load(weight + at, is_in, 0.0)
    return row.to(tl.float32)


@triton.jit
def hadamard(x, PADDED: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """quantized_kv.hadamard of a head [PADDED] in pieces of SIZE = 2 ** STAGES."""
    for _ in tl.static_range(STAGES):  # sums to the first half, differences to the second
        even, odd = tl.split(tl.reshape(x, [PADDED // 2, 2]))
        pairs = tl.reshape(tl.join(even + odd, even - odd), [PADDED // SIZE, SIZE // 2, 2])
        x = tl.reshape(tl.permute(pairs, (0, 2, 1)), [PADDED])
    return x * (SIZE**-0.5)


@triton.jit
def _put(x, cache, scales, at, d, is_in, D: tl.constexpr, IS_INT8: tl.constexpr):
    """Head x into place `at` of a cache of 8 bits, with its scale."""
    largest = 127.0 if IS_INT8 else 448.0
    scale = tl.maximum(tl.max(tl.where(is_in, tl.abs(x), 0.0), 0), 1e-20) / largest
    y = tl.minimum(tl.maximum(x / scale, -largest), largest)
    if IS_INT8:  # to nearest even: a float of this size has no bits behind the point
        y = (y + 12582912.0) - 12582912.0
    tl.store(scales + at, scale)
    tl.store(cache + at * D + d, y.to(cache.dtype.element_ty), is_in)


@triton.jit
def _turned(
    x, weight, positions, axes, table, t, T, d, is_in, eps,
    D: tl.constexpr, R: tl.constexpr, OFFSET: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    HAS_AXES: tl.constexpr, HAS_NORM: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Head x of token t, normalised and turned, as fp32."""
    wide = tl.load(x + d, is_in, 0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    row = _normed(x, weight, d, is_in, factor, IS_WIDE, HAS_NORM)
    i = d - OFFSET  # place among the turned ones
    is_turned = is_in & (i >= 0) & (i < R)
    if IS_INTERLEAVED:
        is_second, column, partner = i % 2 == 1, i // 2, d + 1 - 2 * (i % 2)
    else:
        is_second, column = i >= R // 2, i % (R // 2)
        partner = tl.where(is_second, d - R // 2, d + R // 2)
    other = _normed(x, weight, partner, is_turned, factor, IS_WIDE, HAS_NORM)
    position = tl.load(positions + t)
    if HAS_AXES:
        axis = tl.load(axes + column, is_turned, 0)
        position = tl.load(positions + axis * T + t, is_turned, 0)
    cos = tl.load(table + position * R + column, is_turned, 1.0)
    sin = tl.load(table + position * R + R // 2 + column, is_turned, 0.0)
    turned = row * cos + tl.where(is_second, other, -other) * sin
    return tl.where(is_turned, turned, row)


@triton.jit
def _norm_rope_store(
    q, k, v, q_weight, k_weight, positions, axes, table, slots, out, k_cache, v_cache,
    k_scales, v_scales, eps, T,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
    OFFSET: tl.constexpr, IS_INTERLEAVED: tl.constexpr, HAS_AXES: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_WIDE: tl.constexpr,
    IS_8BIT: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    IS_INT8: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DP)
    is_in = d < D
    at = tl.load(slots + t) * KV  # the slot's first head
    if head >= H + KV:  # v
        kv = head - H - KV
        row = tl.load(v + t * v_stride + kv * v_head_stride + d, is_in, 0.0)
        if IS_8BIT:
            row = hadamard(row.to(tl.float32), DP, SIZE, STAGES)
            _put(row, v_cache, v_scales, at + kv, d, is_in, D, IS_INT8)
        else:
            tl.store(v_cache + (at + kv) * D + d, row, is_in)
    else:
        is_k = head >= H
        x, weight = q + t * q_stride + head * q_head_stride, q_weight
        if is_k:
            x, weight = k + t * k_stride + (head - H) * k_head_stride, k_weight
        row = _turned(x, weight, positions, axes, table, t, T, d, is_in, eps, D, R, OFFSET,
                      IS_INTERLEAVED, HAS_AXES, HAS_NORM, IS_WIDE)  # fmt: skip
        row = row.to(out.dtype.element_ty)
        if IS_8BIT:
            row = hadamard(row.to(tl.float32), DP, SIZE, STAGES)
        if not is_k:
            tl.store(out + (t * H + head) * D + d, row.to(out.dtype.element_ty), is_in)
        elif IS_8BIT:
            _put(row, k_cache, k_scales, at + head - H, d, is_in, D, IS_INT8)
        else:
            tl.store(k_cache + (at + head - H) * D + d, row, is_in)


def norm_rope_store_triton(
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
    (T, H, D), KV = q.shape, k.shape[1]
    out = torch.empty((T, H, D), dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    axes = rope_axes(positions, rope)
    weights, eps = ((q, k), 0.0) if norms is None else (norms[:2], norms.eps)
    k_scales, v_scales, is_rotated = scales or (out, out, False)
    size = piece_of(D) if is_rotated else 1
    strides = (s for x in (q, k, v) for s in x.stride()[:2])
    _norm_rope_store[(T, H + 2 * KV)](
        q, k, v, *weights, positions, positions if axes is None else axes, rope.cos_sin,
        slot_mapping, out, k_cache, v_cache, k_scales, v_scales, eps, T, *strides,
        H=H, KV=KV, D=D, DP=triton.next_power_of_2(D), R=rope.cos_sin.shape[1],
        OFFSET=rope.offset, IS_INTERLEAVED=rope.is_interleaved, HAS_AXES=axes is not None,
        HAS_NORM=norms is not None,
        IS_WIDE=norms is not None and norms.q_weight.dtype != q.dtype,
        IS_8BIT=scales is not None, SIZE=size, STAGES=size.bit_length() - 1, num_warps=1,
    )  # fmt: skip
    return out
