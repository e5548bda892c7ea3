"""What the decoder does not do, refused by name from one table.

In: a config.json as it is, and again as transformers has read it (which fills in defaults). Out:
nothing, or an error that says what is not supported, what the checkpoint has, and what is needed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def check_supported(config: dict, path: Path) -> None:
    """Raise ValueError for the first thing in `config` that fits no layer here."""
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text, "architectures": config.get("architectures")}
    for what, find, need in _UNSUPPORTED:
        found = find(config)
        if found is not None:
            raise ValueError(f"{path}: {what} {found!r} is not supported; need {need}")


def _unless(found: Any, *allowed: Any) -> Any:
    return None if found in allowed else found


def _is_partial(layer_type: str) -> bool:
    return layer_type not in _LAYER_TYPES


def _rope_type(config: dict) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _quantization(config: dict) -> str | None:
    is_fp8 = config.get("quant_method") == "fp8" and config.get("weight_block_size") == [128, 128]
    return None if is_fp8 or not config else config.get("quant_method", str(config))


def _uneven(num_heads: Any, num_shared: Any, kind: str) -> str | None:
    are_known = isinstance(num_heads, int) and isinstance(num_shared, int)
    if not are_known or num_heads % num_shared == 0:
        return None
    return f"{num_heads} for {num_shared} {kind} heads"


def _too_many_experts(config: dict) -> int | None:
    """num_experts_per_tok, where it is more than there are."""
    chosen = config.get("num_experts_per_tok")
    experts = config.get("num_experts", config.get("num_local_experts"))
    if not isinstance(chosen, int) or not isinstance(experts, int):
        return None
    return chosen if chosen > max(experts, 1) else None


# what, what of it config.json has or None, what to try instead
_SUPPORTED = (
    *("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM"),
    *("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
)
_LAYER_TYPES = ("full_attention", "linear_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNSUPPORTED: list[tuple[str, Callable[[dict], Any], str]] = [
    ("architecture", lambda c: _unless((c.get("architectures") or [""])[0], *_SUPPORTED),
     f"one of {', '.join(_SUPPORTED)}"),
    ("hidden_act", lambda c: _unless(c.get("hidden_act", "silu"), "silu"), "silu"),
    ("layer type", lambda c: next(filter(_is_partial, c.get("layer_types") or []), None),
     f"{' or '.join(_LAYER_TYPES)} in every layer (use_sliding_window false)"),
    ("mamba_ssm_dtype", lambda c: _unless(c.get("mamba_ssm_dtype", "float32"), "float32"),
     "float32: the state of linear attention"),
    ("linear_conv_kernel_dim", lambda c: _unless(c.get("linear_conv_kernel_dim", 4), 4), "4"),
    ("num_experts_per_tok", _too_many_experts, "at most the number of experts"),
    ("linear_num_value_heads",
     lambda c: _uneven(c.get("linear_num_value_heads"), c.get("linear_num_key_heads"), "key"),
     "a multiple of linear_num_key_heads"),
    ("attention_bias", lambda c: c.get("attention_bias") or None, "false"),
    ("mlp_bias", lambda c: c.get("mlp_bias") or None, "false"),
    ("rope type", lambda c: _unless(_rope_type(c), *_ROPE_TYPES),
     "default, linear, llama3 or yarn (cached keys cannot be rotated again later)"),
    ("quantization_config", lambda c: _quantization(c.get("quantization_config") or {}),
     "fp8 in blocks of 128 x 128, the unquantised checkpoint, or a GGUF file"),
    ("num_attention_heads",
     lambda c: _uneven(c.get("num_attention_heads"), c.get("num_key_value_heads"), "key-value"),
     "a multiple of num_key_value_heads"),
]  # fmt: skip
