"""y = x W^T (+ b), for every dtype of W, into rows that start on 32-byte boundaries.

    W                   scales                        the product
    bf16, fp32, fp16    none                          in W's dtype, summed in fp32
    int8                [N] fp32, one a row           x to uint8 by token, int32 sums, times both
    float8_e4m3fn       [N/128, K/128] fp32, a block  W (and x, if Quantized) widened, fp32

`weight.dtype` alone decides. x [M, K] may be a `Quantized`; y [M, N] has x's dtype, or bf16.

Rows of y: 16-byte and wider loads of what comes next want aligned rows, so that a row of N values
occupies N rounded up, and y is a view of the first N:

    N = 5, fp32, 8 to 32 bytes:   storage  y y y y y . . .     y = storage[:, :5], strides (8, 1)
                                           y y y y y . . .

On a CPU a weight is packed once, into the order in which it is used, and kept in that form only:

    plain     [N, K]                  a row of W after the other
    blocks    [N/64, K/P, 64, P]      64 rows of W side by side, P values of each at a time;
                                      P = 2 for bf16, 4 for int8 (linear.cpp says why)

For bf16 these are the bytes of oneDNN's layout AB16b64a2b, so one packing serves two kernels: ours
for few rows, where it reads faster, oneDNN's for many. A CPU that multiplies bf16 no faster than
fp32 (any without AVX512-BF16 or AMX, Intel's without AMX) needs ours alone: in oneDNN it reaches a
quarter to a half of what its cores can do.

Source: DeepInfer's and DeepGEMM's contract. M rows, K inputs, N outputs.
"""

import ctypes
import platform
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.quantize import FP8, FP8_MAX, MIN_AMAX, Quantized, dequantize

ROW_BYTES = 32
BLOCK = 128  # rows and columns of an FP8 weight that share a scale
_INT8_MAX, _UINT8_MAX = 127, 255
BLOCK_ROWS = 64  # of a packed weight
_STEPS = 16  # oneDNN rounds the number of pairs up to a multiple
_ROWS_HINT = 16  # for oneDNN, which packs alike for any number
_NUM_PROBES = 64
_FEW_ROWS = 64  # up to here our kernel is at least as fast as oneDNN's
_FEW_ROWS_AMX = 8  # where products are all but free, up to here both wait for memory
_PLAIN: tuple = ("none", [], "")  # oneDNN: nothing fused behind the product


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
        values, factors, zeros = quantize_tokens(rows)
        centred = values.double() - zeros[:, None]
        sums = F.linear(centred, weight.double())  # exact, as int32 sums would be
        return sums.float() * factors[:, None] * scales
    return F.linear(rows, dequantize_blocks(weight, scales))


def quantize_rows_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[M, K] -> int8 values, and the fp32 factor of each row: symmetric, largest to 127."""
    factors = x.float().abs().amax(-1).clamp(min=MIN_AMAX) / _INT8_MAX  # [M]
    return (x / factors[:, None]).round().to(torch.int8), factors


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[M, K] -> uint8 values, the fp32 factor and the int32 zero point of each row.

    x = (value - zero) * factor. The range from smallest to largest is used whole, since activations
    lie rarely evenly around 0: twice the resolution costs nothing (see linear.cpp).
    """
    x = x.float()
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    factors = (high - low).clamp(min=MIN_AMAX) / _UINT8_MAX
    zeros = (-low / factors).round()
    values = (x / factors[:, None]).round() + zeros[:, None]
    return values.clamp(0, _UINT8_MAX).to(torch.uint8), factors, zeros.to(torch.int32)


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


class PackedWeight(NamedTuple):
    """A weight [N, K] in the order in which a kernel reads it: the only copy.

    multiply: (x [M, K], bias [N] or None, is_wide) -> [M, N] of x's dtype, or fp32 if wide.
    plain: () -> [N, K] as it was, copied. blocks: None where oneDNN chose an order unknown to us.
    """

    multiply: Callable[[Tensor, Tensor | None, bool], Tensor]
    plain: Callable[[], Tensor]
    blocks: Tensor | None  # [N/64, K/P, 64, P]


Pack = Callable[[Tensor, Tensor | None], PackedWeight | None]  # (weight, scales of its rows)


def pack_never(weight: Tensor, scales: Tensor | None) -> PackedWeight | None:
    """Leave the weight as it is: linear_ref multiplies it."""
    return None


def if_readable(pack: Pack) -> Pack:
    """Pack only into blocks, which an embedding can read and our own kernel multiplies."""

    def pack_or_not(weight: Tensor, scales: Tensor | None) -> PackedWeight | None:
        packed = pack(weight, scales)
        return None if packed is None or packed.blocks is None else packed

    return pack_or_not


