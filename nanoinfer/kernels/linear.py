"""y = x W^T (+ b), for every dtype of W, into rows that start on 32-byte boundaries.

    W                   scales                        the product
    bf16, fp32, fp16    none                          in W's dtype, summed in fp32
    int8                [N] fp32, one a row           x to int8 by token, int32 sums, times both
    float8_e4m3fn       [N/128, K/128] fp32, a block  W (and x, if Quantized) widened, fp32

`weight.dtype` alone decides. x [M, K] may be a `Quantized`; y [M, N] has x's dtype, or bf16.

Rows of y: 16-byte and wider loads of what comes next want aligned rows, so that a row of N values
occupies N rounded up, and y is a view of the first N:

    N = 5, fp32, 8 to 32 bytes:   storage  y y y y y . . .     y = storage[:, :5], strides (8, 1)
                                           y y y y y . . .

Source: DeepInfer's and DeepGEMM's contract. M rows, K inputs, N outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.quantize import FP8, FP8_MAX, MIN_AMAX, Quantized, dequantize

ROW_BYTES = 32
BLOCK = 128  # rows and columns of an FP8 weight that share a scale
_INT8_MAX = 127


def empty_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[..., N], uninitialised, each row on a 32-byte boundary."""
    per_unit = ROW_BYTES // dtype.itemsize
    width = -(-shape[-1] // per_unit) * per_unit
    return torch.empty((*shape[:-1], width), dtype=dtype, device=device)[..., : shape[-1]]


def check_out(name: str, out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError for a buffer that is not [..., N] of `dtype` on 32-byte rows."""
    if out.shape != shape or out.dtype != dtype:
        found, need = f"{tuple(out.shape)} {out.dtype}", f"{shape} {dtype}"
    elif has_aligned_rows(out):
        return
    else:
        found = f"strides {out.stride()} of {dtype} at {out.data_ptr():#x}"
        need = f"values of a row side by side, rows apart and on {ROW_BYTES}-byte boundaries"
    raise ValueError(f"{name}: got {found}, need {need}; try nanoinfer.kernels.linear.empty_rows")


def has_aligned_rows(x: Tensor) -> bool:
    if x.numel() == 0:
        return True
    # The strides of dimensions of size 1 are never used.
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    values = strides.pop() if x.shape[-1] > 1 else 1
    is_apart = all(stride >= x.shape[-1] for stride in strides)
    starts = (x.data_ptr(), *(stride * x.itemsize for stride in strides))
    return values == 1 and is_apart and all(start % ROW_BYTES == 0 for start in starts)


def flatten_rows(name: str, x: Tensor) -> Tensor:
    """[..., N] -> [M, N], a view with the rows' own stride; ValueError where none exists."""
    try:
        return x.view(-1, x.shape[-1]) if x.numel() else x.reshape(-1, x.shape[-1])
    except RuntimeError as error:
        raise ValueError(
            f"{name}: got strides {x.stride()} for {tuple(x.shape)}, need leading dimensions that "
            "can be counted as one; try .contiguous()"
        ) from error


def linear_ref(
    x: Tensor | Quantized,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    is_accumulating: bool = False,
) -> None:
    """out [M, N] = x W^T + b, or += where `is_accumulating`. Shapes are the caller's to check."""
    is_of_three = is_accumulating and bias is not None  # terms; rounded once below
    if weight.dtype.itemsize > 1 and not isinstance(x, Quantized) and not is_of_three:
        if is_accumulating:
            out.addmm_(x, weight.T)
        elif bias is not None:
            torch.addmm(bias, x, weight.T, out=out)
        else:
            torch.mm(x, weight.T, out=out)
        return
    product = _wide_product(x, weight, scales)  # [M, N] fp32
    if bias is not None:
        product += bias
    out.copy_(product + out if is_accumulating else product)


def _wide_product(x: Tensor | Quantized, weight: Tensor, scales: Tensor | None) -> Tensor:
    rows = dequantize(x) if isinstance(x, Quantized) else x.float()  # [M, K]
    if scales is None:
        return F.linear(rows, weight.float())
    if weight.dtype == torch.int8:
        values, factors = quantize_rows_int8(rows)
        sums = F.linear(values.double(), weight.double())  # exact, as int32 sums would be
        return sums.float() * factors[:, None] * scales
    return F.linear(rows, dequantize_blocks(weight, scales))


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] -> int8 values, and the fp32 factor of each row: symmetric, largest to 127."""
    factors = x.float().abs().amax(-1).clamp(min=MIN_AMAX) / _INT8_MAX  # [M]
    return (x / factors[:, None]).round().to(torch.int8), factors


def quantize_blocks_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3 values, and one fp32 scale for each block of 128 x 128."""
    N, K = weight.shape
    padded = F.pad(weight.float(), (0, -K % BLOCK, 0, -N % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N/128, 128, K/128, 128]
    scales = blocks.abs().amax((1, 3)).clamp(min=MIN_AMAX) / FP8_MAX
    return (weight.float() / _expand_blocks(scales, N, K)).to(FP8), scales


def dequantize_blocks(weight: Tensor, scales: Tensor) -> Tensor:
    return weight.float() * _expand_blocks(scales, *weight.shape)


def _expand_blocks(scales: Tensor, N: int, K: int) -> Tensor:
    """[N/128, K/128] -> [N, K]."""
    return scales.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
