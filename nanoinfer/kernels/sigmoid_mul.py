"""The gate behind attention (Qwen3.5): x * sigmoid(gate), head by head.

sigmoid(x) = 1 / (1 + e^-x). It is rounded to the tensor's dtype before it is multiplied.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

SigmoidMul = Callable[[Tensor, Tensor], Tensor]


def sigmoid_mul_ref(x: Tensor, gate: Tensor) -> Tensor:
    """x, gate [T, H, D] -> [T, H, D]."""
    return x * gate.sigmoid()


def make_sigmoid_mul_cpu(library: ctypes.CDLL, threads: int) -> SigmoidMul:
    """Bind the C++ twin: x [T, H, D] contiguous, gate's rows and heads may be strided.

    The function raises ValueError for tensors that the kernel cannot take.
    """
    kernel = library.nanoinfer_sigmoid_mul
    pointers, sizes = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 5
    kernel.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_int]
    kernel.restype = None

    def sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> Tensor:
        is_known = x.dtype in (torch.bfloat16, torch.float32) and gate.dtype == x.dtype
        if not is_known or x.dim() != 3 or gate.shape != x.shape or gate.stride(2) != 1:
            raise ValueError(
                f"x, gate: got {x.dtype} {tuple(x.shape)}, {gate.dtype} {tuple(gate.shape)} of "
                f"strides {gate.stride()}; need bfloat16 or float32 [T, H, D], the last stride 1; "
                "try sigmoid_mul_ref"
            )
        if not (x.is_cpu and gate.is_cpu and x.is_contiguous()):
            raise ValueError(
                f"x, gate: got {x.device} of strides {x.stride()}, {gate.device}; need both on "
                "cpu, x contiguous; try .cpu(), .contiguous()"
            )
        out = torch.empty(x.shape, dtype=x.dtype)
        addresses = out.data_ptr(), x.data_ptr(), gate.data_ptr()
        strides = gate.stride()[:2]
        kernel(x.dtype == torch.bfloat16, *addresses, *x.shape, *strides, threads)
        return out

    return sigmoid_mul_cpu