def to_blocks(weight: Tensor) -> Tensor:
    """[..., N, K] -> [..., N/64, K/P, 64, P], with rows of zeros behind the last."""
    if missing := -weight.shape[-2] % BLOCK_ROWS:
        weight = F.pad(weight, (0, 0, 0, missing))
    units = weight.unflatten(-1, (-1, 4 // weight.itemsize)).unflatten(-3, (-1, BLOCK_ROWS))
    return units.transpose(-3, -2).contiguous()


def rows_of_blocks(blocks: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [T] of a packed weight, [T, K]: what a tied embedding reads."""
    units = blocks.view(torch.int32).squeeze(-1)  # [N/64, K/P, 64]
    return units[ids // BLOCK_ROWS, :, ids % BLOCK_ROWS].view(blocks.dtype)


class LinearCpu:
    """The C++ twin, and oneDNN for bf16. Without a library there is oneDNN alone."""

    def __init__(self, library: ctypes.CDLL | None, threads: int) -> None:
        self._threads = threads
        has_amx = torch.cpu._is_amx_tile_supported()
        self._few_rows = _FEW_ROWS_AMX if has_amx else _FEW_ROWS
        self.uses_onednn = torch.backends.mkldnn.is_available() and bool(
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        self._library = library
        if library is not None:
            pointer, sizes = ctypes.c_void_p, [*[ctypes.c_int64] * 5, ctypes.c_int]
            self._bf16, self._int8 = library.nanoinfer_linear_bf16, library.nanoinfer_linear_int8
            self._bf16.argtypes = [ctypes.c_int, *[pointer] * 4, *sizes]
            self._int8.argtypes = [*[ctypes.c_int] * 2, *[pointer] * 7, *sizes]
            self._bf16.restype = self._int8.restype = None
            is_fast = has_amx or bool(library.nanoinfer_has_pairs())
            self.uses_onednn &= is_fast or platform.machine() in ("aarch64", "arm64")

    def pack(self, weight: Tensor, scales: Tensor | None) -> PackedWeight | None:
        """Re-order a weight [N, K] of bf16, or of int8 with a scale [N] for each row.

        None where nothing here is faster than the plain one.
        """
        if weight.dtype == torch.bfloat16 and self.uses_onednn:
            return self._pack_onednn(weight)
        if self._library is None or weight.shape[1] % (4 // weight.itemsize or 1) != 0:
            return None
        if weight.dtype == torch.bfloat16:
            return self._pack_bf16(weight)
        if weight.dtype == torch.int8:
            assert scales is not None, "int8 weights have scales"
            return self._pack_int8(weight, scales)
        return None

    def _pack_onednn(self, weight: Tensor) -> PackedWeight:
        """oneDNN packs; its bytes serve our kernel too, if they lie as we think they do."""
        N, K = weight.shape
        opaque = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        blocks = None if self._library is None else _find_blocks(opaque, weight)

        def multiply(x: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
            if blocks is not None and (is_wide or len(x) <= self._few_rows):
                return self._multiply_bf16(x, blocks, N, K, bias, is_wide)
            y = torch.ops.mkldnn._linear_pointwise(x, opaque, bias, *_PLAIN)
            return y.float() if is_wide else y

        return PackedWeight(multiply, opaque.to_dense, blocks)

    def _pack_bf16(self, weight: Tensor) -> PackedWeight:
        N, K = weight.shape
        blocks = to_blocks(weight)

        def multiply(x: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
            return self._multiply_bf16(x, blocks, N, K, bias, is_wide)

        return PackedWeight(multiply, lambda: rows_of_blocks(blocks, torch.arange(N)), blocks)

    def _multiply_bf16(
        self, x: Tensor, blocks: Tensor, N: int, K: int, bias: Tensor | None, is_wide: bool
    ) -> Tensor:
        x, y = _prepare(x, torch.bfloat16, N, K, is_wide)
        self._bf16(is_wide, *pointers(y, x, blocks, bias), *_sizes(x, y), self._threads)
        return y

    def _pack_int8(self, weight: Tensor, scales: Tensor) -> PackedWeight:
        N, K = weight.shape
        blocks = to_blocks(weight)
        sums = F.pad(weight.sum(1, dtype=torch.int32), (0, -N % BLOCK_ROWS))

        def multiply(x: Tensor, bias: Tensor | None, is_wide: bool) -> Tensor:
            x, y = _prepare(x, x.dtype, N, K, is_wide)
            scratch = torch.empty(len(x) * (K + 8), dtype=torch.uint8)
            assert bias is None or bias.dtype == torch.float32, "quantize widens it"
            tensors = pointers(y, x, blocks, bias, scales, sums, scratch)
            flags = x.dtype == torch.bfloat16, y.dtype == torch.float32
            self._int8(*flags, *tensors, *_sizes(x, y), self._threads)
            return y

        return PackedWeight(multiply, lambda: rows_of_blocks(blocks, torch.arange(N)), blocks)


def _find_blocks(opaque: Tensor, weight: Tensor) -> Tensor | None:
    """oneDNN's bytes as [N/64, K/2, 64, 2], or None where they are in another order."""
    N, K = weight.shape
    num_blocks, num_bytes = -(-N // BLOCK_ROWS), torch.ops.mkldnn._nbytes(opaque)
    if K % (2 * _STEPS) != 0 or num_bytes != num_blocks * BLOCK_ROWS * K * 2:
        return None
    memory = (ctypes.c_uint8 * num_bytes).from_address(torch.ops.mkldnn.data_ptr(opaque))
    blocks = torch.frombuffer(memory, dtype=weight.dtype).view(num_blocks, K // 2, BLOCK_ROWS, 2)
    some = torch.arange(0, N, N // _NUM_PROBES | 1)  # odd: at every place within a block
    return blocks if torch.equal(rows_of_blocks(blocks, some), weight[some]) else None


def _prepare(x: Tensor, dtype: torch.dtype, N: int, K: int, is_wide: bool) -> tuple[Tensor, Tensor]:
    """x as the kernel takes it, and an empty y."""
    if x.dtype != dtype or x.dtype not in (torch.bfloat16, torch.float32) or x.shape[1] != K:
        raise ValueError(f"x: got {x.dtype} {tuple(x.shape)}, need {dtype} [M, {K}]")
    if x.stride(1) != 1:
        x = x.contiguous()
    y_dtype = torch.float32 if is_wide else x.dtype
    return x, torch.empty((len(x), N), dtype=y_dtype)


def _sizes(x: Tensor, y: Tensor) -> tuple[int, int, int, int, int]:
    return x.shape[0], y.shape[1], x.shape[1], x.stride(0), y.stride(0)
