"""RMSNorm, alone and fused with the residual addition before it.

    y = x / sqrt(mean(x^2) + eps) * weight

Statistics are fp32, whatever x is: a sum of a thousand squares overflows fp16 and loses bf16's few
bits. The residual stream is added first and rounded to x's dtype; the norm is of the rounded sum,
so that what the next layer adds to is exactly what was normalised.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
AddRmsNorm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> y [..., N] in x's dtype."""
    hidden = x.float()
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)).to(x.dtype) * weight


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] -> (norm(x + residual), x + residual), both in x's dtype."""
    residual = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(residual, weight, eps), residual


def make_rms_norm_cpu(library: ctypes.CDLL, threads: int) -> RmsNorm:
    """Bind the C++ twin: x [T, N] or [T, H, N], rows may be strided; bf16 or fp32.

    The function raises ValueError for tensors that the kernel cannot take.
    """
    kernel = _bind(library)

    def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        T, H, N, *strides = _layout("x", x, weight)
        out = torch.empty(x.shape, dtype=x.dtype)
        outputs, inputs = (out.data_ptr(), None), (x.data_ptr(), None, weight.data_ptr())
        is_bf16 = x.dtype == torch.bfloat16
        kernel(is_bf16, *outputs, *inputs, T, H, N, *strides, 0, 0, eps, threads)
        return out

    return rms_norm_cpu


def make_add_rms_norm_cpu(library: ctypes.CDLL, threads: int) -> AddRmsNorm:
    """Bind the C++ twin: x, residual [T, N] or [T, H, N], rows may be strided; bf16 or fp32.

    The function raises ValueError for tensors that the kernel cannot take.
    """
    kernel = _bind(library)

    def add_rms_norm_cpu(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if x.shape != residual.shape:
            raise ValueError(
                f"residual: got {tuple(residual.shape)}, need x's {tuple(x.shape)}; "
                "try residual.expand_as(x)"
            )
        T, H, N, *strides = _layout("x", x, weight)
        strides += _layout("residual", residual, weight)[3:]
        out, added = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
        outputs = (out.data_ptr(), added.data_ptr())
        inputs = (x.data_ptr(), residual.data_ptr(), weight.data_ptr())
        kernel(x.dtype == torch.bfloat16, *outputs, *inputs, T, H, N, *strides, eps, threads)
        return out, added

    return add_rms_norm_cpu


def _bind(library: ctypes.CDLL) -> Callable[..., None]:
    kernel = library.nanoinfer_rms_norm
    pointers, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 7
    kernel.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_float, ctypes.c_int]
    kernel.restype = None
    return kernel


def _layout(name: str, x: Tensor, weight: Tensor) -> tuple[int, ...]:
    """T, H, N of x and the strides of its first two dimensions, in elements."""
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dtype != weight.dtype:
        raise ValueError(
            f"{name}, weight: got {x.dtype}, {weight.dtype}, need one of bfloat16, float32 for "
            "both; try rms_norm_ref"
        )
    if not (x.is_cpu and weight.is_cpu):
        raise ValueError(f"{name}, weight: got {x.device}, {weight.device}, need cpu; try .cpu()")
    shape, strides = x.shape, x.stride()
    if len(shape) not in (2, 3) or weight.shape != shape[-1:]:
        raise ValueError(
            f"{name}, weight: got {tuple(shape)}, {tuple(weight.shape)}, need [T, N] or "
            "[T, H, N], and [N]; try x.flatten(0, -2)"
        )
    if shape[-1] != 1 and not strides[-1] == weight.stride(0) == 1:
        raise ValueError(
            f"{name}, weight: got strides {strides}, {weight.stride()}, need the last to be 1; "
            "try .contiguous()"
        )
    if len(shape) == 2:
        return shape[0], 1, shape[1], strides[0], 0
    return *shape, *strides[:2]
