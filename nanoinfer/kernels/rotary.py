"""Rotary position embedding: pairs of dimensions turned by an angle that grows with position.

    [y1]   [cos  -sin] [x1]      x1 = x[i],  x2 = x[i + R/2]      (neox pairing: Qwen, Llama)
    [y2] = [sin   cos] [x2]      x1 = x[2i], x2 = x[2i + 1]       (interleaved pairing)

One table row is [cos | sin] of one position, read once per token. Only R of D dimensions are
turned, from `offset` on; the rest passes through. With `is_conjugate` the angles are negative: what
was turned is turned back.

MRoPE gives a token three positions (time, height, width), and each frequency follows one of them:
column c of the token's row is read from the table's row of position axes[c]. The same table serves,
however large the picture. With three equal positions it is the 1-D rotation, bit for bit.

T tokens, H heads, D head dim, R rotated dims (R <= D), P positions of the table.
Source: RoFormer (arXiv 2104.09864); MRoPE: Qwen2-VL (arXiv 2409.12191).
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.build import pointers

MROPE_AXES = 3


class Rope(NamedTuple):
    """What turns a token. Equal ones share their tensors."""

    cos_sin: Tensor  # [P, R] fp32
    axes: Tensor | None = None  # [R] int64, 0 to 2: which of three positions a column follows
    offset: int = 0
    is_interleaved: bool = False


Rotary = Callable[..., tuple[Tensor, Tensor | None]]


def rotary_ref(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    rope: Rope,
    is_conjugate: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """positions [T] or [3, T], query [T, H, D], key [T, KV, D] or None -> both, turned."""
    cos, sin = _angles(positions, rope).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    if is_conjugate:
        sin = -sin
    turned = _rotate(query, cos, sin, rope)
    return turned, None if key is None else _rotate(key, cos, sin, rope)


def _angles(positions: Tensor, rope: Rope) -> Tensor:
    """[T, R]: each token's row of the table, or its columns from the rows of its three axes."""
    if positions.dim() == 1:
        return rope.cos_sin[positions]
    return rope.cos_sin.gather(0, positions[rope.axes].T)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: Rope) -> Tensor:
    start, stop = rope.offset, rope.offset + 2 * cos.size(-1)
    x1, x2 = _pairs(x[..., start:stop].float(), rope.is_interleaved)
    y1, y2 = (x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype)
    turned = (torch.stack((y1, y2), dim=-1).flatten(-2),) if rope.is_interleaved else (y1, y2)
    return torch.cat((x[..., :start], *turned, x[..., stop:]), dim=-1)


def _pairs(x: Tensor, is_interleaved: bool) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (-1, 2)).unbind(-1) if is_interleaved else x.chunk(2, dim=-1)


def make_rotary_cpu(library: ctypes.CDLL, threads: int) -> Rotary:
    """Bind the C++ twin: the reference's bits, bf16 or fp32, rows and heads may be strided.

    The function raises ValueError for tensors that the kernel cannot take, and for positions
    without a row in the table.
    """
    kernel = library.nanoinfer_rotary
    tensor_types, sizes = [ctypes.c_void_p] * 7, [ctypes.c_int64] * 11
    kernel.argtypes = [*[ctypes.c_int] * 3, *tensor_types, *sizes, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def rotary_cpu(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        rope: Rope,
        is_conjugate: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        heads = query if key is None else key
        check_rope(positions, query, heads, rope)
        turned = torch.empty(query.shape, dtype=query.dtype)
        turned_key = None if key is None else torch.empty(key.shape, dtype=key.dtype)
        flags = query.dtype == torch.bfloat16, rope.is_interleaved, is_conjugate
        tensors = (turned, turned_key, query, key, positions, rope_axes(positions, rope))
        addresses = pointers(*tensors, rope.cos_sin)
        T, H, D = query.shape
        sizes = (T, H, heads.shape[1], D, *rope.cos_sin.shape, rope.offset)
        strides = (*query.stride()[:2], *heads.stride()[:2])
        invalid = kernel(*flags, *addresses, *sizes, *strides, threads)
        if invalid >= 0:
            raise bad_position(positions, invalid, rope)
        return turned, turned_key

    return rotary_cpu


def rope_axes(positions: Tensor, rope: Rope) -> Tensor | None:
    """The axes that matter: a token with one position has no others to choose from."""
    return rope.axes if positions.dim() == 2 else None


def bad_position(positions: Tensor, token: int, rope: Rope) -> ValueError:
    return ValueError(
        f"positions: got {positions[..., token].tolist()} at token {token}, need 0 to "
        f"{len(rope.cos_sin) - 1}, a row of the table; try a larger max_position"
    )


def check_rope(positions: Tensor, query: Tensor, key: Tensor, rope: Rope) -> None:
    """Raise ValueError for what a C++ kernel that rotates cannot take."""
    cos_sin, T = rope.cos_sin, positions.shape[-1]
    shapes = positions.shape, query.shape, key.shape, cos_sin.shape
    need = ""
    if [*map(len, shapes[1:])] != [3, 3, 2] or not T == len(query) == len(key):
        need = "[T], [T, H, D], [T, KV, D], [P, R]; try query.view(T, -1, head_dim)"
    elif positions.dim() != 1 and (positions.shape != (MROPE_AXES, T) or rope.axes is None):
        need = "positions [T], or [3, T] with axes; try get_rope with an mrope_section"
    elif query.shape[2] != key.shape[2]:
        need = "one head dim for query and key; try query.view(T, -1, head_dim)"
    elif not 0 <= rope.offset <= query.shape[2] - cos_sin.shape[1] or cos_sin.shape[1] % 2 != 0:
        room = query.shape[2] - rope.offset
        need = f"an even R of at most {room}; try the table of this model"
    if need:
        found = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"positions, query, key, cos_sin: got {found}, need {need}")
    if rope.axes is not None and (
        rope.axes.shape != cos_sin.shape[1:]
        or rope.axes.dtype != torch.int64
        or not rope.axes.is_contiguous()
        or not rope.axes.is_cpu
    ):
        raise ValueError(
            f"axes: got {rope.axes.dtype} {tuple(rope.axes.shape)} on {rope.axes.device}, need "
            f"contiguous int64 [{cos_sin.shape[1]}] on cpu; try get_rope"
        )
    _check_memory(positions, query, key, cos_sin)


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
