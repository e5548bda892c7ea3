"""Rotary embedding: the table of angles, and the frequencies that long-context methods change.

In: positions [T] or [3, T], query [T, H, D], key [T, KV, D] or None. Out: both, turned by position.

Row p of the table is [cos(p f_0) .. cos(p f_{R/2-1}) | sin(p f_0) ..], fp32, so that a token reads
one row. All layers share one table: equal parameters give the same object from `get_rope`, and its
address stays the same for as long as one of them lives (CUDA graphs hold on to it).

Methods differ only in the frequencies f_i = theta^(-2i/R), computed once:
    linear   every f_i / factor
    llama3   low frequencies / factor, high ones kept, a ramp between
    yarn     the same idea with a ramp over dimensions, and cos, sin scaled by an attention factor
`dynamic` and `longrope` change with the sequence's length; cached keys cannot be turned again, so
they are refused (see model_config.py).

MRoPE: three positions a token, and `mrope_section` says how many frequencies follow each, in
blocks (Qwen2-VL) or interleaved (Qwen3-VL, Qwen3.5):

    section [3, 3, 2]   blocks  t t t h h h w w     interleaved  t h w t h w t h
"""

import math
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from nanoinfer.kernels import Kernels
from nanoinfer.kernels.rotary import MROPE_AXES, Rope
from nanoinfer.model_config import RopeConfig


class RotaryEmbedding:
    """The table for one set of parameters. Not a module: it has no weights and many users."""

    def __init__(self, config: RopeConfig, max_position: int, device: torch.device) -> None:
        inv_freq, scale = inverse_frequencies(config)
        if 2 * len(inv_freq) != config.rotary_dim:
            raise ValueError(
                f"rope: got {len(inv_freq)} frequencies (a table of {2 * len(inv_freq)} columns), "
                f"need {config.rotary_dim // 2} for {config.rotary_dim} rotated dimensions; try a "
                "rotary_dim that counts what pruning leaves"
            )
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
        axes = frequency_axes(config)
        self.rope = Rope(
            cos_sin=table.to(device),  # [P, R]
            axes=None if axes is None else axes.repeat(2).to(device),  # [R], as [cos | sin]
            offset=config.offset,
            is_interleaved=config.is_interleaved,
        )

    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        kernels: Kernels,
        is_conjugate: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Both turned, or turned back with `is_conjugate`; a key of None stays None."""
        return kernels.rotary(positions, query, key, self.rope, is_conjugate)


_TABLES: WeakValueDictionary[tuple, RotaryEmbedding] = WeakValueDictionary()


def get_rope(config: RopeConfig, max_position: int, device: torch.device) -> RotaryEmbedding:
    """The one table for these parameters; it lives as long as a model that uses it."""
    key = (config, max_position, device)
    rope = _TABLES.get(key)
    if rope is None:
        rope = _TABLES[key] = RotaryEmbedding(config, max_position, device)
    return rope


def frequency_axes(config: RopeConfig) -> Tensor | None:
    """[R/2] int64: which of a token's three positions each frequency follows; None without MRoPE.

    Raises ValueError where the sections do not add up to the frequencies.
    """
    section, num_frequencies = config.mrope_section, config.rotary_dim // 2
    if section is None:
        return None
    if len(section) != MROPE_AXES or sum(section) != num_frequencies:
        raise ValueError(
            f"mrope_section: got {list(section)}, need {MROPE_AXES} numbers that add up to "
            f"{num_frequencies}, half of the rotated dimensions"
        )
    if not config.is_mrope_interleaved:
        return torch.repeat_interleave(torch.arange(MROPE_AXES), torch.tensor(section))
    axes = torch.zeros(num_frequencies, dtype=torch.int64)
    for axis in (1, 2):  # every third, until the section is used up; time takes the rest
        axes[axis : MROPE_AXES * section[axis] : MROPE_AXES] = axis
    return axes


def inverse_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Frequencies [R/2] in radians per position, and the factor on cos and sin."""
    num_dims = config.frequency_dim or config.rotary_dim
    exponents = torch.arange(0, num_dims, 2, dtype=torch.float32) / num_dims
    inv_freq = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return inv_freq / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(inv_freq, config), 1.0
    if config.kind == "yarn":
        return _pruned(_yarn(inv_freq, config), config), _yarn_attention_factor(config)
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
        return 2 * len(inv_freq) * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(inv_freq) - 1)
    steps = torch.arange(len(inv_freq), dtype=torch.float32)
    stretch = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return stretch * inv_freq / config.factor + (1 - stretch) * inv_freq


def _pruned(inv_freq: Tensor, config: RopeConfig) -> Tensor:
    """Without frequencies that turn faster than once in `threshold` tokens; then every n-th."""
    if config.high_freq_cycle_threshold is not None:
        highest = 2 * math.pi / config.high_freq_cycle_threshold
        inv_freq = inv_freq[inv_freq <= highest]  # they fall: what is left is a tail
    return inv_freq[:: config.rope_freq_sample_interval]


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
