"""The gated delta net's kernels on a GPU: the Triton twins of causal_conv.py and gated_delta.py.

In, out and what must hold: those files say it. Grids are known from shapes alone; slots, lengths
and sources are read on the device, so that a CUDA graph replays them for any batch.

The rule goes token by token: a program keeps some columns of one head's state in registers, and all
tokens of its sequence pass over it. That is what decoding needs (the state is read and written
once); a long prompt would be faster in chunks, as products of matrices.

Imported only on a machine with a GPU (or to test).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.gated_delta import Decay

_COLUMNS = 32
_CHANNELS = 256


@triton.jit
def _convolve(
    x, weight, state, out, bounds, sources, slots, C, x_stride,
    K: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    s, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_in = c < C
    first, last = tl.load(bounds + s), tl.load(bounds + s + 1)
    source, slot = tl.load(sources + s).to(tl.int64), tl.load(slots + s).to(tl.int64)
    has_past = is_in & (source > 0)
    # The last K - 1 = 3 rows; K is the only number of taps that any checkpoint has.
    a = tl.load(state + (source * (K - 1) + 0) * C + c, has_past, 0.0).to(tl.float32)
    b = tl.load(state + (source * (K - 1) + 1) * C + c, has_past, 0.0).to(tl.float32)
    d = tl.load(state + (source * (K - 1) + 2) * C + c, has_past, 0.0).to(tl.float32)
    w0, w1 = tl.load(weight + c, is_in, 0.0), tl.load(weight + C + c, is_in, 0.0)
    w2, w3 = tl.load(weight + 2 * C + c, is_in, 0.0), tl.load(weight + 3 * C + c, is_in, 0.0)
    x += first.to(tl.int64) * x_stride + c
    out += first.to(tl.int64) * C + c
    for _ in range(first, last):
        row = tl.load(x, is_in, 0.0).to(tl.float32)
        mixed = (a * w0 + b * w1 + d * w2 + row * w3).to(out.dtype.element_ty).to(tl.float32)
        y = mixed / (1.0 + tl.exp(-mixed))
        tl.store(out, y.to(out.dtype.element_ty), is_in)
        a, b, d = b, d, row
        x += x_stride
        out += C
    if first < last:
        kept = state + slot * (K - 1) * C + c
        tl.store(kept, a.to(state.dtype.element_ty), is_in)
        tl.store(kept + C, b.to(state.dtype.element_ty), is_in)
        tl.store(kept + 2 * C, d.to(state.dtype.element_ty), is_in)


def causal_conv_triton(
    x: Tensor, weight: Tensor, state: Tensor, cu_seqlens_q: Tensor, sources: Tensor, slots: Tensor
) -> Tensor:
    (T, C), K = x.shape, len(weight)
    if K != 4:
        raise ValueError(f"weight: got {K} taps, need 4")
    out = torch.zeros((T, C), dtype=x.dtype, device=x.device)
    grid = (len(slots), triton.cdiv(C, _CHANNELS))
    _convolve[grid](
        x, weight, state, out, cu_seqlens_q, sources, slots, C, x.stride(0), K=K,
        CHANNELS=_CHANNELS,
    )  # fmt: skip
    return out


@triton.jit
def _apply_rule(
    q, k, v, a, b, A_log, dt_bias, state, out, bounds, sources, slots,
    scale, q_stride, k_stride, v_stride, a_stride, b_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    s, head = tl.program_id(0), tl.program_id(1)
    i, j = tl.arange(0, DKP), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = i < DK, j < DV
    is_in = is_key[:, None] & is_value[None, :]
    first, last = tl.load(bounds + s), tl.load(bounds + s + 1)
    source, slot = tl.load(sources + s).to(tl.int64), tl.load(slots + s).to(tl.int64)
    at = head * DK * DV + i[:, None] * DV + j[None, :]
    S = tl.load(state + source * HV * DK * DV + at, is_in & (source > 0), 0.0)
    shared = head // (HV // HK)
    rate, bias = tl.exp(tl.load(A_log + head)), tl.load(dt_bias + head)
    t = first.to(tl.int64)
    q, k = q + t * q_stride + shared * DK + i, k + t * k_stride + shared * DK + i
    v, out = v + t * v_stride + head * DV + j, out + (t * HV + head) * DV + j
    a, b = a + t * a_stride + head, b + t * b_stride + head
    for _ in range(first, last):
        query = tl.load(q, is_key, 0.0).to(tl.float32)
        key = tl.load(k, is_key, 0.0).to(tl.float32)
        value = tl.load(v, is_value, 0.0).to(tl.float32)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6))
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        x = tl.load(a).to(tl.float32) + bias
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b).to(tl.float32)))
        S = S * tl.exp(-rate * softplus)
        u = (value - tl.sum(S * key[:, None], 0)) * beta
        S = S + key[:, None] * u[None, :]
        answer = tl.sum(S * query[:, None], 0)
        tl.store(out, answer.to(out.dtype.element_ty), is_value)
        q, k, v, a, b = q + q_stride, k + k_stride, v + v_stride, a + a_stride, b + b_stride
        out += HV * DV
    if first < last:
        tl.store(state + slot * HV * DK * DV + at, S, is_in)


def gated_delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Decay,
    state: Tensor,
    cu_seqlens_q: Tensor,
    sources: Tensor,
    slots: Tensor,
) -> Tensor:
    (_, HK, DK), (_, HV, DV) = q.shape, v.shape[:3]
    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    columns = min(_COLUMNS, triton.next_power_of_2(DV))
    strides = (q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0))
    _apply_rule[(len(slots), HV, triton.cdiv(DV, columns))](
        q, k, v, a, b, *decay, state, out, cu_seqlens_q, sources, slots, DK**-0.5, *strides,
        HK=HK, HV=HV, DK=DK, DKP=triton.next_power_of_2(DK), DV=DV, COLUMNS=columns,
    )  # fmt: skip
    return out
