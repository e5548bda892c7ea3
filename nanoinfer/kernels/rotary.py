"""Rotary position embedding: pairs of dimensions turned by an angle that grows with position.

    [y1]   [cos  -sin] [x1]
    [y2] = [sin   cos] [x2]      x1 = x[..., : R/2],  x2 = x[..., R/2 : R]   (neox pairing)

One table row is [cos | sin] of one position, read once per token. T tokens, H heads, D head dim,
R rotated dims (R <= D; the rest passes through).
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotary_ref(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """positions [T], query [T, H, D], key [T, KV, D], cos_sin [P, R] -> rotated query, key."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.size(-1)
    x1, x2 = x[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)


def make_rotary_cpu(library: ctypes.CDLL, threads: int) -> Rotary:
    """Bind the C++ twin: the reference's bits, bf16 or fp32, rows and heads may be strided.

    The function raises ValueError for tensors that the kernel cannot take, and for positions
    without a row in the table.
    """
    kernel = library.nanoinfer_rotary
    pointers, sizes = [ctypes.c_void_p] * 6, [ctypes.c_int64] * 10
    kernel.argtypes = [ctypes.c_int, *pointers, *sizes, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def rotary_cpu(
        positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        _check_shapes(positions, query, key, cos_sin)
        _check_memory(positions, query, key, cos_sin)
        dtype = query.dtype
        turned = torch.empty(query.shape, dtype=dtype), torch.empty(key.shape, dtype=dtype)
        T, H, D = query.shape
        tensors = (*turned, query, key, positions, cos_sin)
        pointers = [tensor.data_ptr() for tensor in tensors]
        sizes = (T, H, key.shape[1], D, *cos_sin.shape)
        strides = (*query.stride()[:2], *key.stride()[:2])
        invalid = kernel(dtype == torch.bfloat16, *pointers, *sizes, *strides, threads)
        if invalid >= 0:
            raise ValueError(
                f"positions: got {positions[invalid].item()} at token {invalid}, need 0 to "
                f"{len(cos_sin) - 1}, a row of the table; try a larger max_position"
            )
        return turned

    return rotary_cpu


def _check_shapes(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
    shapes = positions.shape, query.shape, key.shape, cos_sin.shape
    if [*map(len, shapes)] != [1, 3, 3, 2] or not len(positions) == len(query) == len(key):
        need = "[T], [T, H, D], [T, KV, D], [P, R]; try query.view(T, -1, head_dim)"
    elif query.shape[2] != key.shape[2]:
        need = "one head dim for query and key; try query.view(T, -1, head_dim)"
    elif cos_sin.shape[1] > query.shape[2] or cos_sin.shape[1] % 2 != 0:
        need = f"an even R of at most {query.shape[2]}; try the table of this model"
    else:
        return
    found = ", ".join(str(tuple(shape)) for shape in shapes)
    raise ValueError(f"positions, query, key, cos_sin: got {found}, need {need}")


def _check_memory(positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor) -> None:
    if query.dtype not in (torch.bfloat16, torch.float32) or query.dtype != key.dtype:
        raise ValueError(
            f"query, key: got {query.dtype}, {key.dtype}, need one of bfloat16, float32 for "
            "both; try rotary_ref"
        )
    if positions.dtype != torch.int64 or cos_sin.dtype != torch.float32:
        raise ValueError(
            f"positions, cos_sin: got {positions.dtype}, {cos_sin.dtype}, need int64, float32; "
            "try .long(), .float()"
        )
    if not (positions.is_contiguous() and cos_sin.is_contiguous()):
        raise ValueError("positions, cos_sin: got strided, need contiguous; try .contiguous()")
    if query.shape[2] != 1 and not query.stride(2) == key.stride(2) == 1:
        raise ValueError(
            f"query, key: got strides {query.stride()}, {key.stride()}, need the last to be 1; "
            "try .contiguous()"
        )
    if not (positions.is_cpu and query.is_cpu and key.is_cpu and cos_sin.is_cpu):
        raise ValueError(f"device: got query on {query.device}, need all on cpu; try rotary_ref")
