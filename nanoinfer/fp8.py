"""Checkpoints in FP8: Qwen3's published form, with a scale for each block of 128 x 128 weights.

    X.weight             [N, K] float8_e4m3fn
    X.weight_scale_inv   [N/128, K/128], fp32, bf16 or fp16      w = value * scale

In: the files of a checkpoint. Out: the scales by the name of their weight. A weight is in FP8 if
and only if it has scales: lists of exceptions in config.json are not always right.

A GPU that multiplies FP8 keeps values and scales (`load_blocks`). Elsewhere a weight is dequantised
once, when it is loaded, and takes the model's dtype: twice the memory that the file takes, in bf16.
"""

import logging
from collections.abc import Iterable

import torch
from safetensors import safe_open
from torch import Tensor, nn

from nanoinfer.kernels.linear import BLOCK, dequantize_blocks
from nanoinfer.kernels.quantize import FP8
from nanoinfer.layers.linear import Linear, RowParallelLinear

logger = logging.getLogger("nanoinfer")

SCALE = "_scale_inv"
_GIB = 1 << 30


def read_scales(files: Iterable[safe_open]) -> dict[str, Tensor]:
    """Block scales in fp32, by their weight's name."""
    scales: dict[str, Tensor] = {}
    for file in files:
        names = [name for name in file.keys() if name.endswith(f"weight{SCALE}")]  # noqa: SIM118
        scales |= {name.removesuffix(SCALE): file.get_tensor(name).float() for name in names}
    return scales


def choose_kept(model: nn.Module, scaled: set[tuple[str, str]], keep_fp8: bool) -> set[str]:
    """Weights that stay in FP8; what the others take when they are dequantised is logged."""
    kept = whole_layers(model, scaled) if keep_fp8 else set()
    names = {name for name, _ in scaled} - kept
    widened = [weight for name, weight in model.named_parameters() if name in names]
    if widened:
        taken = sum(weight.numel() * weight.itemsize for weight in widened)
        sizes = (taken / _GIB, taken / widened[0].itemsize / _GIB)
        logger.info("dequantising %d FP8 weights: %.2f GiB, not %.2f", len(widened), *sizes)
    return kept


def whole_layers(model: nn.Module, scaled: set[tuple[str, str]]) -> set[str]:
    """Weights that can stay in FP8: linear layers' whose every part has scales and cuts no block.

    scaled: (weight, part of it) of all that the checkpoint has scales for.
    """
    found = set()
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, Linear) and all((weight, part) in scaled for part in module.cuts):
            cuts = [n for cut in module.cuts.values() for n in (cut.start, cut.length, cut.target)]
            if all(n % BLOCK == 0 for n in cuts):
                found.add(weight)
    return found


def dequantize(values: Tensor, scales: Tensor, what: str) -> Tensor:
    """values [N, K] times their block's scale, in fp32; ValueError names `what` does not fit."""
    _check(values, scales, what)
    return dequantize_blocks(values, scales)


def load_blocks(layer: Linear, part: str, values: Tensor, scales: Tensor, what: str) -> None:
    """Copy this rank's slice of part `part` into `layer`, as it is.

    Raises ValueError for other shapes, and for slices that cut through a block.
    """
    _check(values, scales, what)
    cut, dim = layer.cuts[part], int(isinstance(layer, RowParallelLinear))
    full = [*layer.weight.shape]
    full[dim] = cut.full
    if [*values.shape] != full or any(n % BLOCK for n in (cut.start, cut.length, cut.target)):
        raise ValueError(
            f"{what} is {[*values.shape]}, need {full}, cut at multiples of {BLOCK} (rows "
            f"{cut.start} to {cut.start + cut.length})"
        )
    if layer.scales is None:
        shape, device = layer.weight.shape, layer.weight.device
        layer.weight.data = torch.empty(shape, dtype=FP8, device=device)
        layer.scales = torch.empty([-(-n // BLOCK) for n in shape], device=device)
    for target, source, unit in ((layer.weight.data, values, 1), (layer.scales, scales, BLOCK)):
        start, length, at = (n // unit for n in (cut.start, cut.length, cut.target))
        target.narrow(dim, at, length).copy_(source.narrow(dim, start, length))


def _check(values: Tensor, scales: Tensor, what: str) -> None:
    shape = [-(-n // BLOCK) for n in values.shape]
    if values.dtype != FP8 or [*scales.shape] != shape:
        raise ValueError(
            f"{what} is {values.dtype} {[*values.shape]} with scales {[*scales.shape]}, need {FP8} "
            f"with scales {shape}, one for each block of {BLOCK} x {BLOCK}"
        )
