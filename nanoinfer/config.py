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
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEVICE = r"auto|cpu|cuda(:\d+)?"


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
        for name, (need, is_good) in _CHOICES.items():
            value = getattr(self, name)
            if not is_good(value):
                raise ValueError(f"{name}: got {value!r}, need {need}")

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


def _one_of(*allowed: str) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(allowed)}", lambda v: isinstance(v, str) and v in allowed


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value <= 1


_COUNT = ("an integer >= 1", _is_count)
_MAYBE_COUNT = ("None or an integer >= 1", lambda v: v is None or _is_count(v))
_FLAG = ("True or False", lambda v: isinstance(v, bool))
_CHOICES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a folder, a .gguf file or a hub id", lambda v: isinstance(v, str) and v != ""),
    "tokenizer": ("None, a folder or a hub id", lambda v: v is None or isinstance(v, str)),
    "dtype": _one_of("auto", *DTYPES),
    "device": ("auto, cpu, cuda or cuda:N", lambda v: bool(re.fullmatch(_DEVICE, str(v)))),
    "max_model_len": _MAYBE_COUNT,
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": _COUNT,
    "block_size": _COUNT,
    "num_kv_blocks": _MAYBE_COUNT,
    "kv_cache_memory": _MAYBE_COUNT,
    "gpu_memory_utilization": ("a number in (0, 1]", _is_share),
    "enable_prefix_caching": _FLAG,
    "enforce_eager": _FLAG,
    "compile": ("None, True or False", lambda v: v is None or isinstance(v, bool)),
    "kernels": _one_of("auto", "ref"),
    "generation_config": _one_of("auto", "ignore"),
    "seed": ("an integer", lambda v: isinstance(v, int)),
    "tensor_parallel_size": ("1 (one rank only, for now)", lambda v: v == 1),
}


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
        _check_supported(_read_json(path), path)
        from transformers import AutoConfig  # a second to import: only once the file is known good

        try:
            hf = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
            rope = RopeConfig.from_hf(hf, head_dim)
        except Exception as error:  # transformers raises many kinds
            raise ValueError(f"{path}: not a usable config: {error}") from error
        _check_supported(hf.to_dict(), path)
        architecture = hf.architectures[0]
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


# What the decoder does not do: (what, what of it config.json has or None, what to try instead).
# It is asked twice, of the raw JSON (before transformers sees it) and of transformers' reading.
_SUPPORTED = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNSUPPORTED: list[tuple[str, Callable[[dict], Any], str]] = [
    ("architecture", lambda c: _unless((c.get("architectures") or ["(none given)"])[0], *_SUPPORTED),
     f"one of {', '.join(_SUPPORTED)}"),
    ("hidden_act", lambda c: _unless(c.get("hidden_act", "silu"), "silu"), "silu"),
    ("layer type", lambda c: next(filter(_is_partial, c.get("layer_types") or []), None),
     "full attention in every layer (use_sliding_window false)"),
    ("attention_bias", lambda c: c.get("attention_bias") or None, "false"),
    ("mlp_bias", lambda c: c.get("mlp_bias") or None, "false"),
    ("rope type", lambda c: _unless(_rope_type(c), *_ROPE_TYPES),
     "default, linear, llama3 or yarn (cached keys cannot be rotated again later)"),
    ("quantization_config", lambda c: _quantization(c.get("quantization_config") or {}),
     "the unquantised checkpoint, or a GGUF file"),
    ("num_attention_heads", lambda c: _uneven(c.get("num_attention_heads"), c),
     "a multiple of num_key_value_heads"),
]  # fmt: skip


def _check_supported(config: dict, path: Path) -> None:
    for what, find, need in _UNSUPPORTED:
        found = find(config)
        if found is not None:
            raise ValueError(f"{path}: {what} {found!r} is not supported; need {need}")


def _unless(found: Any, *allowed: str) -> Any:
    return None if found in allowed else found


def _is_partial(layer_type: str) -> bool:
    return layer_type != "full_attention"


def _rope_type(config: dict) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _quantization(config: dict) -> str | None:
    return config.get("quant_method", str(config)) if config else None


def _uneven(num_heads: Any, config: dict) -> str | None:
    num_kv_heads = config.get("num_key_value_heads")
    are_known = isinstance(num_heads, int) and isinstance(num_kv_heads, int)
    if not are_known or num_heads % num_kv_heads == 0:
        return None
    return f"{num_heads} for {num_kv_heads} key-value heads"
