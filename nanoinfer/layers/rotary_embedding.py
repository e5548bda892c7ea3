"""Rotary embedding: the table of angles, and the frequencies that long-context methods change.

In: positions [T], query [T, H, D], key [T, KV, D]. Out: both, turned by position.

Row p of the table is [cos(p f_0) .. cos(p f_{R/2-1}) | sin(p f_0) ..], fp32, so that a token reads
one row. All layers share one table: equal parameters give the same object from `get_rope`.

Methods differ only in the frequencies f_i = theta^(-2i/R), computed once:
    linear   every f_i / factor
    llama3   low frequencies / factor, high ones kept, a ramp between
    yarn     the same idea with a ramp over dimensions, and cos, sin scaled by an attention factor
`dynamic` and `longrope` change with the sequence's length; cached keys cannot be turned again, so
they are refused (see model_config.py).
"""

import math
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nanoinfer.kernels import Kernels
from nanoinfer.model_config import RopeConfig


class RotaryEmbedding:
    """The table for one set of parameters. Not a module: it has no weights and many users."""

    def __init__(self, config: RopeConfig, max_position: int, device: torch.device) -> None:
        inv_freq, scale = inverse_frequencies(config)
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        self.cos_sin = table.to(device)  # [P, R]

    def __call__(
        self, positions: Tensor, query: Tensor, key: Tensor, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        return kernels.rotary(positions, query, key, self.cos_sin)


_TABLES: WeakValueDictionary[tuple, RotaryEmbedding] = WeakValueDictionary()


def get_rope(config: RopeConfig, max_position: int, device: torch.device) -> RotaryEmbedding:
    """The one table for these parameters; it lives as long as a model that uses it."""
    key = (config, max_position, device)
    rope = _TABLES.get(key)
    if rope is None:
        rope = _TABLES[key] = RotaryEmbedding(config, max_position, device)
    return rope


def inverse_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Frequencies [R/2] in radians per position, and the factor on cos and sin."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    inv_freq = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return inv_freq / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if config.kind == "yarn":
        return _yarn(inv_freq, config), _yarn_attention_factor(config)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Wavelengths over L/low are stretched, those under L/high kept (L: the trained length)."""
    turns = config.original_max_position * inv_freq / (2 * math.pi)  # within the trained length
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * inv_freq / config.factor + keep * inv_freq


def _yarn(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Dimensions that turn more than beta_fast times are kept, under beta_slow stretched."""

    def dimension(turns: float) -> float:  # which dimension turns that often
        length = config.original_max_position / (turns * 2 * math.pi)
        return config.rotary_dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    steps = torch.arange(len(inv_freq), dtype=torch.float32)
    stretch = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * inv_freq / config.factor + (1 - stretch) * inv_freq


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
