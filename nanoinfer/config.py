"""What was chosen: every option of an engine, checked.

In: keyword arguments of `LLM(...)`, or command-line flags.
Out: a frozen `EngineConfig` that every later stage reads and none writes. What is measured (how
many KV blocks fit) is passed on as an argument, never written back here. What the checkpoint is
stands in model_config.py.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES |= {"float": torch.float32, "half": torch.float16}
QUANTIZED: dict[str | None, torch.dtype | None] = {None: None, "int8": torch.int8}
KV_CACHE_DTYPES = {"auto": None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
_DEVICE = r"auto|cpu|cuda(:\d+)?"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every choice a user can make about an engine. Names and defaults follow vLLM."""

    model: str
    """Folder with safetensors, GGUF file, or hub id ("Qwen/Qwen3-0.6B": downloads it)."""
    tokenizer: str | Path | None = None
    """Folder or hub id of the tokenizer; None: the model's."""
    dtype: str | torch.dtype = "auto"
    """auto: the checkpoint's, but float32 on a CPU with neither compiler nor bf16 instructions."""
    quantization: str | None = None
    """int8: convert the weights of all linear layers when they are loaded. None: as they are."""
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
    """Size of the KV pool, and of recurrent states, in bytes. None: min(4 GiB, 30% of what is free)
    on a CPU."""
    kv_cache_dtype: str = "auto"
    """int8 or fp8_e4m3: 8 bits for each number of keys and values. auto: the model's dtype."""
    kv_cache_rotation: bool = True
    """Turn heads by a Hadamard matrix before they are stored in 8 bits."""
    state_snapshot_memory: int | None = None
    """Bytes of recurrent states that are kept for prefix hits (models with linear attention). None:
    a quarter of the budget for caches."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV together."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes."""
    enforce_eager: bool = False
    """No torch.compile, and no recording of decoding steps."""
    async_scheduling: bool | None = None
    """Prepare a step while the one before it runs (models without recurrent layers). None: on CUDA
    only."""
    compile: bool | None = None
    """torch.compile the fused elementwise layers. None: on CUDA only."""
    attention_backend: Literal["auto", "varlen", "flash_attn"] = "auto"
    """auto: our own; varlen: torch's; flash_attn: the package's. The last two need a GPU and blocks
    of 256 tokens."""
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
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

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
            has_default = field.default is not dataclasses.MISSING
            options: dict[str, Any] = {"default": field.default} if has_default else {}
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
_MAYBE_FLAG = ("None, True or False", lambda v: v is None or isinstance(v, bool))
_CHOICES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a folder, a .gguf file or a hub id", lambda v: isinstance(v, str) and v != ""),
    "tokenizer": ("None, a folder or a hub id", lambda v: v is None or isinstance(v, str | Path)),
    "dtype": (
        f"auto or one of {', '.join(DTYPES)}",
        lambda v: str(v).removeprefix("torch.") in ("auto", *DTYPES),
    ),
    "quantization": (
        f"one of {', '.join(map(str, QUANTIZED))}",
        lambda v: v is None or (isinstance(v, str) and v in QUANTIZED),
    ),
    "device": ("auto, cpu, cuda or cuda:N", lambda v: bool(re.fullmatch(_DEVICE, str(v)))),
    "max_model_len": _MAYBE_COUNT,
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": _COUNT,
    "block_size": _COUNT,
    "num_kv_blocks": _MAYBE_COUNT,
    "kv_cache_memory": _MAYBE_COUNT,
    "kv_cache_dtype": _one_of(*KV_CACHE_DTYPES),
    "kv_cache_rotation": _FLAG,
    "state_snapshot_memory": (
        "None or an integer >= 0",
        lambda v: v is None or v == 0 or _is_count(v),
    ),
    "gpu_memory_utilization": ("a number in (0, 1]", _is_share),
    "enable_prefix_caching": _FLAG,
    "enforce_eager": _FLAG,
    "async_scheduling": _MAYBE_FLAG,
    "compile": _MAYBE_FLAG,
    "attention_backend": _one_of("auto", "varlen", "flash_attn"),
    "kernels": _one_of("auto", "ref"),
    "generation_config": _one_of("auto", "ignore"),
    "seed": ("an integer", lambda v: isinstance(v, int)),
    "tensor_parallel_size": ("1 (one rank only, for now)", lambda v: v == 1),
}
