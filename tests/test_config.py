"""nanoinfer/config.py and what is chosen from it: facts of checkpoints, checks of choices."""

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer import LLM, EngineConfig, model_runner
from nanoinfer.cache_sizes import available_memory
from nanoinfer.model_config import ModelConfig, RopeConfig, as_list, load_generation_config
from nanoinfer.model_runner import choose_dtype

COMMON = {
    "vocab_size": 273,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 258,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
}
# As published: the old form, before transformers 5.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        **COMMON,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    "qwen2": {
        **COMMON,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
        "sliding_window": 128,
        "max_window_layers": 1,
    },
    "llama": {
        **COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    },
}
ABSENT = ...  # no such field
FACTORS = [1.0] * 16


def write(folder: Path, base: str, **changes: Any) -> Path:
    config = {k: v for k, v in {**CONFIGS[base], **changes}.items() if v is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ModelConfig]:
    """`read("qwen3", head_dim=64)` is what a config.json with that change is read as."""
    return lambda base, **changes: ModelConfig.from_hf(write(tmp_path, base, **changes))


# -- What is not supported ------------------------------------------------------------------------

UNSUPPORTED: list[tuple[str, dict[str, Any], str, str]] = [
    # base, change, what is named, its value
    ("llama", {"architectures": ["GPT2LMHeadModel"]}, "architecture", "'GPT2LMHeadModel'"),
    (
        "qwen3",
        {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
        "architecture",
        "'Qwen3NextForCausalLM'",
    ),
    (  # a type that transformers does not know either
        "llama",
        {"architectures": ["NewForCausalLM"], "model_type": "new"},
        "architecture",
        "'NewForCausalLM'",
    ),
    ("llama", {"architectures": ABSENT}, "architecture", "'"),
    ("llama", {"architectures": None}, "architecture", "'"),
    ("llama", {"architectures": []}, "architecture", "'"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
    ("qwen3", {"hidden_act": "relu"}, "hidden_act", "'relu'"),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32},
        "layer type",
        "'sliding_attention'",
    ),
    (  # the old form: only transformers' reading shows that layer 1 slides
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1},
        "layer type",
        "'sliding_attention'",
    ),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
        "layer type",
        "'sliding_attention'",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias", "True"),
    ("llama", {"attention_bias": True}, "attention_bias", "True"),
    ("llama", {"mlp_bias": True}, "mlp_bias", "True"),
    *(
        ("llama", {field: {key: kind, **rope}}, "rope type", repr(kind))
        for kind, rope in {
            "dynamic": {"factor": 2.0},
            "longrope": {"short_factor": FACTORS, "long_factor": FACTORS, "factor": 4.0},
            "su": {"short_factor": FACTORS, "long_factor": FACTORS},
            "mrope": {"mrope_section": [4, 6, 6]},
        }.items()
        for field, key in (
            ("rope_scaling", "type"),
            ("rope_scaling", "rope_type"),
            ("rope_parameters", "rope_type"),
        )
    ),
    *(
        ("qwen3", {"quantization_config": {"quant_method": method}}, "quantization_config", method)
        for method in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors")
    ),
    # before methods had names, bitsandbytes wrote this
    ("llama", {"quantization_config": {"load_in_4bit": True}}, "quantization_config", "4bit"),
    ("llama", {"num_attention_heads": 5}, "num_attention_heads", "5 for 2"),
    ("qwen2", {"num_key_value_heads": 3}, "num_attention_heads", "4 for 3"),
]


@pytest.mark.parametrize(("base", "change", "what", "value"), UNSUPPORTED)
def test_unsupported_is_refused_by_name(tmp_path, base, change, what, value):
    path = write(tmp_path, base, **change) / "config.json"
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{path}: {what} ")
    assert value in message
    assert "is not supported; need " in message
    assert "\n" not in message


def test_unsupported_is_refused_before_anything_is_loaded(tmp_path):
    write(tmp_path, "llama", hidden_act="gelu")
    (tmp_path / "model.safetensors").write_text("never read")
    with pytest.raises(ValueError, match="hidden_act 'gelu' is not supported"):
        LLM(tmp_path)


