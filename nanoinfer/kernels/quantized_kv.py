"""Keys and values in 8 bits: a scale for each token and head, and a rotation before, if asked for.

    scale = max |x| / largest        value = x / scale, rounded to int8 (127) or e4m3 (448)

In: heads [..., D]. Out: values [..., D], scales [...] in fp32. What must hold: attention over the
values times their scales is attention over x, up to rounding.

One large dimension takes the range of all others. A Hadamard matrix, normalised, turns a head so
that each dimension holds a share of all:

    H = D^-1/2 [[1, 1], [1, -1]] (x) ... (x) [[1, 1], [1, -1]]        H = H^T = H^-1

Scores do not change when q and k are both turned, and what was found among turned values is turned
back by H once more. Other than by rotary angles, all tokens are turned alike.

Source: QuaRot (2024) for the rotation; KIVI and vLLM for the scales. D head dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

KV_DTYPES = (torch.int8, torch.float8_e4m3fn)
_MIN_AMAX = 1e-20  # a head of zeros has a scale, too


class KVScales(NamedTuple):
    """Scales of a layer's keys and values, each [num_blocks, block_size, KV] fp32."""

    k: Tensor
    v: Tensor
    is_rotated: bool


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] -> values [..., D] of `dtype` (int8 or float8_e4m3fn), scales [...] fp32."""
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.float()
    scales = wide.abs().amax(-1).clamp(min=_MIN_AMAX) / largest
    values = (wide / scales[..., None]).clamp(-largest, largest)
    return (values.round() if dtype == torch.int8 else values).to(dtype), scales


def dequantize_heads(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values [..., D], scales [...] -> [..., D], rounded once."""
    return (values.float() * scales[..., None]).to(dtype)


def piece_of(D: int) -> int:
    """The largest power of two that divides D: as much of a head as is turned at once."""
    return D & -D


def hadamard(x: Tensor) -> Tensor:
    """Heads [..., D] -> H heads in fp32, in pieces where D is no power of two."""
    size = piece_of(x.shape[-1])
    wide = x.float().unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):  # sums to the first half, differences to the second
        even, odd = wide[..., ::2], wide[..., 1::2]
        wide = torch.cat((even + odd, even - odd), -1)
    return wide.flatten(-2) * size**-0.5


def check_cache(
    dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor, scales: KVScales | None
) -> None:
    """Raise ValueError unless heads of `dtype` may be in these caches."""
    allowed = (dtype,) if scales is None else KV_DTYPES
    if k_cache.dtype not in allowed or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"k_cache, v_cache: got {k_cache.dtype}, {v_cache.dtype} for heads of {dtype}, need "
            f"one of {', '.join(map(str, allowed))} for both; try KVCacheSpec.allocate"
        )
    for name, x in () if scales is None else (("k", scales.k), ("v", scales.v)):
        if x.shape != k_cache.shape[:3] or x.dtype != torch.float32:
            raise ValueError(
                f"scales.{name}: got {x.dtype} {tuple(x.shape)}, need torch.float32 "
                f"{tuple(k_cache.shape[:3])}, one for each head; try KVCacheSpec.allocate"
            )
