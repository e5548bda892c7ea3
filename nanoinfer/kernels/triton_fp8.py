"""FP8 linear layers on a GPU: rows are quantised, and multiplied with blocks of the weight.

In: x [M, K] in bf16, W [N, K] in e4m3 with a scale for each block of 128 x 128. Out: y [M, N].

    x  ->  values e4m3, a scale for each 128 neighbours      W's values, a scale for each block
    y  =   sum over groups g of K:  (x_g W_g^T) * scale of x_g * scale of W_g

Products of e4m3 are summed in fp32 within a group, and each group is scaled once. Two bodies: this
kernel, which is at its best with few rows, and torch's `scaled_mm` (cuBLAS) on Hopper with many,
which wants its scales in columns padded to 4 (`scales_for_cublas`).

Imported only on a machine with a GPU (or to test).
Source: DeepSeek-V3's recipe, as in Qwen3's FP8 checkpoints. M rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.linear import BLOCK, PackedWeight
from nanoinfer.kernels.quantize import FP8, FP8_MAX, MIN_AMAX, Quantized

_ROWS, _COLUMNS = 16, 64
_PAD = 4  # rows of x, and scales of a column, that cuBLAS counts in
_MANY_ROWS = 64  # from here on cuBLAS


@triton.jit
def _quantize(
    x, values, scales, x_stride, K, scale_row, scale_group,
    GROUP: tl.constexpr, MAX: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = group * GROUP + tl.arange(0, GROUP)
    numbers = tl.load(x + row * x_stride + k).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), 0), LEAST) / MAX
    scaled = tl.minimum(tl.maximum(numbers / scale, -MAX), MAX)
    tl.store(values + row * K + k, scaled.to(values.dtype.element_ty))
    tl.store(scales + row * scale_row + group * scale_group, scale)


def quantize_triton(x: Tensor) -> Quantized:
    """x [M, K] -> values [M, K] e4m3, scales [M, K/128] fp32 by column; room for rows in fours."""
    (M, K), padded = x.shape, len(x) + -len(x) % _PAD
    values = torch.empty((padded, K), dtype=FP8, device=x.device)[:M]
    scales = torch.empty((K // BLOCK, padded), device=x.device).T[:M]
    if M > 0:
        strides = (x.stride(0), K, *scales.stride())
        _quantize[(M, K // BLOCK)](x, values, scales, *strides, BLOCK, FP8_MAX, MIN_AMAX)
    return Quantized(values, scales)


@triton.jit
def _multiply_blocks(
    x, weight, bias, y, x_scales, w_scales, M, N, K, xs_row, xs_group, ws_row, ws_group,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, GROUP)
    is_row, is_column = m < M, n < N
    from_x, from_w = x + m[:, None] * K + k[None, :], weight + n[None, :] * K + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in range(0, K // GROUP):
        a = tl.load(from_x + group * GROUP, is_row[:, None], 0.0)
        b = tl.load(from_w + group * GROUP, is_column[None, :], 0.0)
        of_x = tl.load(x_scales + m * xs_row + group * xs_group, is_row, 0.0)
        of_w = tl.load(w_scales + (n // GROUP) * ws_row + group * ws_group, is_column, 0.0)
        acc += tl.dot(a, b) * of_x[:, None] * of_w[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, is_column, 0.0).to(tl.float32)[None, :]
    is_in = is_row[:, None] & is_column[None, :]
    tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), is_in)


def multiply_triton(
    x: Quantized, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (M, K), N = x.values.shape, len(weight)
    y = torch.empty((M, N), dtype=dtype, device=weight.device)
    grid = (triton.cdiv(M, _ROWS), triton.cdiv(N, _COLUMNS))
    strides = (*x.scales.stride(), *scales.stride())
    if M > 0:
        _multiply_blocks[grid](
            x.values, weight, y if bias is None else bias, y, x.scales, scales, M, N, K, *strides,
            HAS_BIAS=bias is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, GROUP=BLOCK,
        )  # fmt: skip
    return y


def scales_for_cublas(scales: Tensor) -> Tensor:
    """[N/128, K/128] -> [L, N/128] of strides (1, L): L is K/128 rounded up to 4, zeros behind."""
    num_rows, num_groups = scales.shape
    padded = scales.new_zeros(num_rows, num_groups + -num_groups % _PAD)
    padded[:, :num_groups] = scales
    return padded.T


def multiply_cublas(
    x: Quantized, weight: Tensor, cublas_scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`scaled_mm` of 1 x 128 by 128 x 128. It takes rows in fours; those behind x hold anything."""
    kinds, M = F.ScalingType, len(x.values)  # type: ignore[attr-defined]
    values, scales = (_first_rows(part, M + -M % _PAD) for part in x[:2])
    recipes = (scales, kinds.BlockWise1x128, cublas_scales, kinds.BlockWise128x128)
    y = F.scaled_mm(values, weight.T, *recipes, output_dtype=dtype)  # type: ignore[attr-defined]
    y = _first_rows(y, M)
    return y if bias is None else y + bias


def _first_rows(x: Tensor, count: int) -> Tensor:
    """More than x has, where its memory goes on."""
    return x.as_strided((count, x.shape[1]), x.stride())


class LinearCuda:
    """FP8 weights stay as they are; a GPU's capability, such as (9, 0), says who multiplies."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._has_cublas = capability[0] == 9  # Blackwell wants other scales

    def pack(self, weight: Tensor, scales: Tensor | None) -> PackedWeight | None:
        if weight.dtype != FP8 or scales is None or weight.shape[1] % BLOCK != 0:
            return None
        for_cublas = scales_for_cublas(scales) if self._has_cublas else None

        def multiply(x: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
            dtype, rows = torch.float32 if is_wide else x.dtype, quantize_triton(x)
            if for_cublas is not None and len(x) >= _MANY_ROWS and not is_wide:
                return multiply_cublas(rows, weight, for_cublas, bias, dtype)
            return multiply_triton(rows, weight, scales, bias, dtype)

        return PackedWeight(multiply, lambda: weight, None)
