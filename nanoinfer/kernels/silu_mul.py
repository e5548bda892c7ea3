"""SwiGLU's activation: silu(gate) * up, from one tensor that holds both halves.

silu(x) = x / (1 + e^-x). It is rounded to the tensor's dtype before it is multiplied.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SiluMul = Callable[[Tensor], Tensor]


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2N] -> [..., N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def make_silu_mul_cpu(library: ctypes.CDLL, threads: int) -> SiluMul:
    """Bind the C++ twin: gate_up [T, 2N], rows may be strided; bf16 or fp32.

    The function raises ValueError for a tensor that the kernel cannot take.
    """
    kernel = library.nanoinfer_silu_mul
    pointers, sizes = [ctypes.c_void_p] * 2, [ctypes.c_int64] * 3
    kernel.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_int]
    kernel.restype = None

    def silu_mul_cpu(gate_up: Tensor) -> Tensor:
        _check(gate_up)
        dtype, (T, columns) = gate_up.dtype, gate_up.shape
        N = columns // 2
        out = torch.empty((T, N), dtype=dtype)
        pointers = out.data_ptr(), gate_up.data_ptr()
        kernel(dtype == torch.bfloat16, *pointers, T, N, gate_up.stride(0), threads)
        return out

    return silu_mul_cpu


def _check(gate_up: Tensor) -> None:
    if gate_up.dtype not in (torch.bfloat16, torch.float32) or not gate_up.is_cpu:
        raise ValueError(
            f"gate_up: got {gate_up.dtype} on {gate_up.device}, need bfloat16 or float32 on cpu; "
            "try silu_mul_ref"
        )
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 != 0:
        raise ValueError(
            f"gate_up: got {tuple(gate_up.shape)}, need [T, 2N]; try gate_up.flatten(0, -2)"
        )
    if gate_up.stride(1) != 1:
        raise ValueError(
            f"gate_up: got strides {gate_up.stride()}, need the last to be 1; try .contiguous()"
        )
