"""FP8 rows: values of 8 bits, and one scale for each group of neighbours.

    scale = max(amax |group|, 1e-4) / 448        value = e4m3(x / scale)        448: e4m3's largest

In: x [T, N]. Out: a `Quantized`. What consumes the scales decides how they lie (`ScaleLayout`):

    rows       [T, G] fp32                       a plain GEMM
    columns    the same, strides (1, T')         a GEMM that fetches scales by column (TMA); T' is T
               rounded up to 4, so that each column starts on 16 bytes
    packed     four scales in an int32           powers of two: only the exponent is kept (E8M0),
               [T, G / 4], rows or columns       one byte, rounded up so that nothing overflows

Source: DeepGEMM's casts. T tokens, N width, G groups in a row.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
MIN_AMAX = 1e-4  # a group of zeros has a scale, too
PACK = 4  # exponents in an int32, and rows that a column is padded to
_MANTISSA_BITS, _MANTISSA, _NAN = 23, 0x7FFFFF, 255  # of fp32


class ScaleLayout(NamedTuple):
    """How many neighbours share a scale, and how scales lie in memory."""

    group_size: int = 128
    is_column_major: bool = False
    is_packed: bool = False

    def num_groups(self, N: int) -> int:
        """Raises ValueError where groups (or packs of 4 of them) do not fill the row."""
        unit = self.group_size * (PACK if self.is_packed else 1)
        if N % unit != 0:
            raise ValueError(f"row: got {N} values, need a multiple of {unit}; try a smaller group")
        return N // self.group_size


class Quantized(NamedTuple):
    """values [T, N] e4m3; scales as their layout says; the row before, where it was asked for."""

    values: Tensor
    scales: Tensor
    copy: Tensor | None = None


def quantize_ref(x: Tensor, layout: ScaleLayout) -> Quantized:
    """x [T, N] -> Quantized without a copy; rows of any float dtype.

    Raises ValueError for other shapes, and for rows that the groups do not fill.
    """
    if x.dim() != 2:
        raise ValueError(f"x: got {tuple(x.shape)}, need [T, N]; try x.flatten(0, -2)")
    num_groups = layout.num_groups(x.size(-1))
    groups = x.float().unflatten(-1, (num_groups, layout.group_size))  # [T, G, group_size]
    scales = groups.abs().amax(-1).clamp(min=MIN_AMAX) / FP8_MAX  # [T, G]
    if layout.is_packed:
        exponents = _exponents(scales)
        scales = (exponents << _MANTISSA_BITS).view(torch.float32)
        stored = exponents.to(torch.uint8).view(torch.int32)  # [T, G / 4]
    else:
        stored = scales
    values = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    if layout.is_column_major:
        T, width = stored.shape
        columns = stored.new_zeros(width, T + -T % PACK)
        columns[:, :T] = stored.T
        stored = columns.T[:T]
    return Quantized(values.flatten(-2), stored)


def dequantize(x: Quantized) -> Tensor:
    """The fp32 rows [T, N] that the GEMM sees."""
    scales = x.scales
    if scales.dtype == torch.int32:
        # Not .contiguous(): that keeps the strides of a single column, which no view can take.
        dense = scales.clone(memory_format=torch.contiguous_format)  # [T, G / 4]
        exponents = dense.view(torch.uint8).to(torch.int32)  # [T, G]
        scales = (exponents << _MANTISSA_BITS).view(torch.float32)
    groups = x.values.float().unflatten(-1, (scales.size(-1), -1))
    return (groups * scales[..., None]).flatten(-2)


def _exponents(scales: Tensor) -> Tensor:
    """Biased exponents of the powers of two that scales are rounded up to."""
    bits = scales.view(torch.int32)
    exponents = (bits >> _MANTISSA_BITS) + (bits & _MANTISSA).ne(0)
    return exponents.clamp(max=_NAN)
