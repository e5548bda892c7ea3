"""Checkpoints in FP8: Qwen3's published form, with a scale for each block of 128 x 128 weights.

    X.weight             [N, K] float8_e4m3fn
    X.weight_scale_inv   [N/128, K/128], fp32, bf16 or fp16      w = value * scale

In: the files of a checkpoint. Out: the scales by the name of their weight; weights in fp32, which
take the model's dtype when they are loaded: twice the memory that the file takes, in bf16. A weight
is in FP8 if and only if it has scales: lists of exceptions in config.json are not always right.
"""

from collections.abc import Iterable

from safetensors import safe_open
from torch import Tensor

from nanoinfer.kernels.linear import BLOCK, dequantize_blocks
from nanoinfer.kernels.quantize import FP8

SCALE = "_scale_inv"


def read_scales(files: Iterable[safe_open]) -> dict[str, Tensor]:
    """Block scales in fp32, by their weight's name."""
    scales: dict[str, Tensor] = {}
    for file in files:
        names = [name for name in file.keys() if name.endswith(f"weight{SCALE}")]  # noqa: SIM118
        scales |= {name.removesuffix(SCALE): file.get_tensor(name).float() for name in names}
    return scales


def dequantize(values: Tensor, scales: Tensor, what: str) -> Tensor:
    """values [N, K] times their block's scale, in fp32; ValueError names `what` does not fit."""
    shape = [-(-n // BLOCK) for n in values.shape]
    if values.dtype != FP8 or [*scales.shape] != shape:
        raise ValueError(
            f"{what} is {values.dtype} {[*values.shape]} with scales {[*scales.shape]}, need {FP8} "
            f"with scales {shape}, one for each block of {BLOCK} x {BLOCK}"
        )
    return dequantize_blocks(values, scales)
