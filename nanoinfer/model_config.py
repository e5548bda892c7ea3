"""What the checkpoint is: facts, read from its config.json.

In: a folder. Out: a frozen `ModelConfig`.

A model is data plus one decoder: all checkpoints become the same facts (has it q and k norms?
biases on q, k, v? which rope? which layers attend, which keep a state, which choose experts?). What
cannot be expressed is refused by name (unsupported.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoinfer.hybrid_config import DeltaConfig, MoEConfig, is_qwen3_5, layer_types
from nanoinfer.unsupported import check_supported


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary parameters; equal ones share one table (`layers.rotary_embedding.get_rope`)."""

    head_dim: int
    rotary_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # Pruning of YaRN's frequencies: of those for `frequency_dim` dimensions R/2 must be left.
    frequency_dim: int | None = None  # rotary_dim, if nothing is pruned
    high_freq_cycle_threshold: float | None = None  # in tokens per turn
    rope_freq_sample_interval: int = 1
    # Which dimensions of a head are turned, in which pairs, by which of a token's positions.
    offset: int = 0
    is_interleaved: bool = False
    mrope_section: tuple[int, ...] | None = None
    is_mrope_interleaved: bool = False

    @classmethod
    def from_hf(cls, hf: Any, head_dim: int) -> "RopeConfig":
        """From transformers' normalised `rope_parameters` (old and new JSON both end there)."""
        rope = dict(hf.rope_parameters)
        optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                    "attention_factor", "mscale", "mscale_all_dim", "truncate",
                    "high_freq_cycle_threshold", "rope_freq_sample_interval")  # fmt: skip
        original = rope.get("original_max_position_embeddings") or hf.max_position_embeddings
        return cls(
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
            theta=float(rope["rope_theta"]),
            kind=rope["rope_type"],
            factor=float(rope.get("factor") or hf.max_position_embeddings / original),
            original_max_position=original,
            mrope_section=tuple(rope["mrope_section"]) if rope.get("mrope_section") else None,
            is_mrope_interleaved=bool(rope.get("mrope_interleaved", is_qwen3_5(hf))),
            **{name: rope[name] for name in optional if rope.get(name) is not None},
        )

    def longest(self, trained: int) -> int:
        """Positions that the method reaches from those in the config."""
        if self.kind == "yarn":
            return int(self.original_max_position * self.factor)
        return int(trained * self.factor) if self.kind == "linear" else trained


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Facts of a checkpoint. Names are Hugging Face's where it has one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    layer_types: tuple[str, ...]
    """full_attention or linear_attention, for each layer."""
    qk_norm: bool
    qkv_bias: bool
    norm_adds_one: bool
    """Rows are multiplied by 1 + weight."""
    gated_attention: bool
    """q_proj has a gate beside each head's query."""
    rope: RopeConfig
    moe: MoEConfig | None
    delta: DeltaConfig | None
    dtype: torch.dtype
    eos_token_ids: frozenset[int]

    @classmethod
    def from_hf(cls, folder: Path) -> "ModelConfig":
        """Read `folder`/config.json through transformers' AutoConfig.

        Raises ValueError, naming what is missing or not supported and what to try.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{path}: not found; need a folder with config.json and safetensors")
        check_supported(_read_json(path), path)
        from transformers import AutoConfig  # a second to import: only once the file is known good

        try:
            hf = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            text = hf.get_text_config()  # of a checkpoint that sees, too, the part that writes
            head_dim = getattr(text, "head_dim", None)
            head_dim = head_dim or text.hidden_size // text.num_attention_heads
            rope = RopeConfig.from_hf(text, head_dim)
        except Exception as error:  # transformers raises many kinds
            raise ValueError(f"{path}: not a usable config: {error}") from error
        check_supported(hf.to_dict(), path)
        eos = (*as_list(getattr(hf, "eos_token_id", None)), *as_list(text.eos_token_id))
        return cls(
            architecture=hf.architectures[0],
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", 0),  # 0: no dense layer
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=text.rms_norm_eps,
            max_model_len=rope.longest(text.max_position_embeddings),
            tie_word_embeddings=hf.tie_word_embeddings,
            layer_types=layer_types(text),
            qk_norm=text.model_type.startswith("qwen3"),
            qkv_bias=text.model_type == "qwen2",
            norm_adds_one=is_qwen3_5(text),
            gated_attention=is_qwen3_5(text),
            rope=rope,
            moe=MoEConfig.from_hf(text),
            delta=DeltaConfig.from_hf(text),
            dtype=text.dtype or hf.dtype or torch.float32,
            eos_token_ids=frozenset(eos),
        )


def load_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json as a dict; {} when there is none."""
    path = folder / "generation_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got a JSON {type(content).__name__}, need an object")
    return content


def as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
