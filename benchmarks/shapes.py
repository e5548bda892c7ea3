"""Checkpoints of a known shape with random weights: what speed is measured on.

In: a name from `SHAPES`. Out: a Hugging Face folder with config.json and model.safetensors (bf16),
readable by nanoinfer and by transformers' AutoConfig and AutoModelForCausalLM. There is no
tokenizer: benchmarks send token ids.

Speed depends on the shape alone, so nothing is downloaded. Weights are drawn with std 0.02, norms
are 1, and the same name always gives the same bytes. config.json is written last: a folder that
has it is whole.

    python benchmarks/shapes.py qwen3-0.6b
"""

import json
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoinfer.kernels.build import cache_home

_COMMON = {
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_QWEN3 = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_theta": 1000000,
}
_QWEN3_MOE = {**_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
_QWEN3_5 = {
    **_COMMON,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
SHAPES: dict[str, dict] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "qwen3-8b": {
        **_QWEN3,
        "tie_word_embeddings": False,
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
    },
    "qwen3-tiny": {
        **_QWEN3,
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 1024,
    },
    # Qwen3-30B-A3B with 4 of its 48 layers: 5.6 GB instead of 61.
    "qwen3-30b-a3b-4layers": {
        **_QWEN3_MOE,
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
    "qwen3.5-0.8b": {
        **_QWEN3_5,
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
}


def make_checkpoint(shape: str, folder: Path | None = None) -> Path:
    """Write the checkpoint of `shape` unless it is there already, and return its folder.

    Without `folder` it goes to ~/.cache/nanoinfer/shapes/, for all benchmarks to share.
    Raises ValueError where the shape is unknown or the folder holds another model.
    """
    if shape not in SHAPES:
        raise ValueError(f"shape: got {shape!r}, need one of {', '.join(SHAPES)}")
    folder = folder or cache_home() / "shapes" / shape
    config = folder / "config.json"
    text = json.dumps(SHAPES[shape], indent=2) + "\n"
    if config.exists():
        if json.loads(config.read_text()) != SHAPES[shape]:
            raise ValueError(f"{folder}: holds another model than {shape}; remove it first")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "model.safetensors.part"
    save_file(_draw_weights(SHAPES[shape]), unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")
    config.write_text(text)
    return folder


def _draw_weights(shape: dict) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name; a tied head has none."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, size in _list_tensors(shape):
        tensor = torch.ones(size, dtype=torch.bfloat16)
        if len(size) > 1:
            tensor.normal_(std=0.02, generator=generator)
        weights[name] = tensor
    return weights


def _list_tensors(shape: dict) -> list[tuple[str, tuple[int, ...]]]:
    hidden = shape["hidden_size"]
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (shape["vocab_size"], hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    if not shape["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", (shape["vocab_size"], hidden)))
    for i in range(shape["num_hidden_layers"]):
        interval = shape.get("full_attention_interval", 1)
        mixer = _delta_tensors(shape) if (i + 1) % interval else _attention_tensors(shape)
        layer = {"input_layernorm.weight": (hidden,), **mixer}
        layer |= {"post_attention_layernorm.weight": (hidden,), **_mlp_tensors(shape)}
        tensors += [(f"model.layers.{i}.{name}", size) for name, size in layer.items()]
    return tensors


def _attention_tensors(shape: dict) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    is_gated = shape["model_type"] == "qwen3_5_text"
    q_size = shape["num_attention_heads"] * head_dim
    kv_size = shape["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj.weight": ((1 + is_gated) * q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, q_size),
    }


def _delta_tensors(shape: dict) -> dict[str, tuple[int, ...]]:
    hidden, heads = shape["hidden_size"], shape["linear_num_value_heads"]
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    values = heads * shape["linear_value_head_dim"]
    channels = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, shape["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (shape["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _mlp_tensors(shape: dict) -> dict[str, tuple[int, ...]]:
    hidden, ffn, experts = shape["hidden_size"], shape["intermediate_size"], [""]
    tensors: dict[str, tuple[int, ...]] = {}
    if num_experts := shape.get("num_experts"):
        ffn, experts = shape["moe_intermediate_size"], [f"experts.{i}." for i in range(num_experts)]
        tensors["mlp.gate.weight"] = (num_experts, hidden)
    for expert in experts:
        tensors[f"mlp.{expert}gate_proj.weight"] = (ffn, hidden)
        tensors[f"mlp.{expert}up_proj.weight"] = (ffn, hidden)
        tensors[f"mlp.{expert}down_proj.weight"] = (hidden, ffn)
    return tensors


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        num_weights = sum(math.prod(size) for _, size in _list_tensors(SHAPES[name]))
        print(f"{name}: {num_weights / 1e6:.1f} M weights in {make_checkpoint(name)}")
