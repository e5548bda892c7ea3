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

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict] = {
    "qwen3-0.6b": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "qwen3-tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 1024,
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
    text = json.dumps(_QWEN3 | SHAPES[shape], indent=2) + "\n"
    if config.exists():
        if config.read_text() != text:
            raise ValueError(f"{folder}: holds another model than {shape}; remove it first")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "model.safetensors.part"
    save_file(_draw_weights(SHAPES[shape]), unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")
    config.write_text(text)
    return folder


def _draw_weights(shape: dict) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name; the head is tied, so it has none."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, size in _list_tensors(shape):
        tensor = torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 2:
            tensor.normal_(std=0.02, generator=generator)
        weights[name] = tensor
    return weights


def _list_tensors(shape: dict) -> list[tuple[str, tuple[int, ...]]]:
    hidden, ffn, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q_size = shape["num_attention_heads"] * head_dim
    kv_size = shape["num_key_value_heads"] * head_dim
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (shape["vocab_size"], hidden)),
        ("model.norm.weight", (hidden,)),
    ]
    for i in range(shape["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q_size, hidden),
            "self_attn.k_proj": (kv_size, hidden),
            "self_attn.v_proj": (kv_size, hidden),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "self_attn.o_proj": (hidden, q_size),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        tensors += [(f"model.layers.{i}.{name}.weight", size) for name, size in layer.items()]
    return tensors


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        num_weights = sum(math.prod(size) for _, size in _list_tensors(SHAPES[name]))
        print(f"{name}: {num_weights / 1e6:.1f} M weights in {make_checkpoint(name)}")
