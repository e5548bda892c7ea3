"""What was chosen (`EngineConfig`) and what the checkpoint is (`ModelConfig`).

In: keyword arguments of `LLM(...)`; a checkpoint folder's config.json.
Out: two frozen dataclasses that every later stage reads and none writes. Values that are measured
(how many KV blocks fit) are passed on as arguments, never written back here.

A model is data plus one decoder: `ModelConfig.from_hf` turns Qwen3, Qwen2 and Llama checkpoints
into the same facts (has q/k norms? has q/k/v biases? which rope?). What cannot be expressed is
refused by name, from one table at the end of this file.
"""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every choice a user can make about an engine. Names and defaults follow vLLM."""

    model: str
    """Folder with safetensors, GGUF file, or hub id ("Qwen/Qwen3-0.6B": downloads it)."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None: the model's."""
    dtype: str = "auto"
    """auto: the checkpoint's, but float32 on a CPU without bf16 instructions."""
    device: str = "auto"
    """auto, cpu or cuda."""
    max_model_len: int | None = None
    """Prompt plus output, in tokens. None: as many as the model and the KV pool allow."""
    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_kv_blocks: int | None = None
    """Size of the KV pool in blocks, the null block not counted. None: from memory."""
    kv_cache_memory: int | None = None
    """Size of the KV pool in bytes. None: min(4 GiB, 30% of what is free) on a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV together."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes."""
    enforce_eager: bool = False
    """No torch.compile."""
    compile: bool | None = None
    """torch.compile the fused elementwise layers. None: on CUDA only."""
    kernels: Literal["auto", "ref"] = "auto"
    """auto: the fastest this machine has; ref: plain PyTorch, to read and to compare with."""
    generation_config: str = "auto"
    """auto: the checkpoint's sampling defaults when no sampling_params are given; ignore."""
    seed: int = 0
    """Seed of requests that have none of their own."""
    tensor_parallel_size: int = 1
    """Ranks. Only 1 for now."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size",
                     "num_kv_blocks", "kv_cache_memory"):  # fmt: skip
            value = getattr(self, name)
            optional = EngineConfig.__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: got {value!r}, need an integer >= 1")
        choices: dict[str, tuple] = {
            "dtype": ("auto", *DTYPES),
            "kernels": ("auto", "ref"),
            "generation_config": ("auto", "ignore"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, need one of {allowed}")
        if self.device.split(":")[0] not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device: got {self.device!r}, need auto, cpu or cuda")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization}, need a value in (0, 1]"
            )
        if self.tensor_parallel_size != 1:
            got = self.tensor_parallel_size
            raise ValueError(f"tensor_parallel_size: got {got}, need 1 (one rank only, for now)")

    @property
    def torch_device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def use_compile(self) -> bool:
        wanted = self.torch_device.type == "cuda" if self.compile is None else self.compile
        return wanted and not self.enforce_eager

    @classmethod
    def add_cli_args(cls, parser: Any) -> Any:
        """Add one `--flag` per field to an argparse parser or group; returns it."""
        for field in dataclasses.fields(cls):
            kind = typing.get_type_hints(cls)[field.name]
            if isinstance(kind, types.UnionType):
                kind = next(t for t in typing.get_args(kind) if t is not type(None))
            flag = "--" + field.name.replace("_", "-")
            required = field.default is dataclasses.MISSING
            options: dict[str, Any] = {} if required else {"default": field.default}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif typing.get_origin(kind) is Literal:
                options["choices"] = typing.get_args(kind)
            else:
                options["type"] = kind
            parser.add_argument(flag, **options)
        return parser


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

    @classmethod
    def from_hf(cls, hf: Any, head_dim: int) -> "RopeConfig":
        """From transformers' normalised `rope_parameters` (old and new JSON both end there)."""
        rope = dict(hf.rope_parameters)
        optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                    "attention_factor", "mscale", "mscale_all_dim", "truncate")  # fmt: skip
        original = rope.get("original_max_position_embeddings") or hf.max_position_embeddings
        return cls(
            head_dim=head_dim,
            rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
            theta=float(rope["rope_theta"]),
            kind=rope["rope_type"],
            factor=float(rope.get("factor") or hf.max_position_embeddings / original),
            original_max_position=original,
            **{name: rope[name] for name in optional if rope.get(name) is not None},
        )


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
    qk_norm: bool
    qkv_bias: bool
    rope: RopeConfig
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
        _check_supported(json.loads(path.read_text()), path)
        from transformers import AutoConfig  # a second to import: only once the file is known good

        hf = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        _check_supported(hf.to_dict(), path)
        architecture = hf.architectures[0]
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        rope = RopeConfig.from_hf(hf, head_dim)
        longest = hf.max_position_embeddings
        if rope.kind == "yarn":
            longest = int(rope.original_max_position * rope.factor)
        elif rope.kind == "linear":
            longest = int(longest * rope.factor)
        return cls(
            architecture=architecture,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_hidden_layers=hf.num_hidden_layers,
            num_attention_heads=hf.num_attention_heads,
            num_key_value_heads=hf.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=hf.rms_norm_eps,
            max_model_len=longest,
            tie_word_embeddings=hf.tie_word_embeddings,
            qk_norm=architecture == "Qwen3ForCausalLM",
            qkv_bias=architecture == "Qwen2ForCausalLM",
            rope=rope,
            dtype=hf.dtype or torch.float32,
            eos_token_ids=frozenset(as_list(hf.eos_token_id)),
        )


def load_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json as a dict; {} when there is none."""
    path = folder / "generation_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


# What the decoder does not do: (what, how to see it in config.json, what to try instead).
# It is asked twice, of the raw JSON (before transformers sees it) and of transformers' reading.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SUPPORTED = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
_UNSUPPORTED: list[tuple[str, Callable[[dict], Any], str]] = [
    (
        "architecture",
        lambda c: (c.get("architectures") or ["(none given)"])[0]
        if (c.get("architectures") or [None])[0] not in _SUPPORTED
        else None,
        f"one of {', '.join(_SUPPORTED)}",
    ),
    (
        "hidden_act",
        lambda c: c["hidden_act"] if c.get("hidden_act", "silu") != "silu" else None,
        "silu",
    ),
    (
        "layer type",
        lambda c: next((t for t in c.get("layer_types") or [] if t != "full_attention"), None),
        "full attention in every layer (use_sliding_window false)",
    ),
    ("attention_bias", lambda c: c.get("attention_bias") or None, "false"),
    ("mlp_bias", lambda c: c.get("mlp_bias") or None, "false"),
    (
        "rope type",
        lambda c: _rope_type(c) if _rope_type(c) not in _ROPE_TYPES else None,
        "default, linear, llama3 or yarn (cached keys cannot be rotated again later)",
    ),
    (
        "quantization_config",
        lambda c: (c.get("quantization_config") or {}).get("quant_method"),
        "the unquantised checkpoint, or a GGUF file",
    ),
    (
        "num_attention_heads",
        lambda c: f"{c['num_attention_heads']} for {c['num_key_value_heads']} key-value heads"
        if c.get("num_key_value_heads") and c["num_attention_heads"] % c["num_key_value_heads"]
        else None,
        "a multiple of num_key_value_heads",
    ),
]  # fmt: skip


def _rope_type(config: dict) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _check_supported(config: dict, path: Path) -> None:
    for what, find, need in _UNSUPPORTED:
        found = find(config)
        if found is not None:
            raise ValueError(f"{path}: {what} {found!r} is not supported; need {need}")
