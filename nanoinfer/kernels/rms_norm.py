"""RMSNorm: alone, fused with the residual addition before it, or a gate or FP8 cast after it.

    y = x / sqrt(mean(x^2) + eps) * weight

Statistics are fp32, whatever x is: a sum of a thousand squares overflows fp16 and loses bf16's few
bits. The residual stream is added first and rounded to x's dtype; the norm is of the rounded sum,
so that what the next layer adds to is exactly what was normalised.

The weight's dtype says where the product is rounded. One of x's dtype multiplies the rounded row
(Llama, Qwen3); an fp32 one beside bf16 rows multiplies before it (1 + weight of Gemma and Qwen3.5,
which the loader has added up in fp32).

x, residual, gate [..., N], weight [N]; `out_scale` is a constant factor on the normalised row.
"""

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.quantize import FP8, PACK, Quantized, ScaleLayout, quantize_ref


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0) -> Tensor:
    """-> y in x's dtype."""
    hidden = x.float()
    factor = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * out_scale
    normed = hidden * factor
    if weight.dtype != x.dtype:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """-> (norm(x + residual), x + residual), both in x's dtype."""
    residual = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(residual, weight, eps, out_scale), residual


def rms_norm_gated_ref(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0
) -> Tensor:
    """-> norm(x) * silu(gate), the second factor and the product in fp32 before the last cast."""
    normed = rms_norm_ref(x, weight, eps, out_scale)
    return (normed.float() * F.silu(gate.float())).to(x.dtype)


def rms_norm_quantized_ref(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    layout: ScaleLayout,
    keep_copy: bool = False,
    out_scale: float = 1.0,
) -> tuple[Quantized, Tensor | None]:
    """x [T, N] -> (norm in FP8, with the row before the cast if asked for; x + residual)."""
    if residual is None:
        normed = rms_norm_ref(x, weight, eps, out_scale)
    else:
        normed, residual = add_rms_norm_ref(x, residual, weight, eps, out_scale)
    quantized = quantize_ref(normed, layout)
    return quantized._replace(copy=normed if keep_copy else None), residual


class RmsNormCpu:
    """The C++ twins, as methods with the references' signatures.

    x [T, N] or [T, H, N] in bf16 or fp32, rows may be strided. ValueError for tensors that the
    kernel cannot take.
    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._threads = threads
        self._kernel, self._quantized_kernel = (
            library.nanoinfer_rms_norm,
            library.nanoinfer_rms_norm_quantized,
        )
        self._kernel.argtypes = _argtypes("iipppppplllpffi")
        self._quantized_kernel.argtypes = _argtypes("iipppppppllplipffi")
        self._kernel.restype = self._quantized_kernel.restype = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0) -> Tensor:
        return self._run(x, None, None, weight, eps, out_scale)[0]

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        return self._run(x, residual, None, weight, eps, out_scale)

    def rms_norm_gated(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, out_scale: float = 1.0
    ) -> Tensor:
        return self._run(x, None, gate, weight, eps, out_scale)[0]

    def rms_norm_quantized(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        layout: ScaleLayout,
        keep_copy: bool = False,
        out_scale: float = 1.0,
    ) -> tuple[Quantized, Tensor | None]:
        if x.dim() != 2:
            raise ValueError(f"x: got {tuple(x.shape)}, need [T, N]; try x.flatten(0, -2)")
        strides, (T, N) = _strides(weight, x, residual), x.shape
        values = torch.empty((T, N), dtype=FP8)
        scales, scale_strides = _empty_scales(T, layout.num_groups(N), layout)
        copy = torch.empty((T, N), dtype=x.dtype) if keep_copy else None
        added = torch.empty((T, N), dtype=x.dtype) if residual is not None else None
        addresses = pointers(values, scales, copy, added, x, residual, weight)
        types = x.dtype == torch.bfloat16, weight.dtype == torch.float32
        layouts = (layout.group_size, layout.is_packed, scale_strides)
        self._quantized_kernel(
            *types, *addresses, T, N, strides, *layouts, eps, out_scale, self._threads
        )
        return Quantized(values, scales, copy), added

    def _run(
        self,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor,
        eps: float,
        out_scale: float,
    ) -> tuple[Tensor, Any]:
        strides, shape, dtype = _strides(weight, x, residual, gate), x.shape, x.dtype
        out = torch.empty(shape, dtype=dtype)
        added = None if residual is None else torch.empty(shape, dtype=dtype)
        addresses = pointers(out, added, x, residual, gate, weight)
        T, H, N = shape if len(shape) == 3 else (shape[0], 1, shape[1])
        types = dtype == torch.bfloat16, weight.dtype == torch.float32
        self._kernel(*types, *addresses, T, H, N, strides, eps, out_scale, self._threads)
        return out, added


_Strides = ctypes.c_int64 * 6
_CODES = {"i": ctypes.c_int, "l": ctypes.c_int64, "p": ctypes.c_void_p, "f": ctypes.c_float}


def _argtypes(codes: str) -> list[Any]:
    return [_CODES[code] for code in codes]


def _strides(
    weight: Tensor, x: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
) -> Any:
    """Strides of a token and of a head of each, in elements, all of them checked."""
    strides: list[int] = []
    for name, rows in (("x", x), ("residual", residual), ("gate", gate)):
        if rows is None:
            strides += 0, 0
            continue
        if rows.shape != x.shape:
            raise ValueError(
                f"{name}: got {tuple(rows.shape)}, need x's {tuple(x.shape)}; "
                f"try {name}.expand_as(x)"
            )
        _check(name, rows, weight, x.dtype)
        strides += rows.stride()[:-1] if rows.dim() == 3 else (rows.stride(0), 0)
    return _Strides(*strides)


def _check(name: str, x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dtype != dtype:
        need = "one of bfloat16, float32 for all rows"
    elif weight.dtype not in (dtype, torch.float32):
        need = f"{dtype} or float32 for the weight"
    elif not (x.is_cpu and weight.is_cpu):
        found = f"{x.device}, {weight.device}"
        raise ValueError(f"{name}, weight: got {found}, need cpu; try .cpu()")
    elif x.dim() not in (2, 3) or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{name}, weight: got {tuple(x.shape)}, {tuple(weight.shape)}, need [T, N] or "
            "[T, H, N], and [N]; try x.flatten(0, -2)"
        )
    elif x.shape[-1] != 1 and not x.stride(-1) == weight.stride(0) == 1:
        raise ValueError(
            f"{name}, weight: got strides {x.stride()}, {weight.stride()}, need the last to be 1; "
            "try .contiguous()"
        )
    else:
        return
    raise ValueError(
        f"{name}, weight: got {x.dtype}, {weight.dtype}, need {need}; try rms_norm_ref"
    )


def _empty_scales(T: int, num_groups: int, layout: ScaleLayout) -> tuple[Tensor, Any]:
    """Scales in their layout, and its three strides as rms_norm.cpp counts them (in scales)."""
    width, dtype = num_groups, torch.float32
    if layout.is_packed:
        width, dtype = num_groups // PACK, torch.int32
    if not layout.is_column_major:
        strides = (num_groups, PACK, 1)
        return torch.empty((T, width), dtype=dtype), (ctypes.c_int64 * 3)(*strides)
    height = T + -T % PACK
    scales = torch.zeros((width, height), dtype=dtype).T[:T]
    strides = (PACK, PACK * height, 1) if layout.is_packed else (1, PACK * height, height)
    return scales, (ctypes.c_int64 * 3)(*strides)