def test_what_looks_unsupported_and_is_not(read):
    """Fields that are there but off."""
    assert read("qwen2", use_sliding_window=True, max_window_layers=2).architecture
    assert read("qwen3", sliding_window=32).architecture  # use_sliding_window is false
    assert read("qwen3", quantization_config=None, rope_scaling=None).rope.kind == "default"
    assert read("llama", rope_scaling={}, attention_bias=False).rope.kind == "default"


def test_missing_config_is_named(tmp_path):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert f"{tmp_path / 'config.json'}: not found; need a folder with" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "{'a': 1}", "\0"])
def test_broken_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": "4"},
        {"vocab_size": "many"},
        {"model_type": ABSENT},
        {"torch_dtype": "floaty"},
        {"head_dim": 31},
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}},  # no factor
        {"rope_scaling": {"type": "linear"}},
        {"layer_types": ["full_attention"]},  # of 2 layers
    ],
    ids=str,
)
def test_incomplete_config_is_a_value_error_that_names_it(tmp_path, change):
    """Also where it is transformers that finds the mistake."""
    write(tmp_path, "llama", **change)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(tmp_path)
    assert str(tmp_path) in str(caught.value)


# -- Facts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", CONFIGS)
def test_facts(read, base):
    config = read(base)
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
                 "tie_word_embeddings"):  # fmt: skip
        assert getattr(config, name) == COMMON[name], name
    head_dim = 32 if base == "qwen3" else 16
    assert config.head_dim == head_dim
    assert config.max_model_len == 256
    assert config.qk_norm == (base == "qwen3")
    assert config.qkv_bias == (base == "qwen2")
    assert config.dtype == torch.bfloat16
    assert config.eos_token_ids == {258}
    assert config.rope == RopeConfig(
        head_dim=head_dim, rotary_dim=head_dim, theta=500000.0, original_max_position=256
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1
    assert read(base, tie_word_embeddings=True).tie_word_embeddings


def test_missing_head_dim(read):
    """hidden / heads, but Qwen3's default is 128, as in transformers."""
    assert read("llama", head_dim=ABSENT).head_dim == 16
    assert read("llama", head_dim=None).head_dim == 16
    assert read("qwen2", head_dim=ABSENT).head_dim == 16
    assert read("qwen3", head_dim=ABSENT).head_dim == 128


def test_missing_kv_heads_are_as_many_as_heads(read):
    assert read("llama", num_key_value_heads=ABSENT).num_key_value_heads == 4


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_of_either_name(read, field, name):
    changes = {"torch_dtype": ABSENT, field: name}
    assert read("llama", **changes).dtype == getattr(torch, name)


def test_missing_dtype_is_float32(read):
    assert read("llama", torch_dtype=ABSENT).dtype == torch.float32
    assert read("llama", torch_dtype=None).dtype == torch.float32


@pytest.mark.parametrize(
    ("value", "expected"), [(7, {7}), (0, {0}), ([7, 8], {7, 8}), ([], set()), (None, set())]
)
def test_end_of_sequence_is_an_int_or_a_list(read, value, expected):
    assert read("llama", eos_token_id=value).eos_token_ids == expected
    assert set(as_list(value)) == expected


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
YARN_OPTIONS = {
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.5,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "truncate": False,
}


@pytest.mark.parametrize("form", ["new", "old", "oldest"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [("default", {}), ("linear", {"factor": 2.0}), ("llama3", LLAMA3), ("yarn", YARN),
     ("yarn", {**YARN, **YARN_OPTIONS})],
)  # fmt: skip
def test_rope_of_old_and_new_json(read, kind, values, form):
    old = {"rope_scaling": {("type" if form == "oldest" else "rope_type"): kind, **values}}
    new = {
        "rope_theta": ABSENT,
        "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **values},
    }
    rope = read("qwen3", **(new if form == "new" else old)).rope
    expected = dict(values)
    original = expected.pop("original_max_position_embeddings", 256)
    assert rope == RopeConfig(
        head_dim=32,
        rotary_dim=32,
        theta=5e5,
        kind=kind,
        original_max_position=original,
        **expected,
    )


def test_rope_defaults_are_transformers(read):
    assert read("llama", rope_theta=ABSENT).rope.theta == 10000.0
    assert read("llama", rope_theta=1000000).rope.theta == 1e6
    assert read("llama", partial_rotary_factor=0.5).rope.rotary_dim == 8
    no_original = {"rope_type": "yarn", "factor": 4.0}
    assert read("llama", rope_scaling=no_original).rope.original_max_position == 256
    no_factor = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert read("llama", rope_scaling=no_factor).rope.factor == 4.0


def test_equal_rope_parameters_are_one_key(read):
    first, second = read("qwen3").rope, read("qwen3").rope
    assert first == second
    assert hash(first) == hash(second)
    assert first != read("qwen3", rope_theta=1e6).rope


@pytest.mark.parametrize(
    ("rope", "max_position", "expected"),
    [
        (None, 256, 256),
        ({"rope_type": "linear", "factor": 2.0}, 256, 512),
        ({"rope_type": "linear", "factor": 1.5}, 256, 384),
        ({"rope_type": "llama3", **LLAMA3}, 512, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 256, 1024),
        # Qwen2.5 and Qwen3: max_position_embeddings is not, or is not quite, the original
        ({"rope_type": "yarn", **YARN}, 64, 256),
        ({"rope_type": "yarn", **YARN}, 80, 256),
        # DeepSeek's way: max_position_embeddings is the extended one already
        ({"rope_type": "yarn", **YARN}, 256, 256),
        ({"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 100}, 100, 250),
    ],
)
def test_max_model_len_with_scaled_rope(read, rope, max_position, expected):
    config = read("llama", rope_scaling=rope, max_position_embeddings=max_position)
    assert config.max_model_len == expected


def test_max_model_len_over_the_models_is_an_error(tiny_qwen3):
    with pytest.raises(ValueError, match=r"max_model_len: got 257, need at most 256.* yarn"):
        LLM(tiny_qwen3, max_model_len=257)


def test_generation_config(tiny_qwen3, tmp_path):
    assert load_generation_config(tmp_path) == {}
    assert load_generation_config(tiny_qwen3)["eos_token_id"] == [258, 256]
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError) as caught:
        load_generation_config(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


# -- Choices --------------------------------------------------------------------------------------

COUNTS = (0, -1, 1.0, "1", True)
FLAGS = (None, "yes", 2)
BAD_VALUES: dict[str, tuple] = {
    "model": ("", None, 3),
    "tokenizer": (3,),
    "dtype": ("int8", "fp32", None, torch.int8),
    "quantization": ("int4", "fp8", "", 8, True, torch.int8),
    "device": ("tpu", "", "cpuu", None, "cpu:x", "cuda:x"),
    "max_model_len": COUNTS,
    "max_num_seqs": (*COUNTS, None),
    "max_num_batched_tokens": (*COUNTS, None),
    "block_size": (*COUNTS, None),
    "num_kv_blocks": COUNTS,
    "kv_cache_memory": (*COUNTS, 4e9),
    "kv_cache_dtype": ("fp8", "int4", "", None, torch.int8),
    "kv_cache_rotation": FLAGS,
    "state_snapshot_memory": (-1, 1.5, True, "0"),
    "gpu_memory_utilization": (0, -0.1, 1.01, 90, float("nan"), float("inf"), "0.9", None),
    "enable_prefix_caching": FLAGS,
    "enforce_eager": FLAGS,
    "async_scheduling": FLAGS[1:],
    "compile": FLAGS[1:],
    "attention_backend": ("flash", "", None),
    "kernels": ("fast", "", None),
    "generation_config": ("vllm", "", None),
    "seed": ("a", 1.5, None),
    "tensor_parallel_size": (0, 2, -1, "1", None),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values]
)
def test_bad_choice_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{"model": "m", name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: got ")
    assert repr(value) in message or str(value) in message
    assert "need" in message
    assert "\n" not in message


def test_every_choice_has_bad_values():
    assert BAD_VALUES.keys() == {field.name for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize(
    "change",
    [
        {"quantization": "int8"},
        {"quantization": None},
        {"device": "cpu"},
        {"device": "cuda"},
        {"device": "cuda:0"},
        {"max_model_len": 1},
        {"max_model_len": None},
        {"num_kv_blocks": 1},
        {"gpu_memory_utilization": 1},
        {"compile": True},
        {"seed": -1},
        {"block_size": 1},
        {"kv_cache_memory": 2**40},
    ],
)
def test_good_choices(change):
    (name,) = change
    assert getattr(EngineConfig(model="m", **change), name) == change[name]


def test_choices_are_frozen_and_keyword_only():
    config = EngineConfig(model="m")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(TypeError):
        EngineConfig("m")
    with pytest.raises(TypeError, match="modle"):
        EngineConfig(modle="m")
    with pytest.raises(TypeError, match="max_len"):
        LLM("m", max_len=3)
    with pytest.raises(ValueError, match="trust_remote_code: got True"):
        LLM("m", trust_remote_code=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_without_cuda_is_a_value_error(tiny_qwen3):
    with pytest.raises(ValueError, match=r"device: got 'cuda'.*cpu"):
        LLM(tiny_qwen3, device="cuda")


def test_any_integer_is_a_seed(tiny_qwen3):
    for seed in (-1, 0, 2**64):
        with LLM(tiny_qwen3, seed=seed, num_kv_blocks=4, device="cpu") as llm:
            assert llm.generate([5], use_tqdm=False)[0].finished


def test_device_and_compile_are_derived():
    assert EngineConfig(model="m", device="cpu").torch_device == torch.device("cpu")
    assert EngineConfig(model="m", device="cuda:1").torch_device == torch.device("cuda", 1)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    assert EngineConfig(model="m").torch_device.type == auto
    table = {
        ("cpu", None, False): False,
        ("cpu", True, False): True,
        ("cpu", True, True): False,
        ("cuda", None, False): True,
        ("cuda", None, True): False,
        ("cuda", False, False): False,
        ("cuda", True, True): False,
    }
    for (device, wanted, eager), expected in table.items():
        config = EngineConfig(model="m", device=device, compile=wanted, enforce_eager=eager)
        assert config.use_compile == expected, (device, wanted, eager)


OTHER_VALUES = {
    "model": "folder",
    "tokenizer": "other",
    "dtype": "bfloat16",
    "quantization": "int8",
    "device": "cpu",
    "max_model_len": 77,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 99,
    "block_size": 8,
    "num_kv_blocks": 12,
    "kv_cache_memory": 123456,
    "kv_cache_dtype": "int8",
    "kv_cache_rotation": False,
    "state_snapshot_memory": 0,
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "async_scheduling": True,
    "compile": False,
    "attention_backend": "varlen",
    "kernels": "ref",
    "generation_config": "ignore",
    "seed": 5,
    "tensor_parallel_size": 1,
}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(exit_on_error=False)
    assert EngineConfig.add_cli_args(found) is found
    return found


def test_command_line_holds_every_choice():
    assert OTHER_VALUES.keys() == {field.name for field in dataclasses.fields(EngineConfig)}
    line = []
    for name, value in OTHER_VALUES.items():
        flag = name.replace("_", "-")
        is_flag = isinstance(value, bool)
        line += [f"--no-{flag}" if value is False else f"--{flag}"]
        line += [] if is_flag else [str(value)]
    config = EngineConfig(**vars(parser().parse_args(line)))
    assert config == EngineConfig(**OTHER_VALUES)


def test_command_line_defaults_are_the_choices_defaults():
    assert EngineConfig(**vars(parser().parse_args(["--model", "m"]))) == EngineConfig(model="m")
    group = argparse.ArgumentParser().add_argument_group("engine")
    assert EngineConfig.add_cli_args(group) is group
    assert "--no-compile" in parser().format_help()


@pytest.mark.parametrize(
    "line",
    [["--seed", "x"], ["--kernels", "fast"], ["--block-size", "1.5"], ["--no-such-flag"]],
)
def test_bad_command_line(line, capsys):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser().parse_args(["--model", "m", *line])


# -- What the machine adds ------------------------------------------------------------------------

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("device", "features", "wanted", "checkpoint", "expected"),
    [
        ("built", {"avx2"}, "auto", BF16, BF16),  # our kernels read it, whatever the CPU has
        ("built", {"avx2"}, "auto", F16, BF16),
        ("built", {"avx2"}, "auto", F32, F32),
        ("built", {"avx2"}, "float32", BF16, F32),
        ("cpu", {"avx2", "avx512f"}, "auto", BF16, F32),
        ("cpu", {"avx2", "avx512f"}, "auto", F16, F32),
        ("cpu", {"avx2", "avx512f"}, "auto", F32, F32),
        ("cpu", {"avx512_bf16"}, "auto", BF16, BF16),
        ("cpu", {"avx512_bf16"}, "auto", F16, BF16),
        ("cpu", {"avx512_bf16"}, "auto", F32, F32),
        ("cpu", {"amx_bf16"}, "auto", BF16, BF16),
        ("cpu", {"asimd", "bf16"}, "auto", BF16, BF16),
        ("cpu", set(), "auto", BF16, F32),  # nothing known of this machine
        ("cpu", set(), "bfloat16", F32, BF16),  # as asked
        ("cpu", {"avx512_bf16"}, "float32", BF16, F32),
        ("cuda", set(), "auto", BF16, BF16),
        ("cuda", set(), "auto", F16, F16),
        ("cuda", set(), "auto", F32, F32),
        ("cuda", set(), "float16", BF16, F16),
        ("cuda", set(), "float32", BF16, F32),
    ],
)
def test_dtype_is_chosen(monkeypatch, device, features, wanted, checkpoint, expected):
    monkeypatch.setattr(model_runner, "cpu_features", lambda: frozenset(features))
    kernels = {"built": "cpu", "cpu": "ref", "cuda": "triton"}[device]
    device = torch.device("cuda" if device == "cuda" else "cpu")
    assert choose_dtype(wanted, checkpoint, device, kernels) == expected


@pytest.mark.parametrize("features", [set(), {"avx512_bf16", "avx512_fp16", "amx_fp16", "bf16"}])
def test_a_cpu_never_gets_float16(monkeypatch, tiny_qwen3, features):
    monkeypatch.setattr(model_runner, "cpu_features", lambda: frozenset(features))
    cpu = torch.device("cpu")
    for wanted in ("auto", "float32", "bfloat16"):
        for checkpoint in (F32, BF16, F16):
            for kernels in ("ref", "cpu"):
                assert choose_dtype(wanted, checkpoint, cpu, kernels) in (F32, BF16)
    with pytest.raises(ValueError, match="dtype: got float16 on a CPU, need float32 or bfloat16"):
        choose_dtype("float16", F16, cpu, "cpu")
    with pytest.raises(ValueError, match="dtype: got float16 on a CPU"):
        LLM(tiny_qwen3, dtype="float16", device="cpu")


def test_available_memory_of_this_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = available_memory()
    assert isinstance(found, int)
    assert 2**20 < found < total


MEMINFO = "MemTotal:       2000 kB\nMemFree:    100 kB\nMemAvailable:   1000 kB\nHugePages:   0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"meminfo": MEMINFO}, 1000 * 1024),
        ({"meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "5\n"}, 1000 * 1024),
        ({"meminfo": MEMINFO, "memory.max": "500000\n", "memory.current": "99999\n"}, 400001),
        ({"meminfo": MEMINFO, "memory.max": "9999999\n", "memory.current": "0\n"}, 1000 * 1024),
        ({"meminfo": "nothing"}, 8 * 2**30),
        ({}, 8 * 2**30),
    ],
)
def test_available_memory_is_the_least_limit(monkeypatch, files, expected):
    def read_text(path: Path) -> str:
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_memory() == expected
