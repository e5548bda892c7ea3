"""What a checkpoint has beside attention and dense layers: mixtures of experts, recurrent states.

In: transformers' reading of a config.json. Out: frozen facts, or None where it has no such layers.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Mixture of experts; transformers' names."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    """The weights of the chosen experts add up to 1."""
    shared_expert_intermediate_size: int
    """Of the expert that every token visits; 0: there is none."""
    layers: frozenset[int]
    """Which layers are a mixture; the others are dense."""

    @classmethod
    def from_hf(cls, hf: Any) -> "MoEConfig | None":
        if not hasattr(hf, "num_experts"):
            return None
        step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None)
        layers = {i for i in range(hf.num_hidden_layers) if (i + 1) % step == 0}
        return cls(
            num_experts=hf.num_experts,
            num_experts_per_tok=hf.num_experts_per_tok,
            moe_intermediate_size=hf.moe_intermediate_size,
            norm_topk_prob=getattr(hf, "norm_topk_prob", True),  # Qwen3.5 has no such choice
            shared_expert_intermediate_size=getattr(hf, "shared_expert_intermediate_size", 0),
            layers=frozenset(layers - set(dense or ())) if hf.num_experts > 0 else frozenset(),
        )


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Gated delta net: the sizes of its heads and of the convolution in front of it."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int

    @classmethod
    def from_hf(cls, hf: Any) -> "DeltaConfig | None":
        if "linear_attention" not in layer_types(hf):
            return None
        return cls(
            num_key_heads=hf.linear_num_key_heads,
            num_value_heads=hf.linear_num_value_heads,
            key_head_dim=hf.linear_key_head_dim,
            value_head_dim=hf.linear_value_head_dim,
            conv_width=hf.linear_conv_kernel_dim,
        )


def is_qwen3_5(hf: Any) -> bool:
    return hf.model_type.startswith("qwen3_5")


def layer_types(hf: Any) -> tuple[str, ...]:
    """full_attention or linear_attention, for each layer."""
    types = getattr(hf, "layer_types", None)
    return tuple(types or ["full_attention"] * hf.num_hidden_layers)
