"""nanoinfer/gguf.py: the converted folder is the model and tokenizer that the file came from."""

import inspect
import json
import os
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers as pre
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

from nanoinfer import gguf as module
from nanoinfer.gguf import convert_gguf

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"
# Merges that show where text was cut: digits, spaces, newlines.
MERGES = ["1 2", "12 3", "Ġ 1", "Ġ t", "Ġt h", "h e", "Ċ Ċ", "Ġ Ġ", "l o", "lo w", "Ġ Ċ"]
ALPHABET = sorted(pre.ByteLevel.alphabet())
MERGED = [merge.replace(" ", "") for merge in MERGES]
ADDED = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4}
# No merge leads to "Ġlow": Llama 3 takes it as a whole all the same, the others do not.
TOKENS = [*ALPHABET, *MERGED, "Ġlow", *ADDED, "[PAD272]"]  # 273, the tiny models' vocabulary
KINDS = [1] * (256 + len(MERGES) + 1) + [*ADDED.values(), 5]
BOS, IM_END = TOKENS.index("<|endoftext|>"), TOKENS.index("<|im_end|>")
TEXTS = [
    "the low 1234 12 3.123 123123",
    "a\n\nb \n c\r\n\t d   the  1",
    "it's IT'S he'll low",
    "héllo e\u0301 日本語123 中文。 👩‍👩‍👧 🙂🙂",
    "<|im_start|>the<think> low</think><|im_end|>\n ",
    "²³ ١٢٣ x_1 (low) !!\n\n??",
    "",
]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
PRE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}


def write_gguf(path: Path, model: Any, kind: str = "F32", **changes: Any) -> Path:
    """Write what llama.cpp's converter writes for `model`; `changes` override keys (None: drop)."""
    config, arch = model.config, model.config.model_type
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    facts = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "rope.dimension_count": head_dim,
    }
    values = {f"{arch}.{key}": value for key, value in facts.items()}
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE[arch],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.padding_token_id": BOS,
        "tokenizer.chat_template": TEMPLATE,
    } | {key.replace("__", "."): value for key, value in changes.items() if key != "tensors"}
    architecture = values.pop("general.architecture", arch)
    writer = gguf.GGUFWriter(path, architecture)
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in values.items():
        if value is not None:
            add[type(value)](key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    for name, tensor in gguf_tensors(model, head_dim, kind).items():
        writer.add_tensor(name, *tensor)
    for name, array in changes.get("tensors", {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model: Any, head_dim: int, kind: str) -> dict[str, tuple]:
    tensors = {}
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        for theirs, ours in NAMES.items():
            name = re.sub(rf"(^|(?<=\d\.)){re.escape(theirs)}(?=\.)", ours, name)
        if model.config.model_type == "llama" and re.search(r"attn_[qk]\.", name):
            rows, columns = array.shape  # as in llama.cpp's convert_hf_to_gguf.py::permute
            heads = array.reshape(rows // head_dim, 2, head_dim // 2, columns)
            array = heads.swapaxes(1, 2).reshape(array.shape)
        quantised = GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        tensors[name] = (gguf.quantize(np.ascontiguousarray(array), quantised), None, quantised)
        if kind in ("F32", "F16"):
            tensors[name] = (tensors[name][0],)
    return tensors


@pytest.fixture
def load(tiny):
    return lambda name: AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(5, 45)[None] * 6).logits


def reload(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-tied"])
def test_f32_file_gives_the_same_logits(name, load, tmp_path):
    model = load(name)
    folder = convert_gguf(write_gguf(tmp_path / "x.gguf", model), tmp_path / "cache")
    converted = reload(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert converted.config.architectures == model.config.architectures
    assert converted.config.tie_word_embeddings == model.config.tie_word_embeddings
    torch.testing.assert_close(logits(converted), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype", "error"),
    [("Q8_0", "bfloat16", 0.02), ("F16", "float16", 0.001), ("BF16", "bfloat16", 0.005)],
)
def test_other_types_are_stored_in_16_bits(kind, dtype, error, load, tmp_path):
    model = load("tiny-llama")
    folder = convert_gguf(write_gguf(tmp_path / "x.gguf", model, kind), tmp_path / "cache")
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    weights = dict(reload(folder).named_parameters())
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        difference = (weights[name] - parameter).abs().max() / parameter.abs().max()
        assert difference <= error, name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_rope_scaling_survives(rope, load, tmp_path):
    model = load("tiny-qwen3")
    changes = {"qwen3.rope.scaling.type": rope["rope_type"], "qwen3.rope.scaling.factor": 4.0}
    if rope["rope_type"] == "yarn":
        changes["qwen3.rope.scaling.original_context_length"] = 64
    file = write_gguf(tmp_path / "x.gguf", model, **changes)
    got = reload(convert_gguf(file, tmp_path / "cache")).config.rope_parameters
    assert rope | {"rope_theta": 1e6} == {key: got[key] for key in (*rope, "rope_theta")}


def llama3_divisors(**rope: float) -> np.ndarray:
    """What llama.cpp stores: unscaled frequencies over scaled ones, by transformers' formula."""
    parameters = {"rope_type": "llama3", "rope_theta": 5e5, **rope}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        head_dim=32,
        rope_parameters=parameters,
    )
    scaled = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    plain = 5e5 ** -(torch.arange(0, 32, 2) / 32)
    return (plain / scaled).float().numpy()


def test_published_llama3_rope_is_recovered_and_others_refused(load, tmp_path):
    model = load("tiny-llama")
    model.config.rope_parameters["rope_theta"] = 5e5
    rope = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original, is_published in ((8192, True), (4096, False)):
        rope["original_max_position_embeddings"] = original
        tensors = {"rope_freqs.weight": llama3_divisors(**rope)}
        file = write_gguf(tmp_path / f"{original}.gguf", model, tensors=tensors)
        if is_published:
            got = reload(convert_gguf(file, tmp_path / "cache")).config.rope_parameters
            assert got == rope | {"rope_type": "llama3", "rope_theta": 5e5}
        else:
            with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
                convert_gguf(file, tmp_path / "cache")


def original_tokenizer(name: str) -> tokenizers.Tokenizer:
    """The published tokenizers' rules on the tiny vocabulary: transformers' where it has them."""
    vocab = {token: i for i, token in enumerate(TOKENS[:-1])}
    merges = [tuple(merge.split()) for merge in MERGES]
    if name == "qwen2":
        tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges).backend_tokenizer
    else:
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab, merges, ignore_merges=name == "llama-bpe")
        )
        if name == "smollm":
            steps = [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        else:
            pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
            steps = [pre.Split(tokenizers.Regex(pattern), "isolated")]
            steps += [pre.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre.Sequence(steps)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for text, kind in ADDED.items():
        tokenizer.add_tokens([tokenizers.AddedToken(text, special=kind == 3, normalized=False)])
    return tokenizer


@pytest.mark.parametrize("name", ["smollm", "qwen2", "llama-bpe"])
def test_tokenizer_is_the_original(name, load, tmp_path):
    file = write_gguf(tmp_path / "x.gguf", load("tiny-llama"), tokenizer__ggml__pre=name)
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(file, tmp_path / "cache"))
    original = original_tokenizer(name)
    bos = [BOS] if name == "llama-bpe" else []
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == bos + ids
        for skip in (True, False):
            got = tokenizer.decode(ids, skip_special_tokens=skip)
            assert got == original.decode(ids, skip_special_tokens=skip)
    tokens = len(tokenizer.encode("123", add_special_tokens=False))
    assert tokens == (1 if name == "llama-bpe" else 3)
    assert tokenizer.eos_token_id == IM_END
    assert len(tokenizer) == 272  # without the padding
    messages = [{"role": "user", "content": "the low"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False)
    assert prompt == "<|im_start|>the low<|im_end|>\n"


def test_end_tokens_are_a_list(load, tmp_path):
    file = write_gguf(tmp_path / "x.gguf", load("tiny-llama"), tokenizer__ggml__eot_token_id=BOS)
    folder = convert_gguf(file, tmp_path / "cache")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [IM_END, BOS]


def test_second_call_does_no_work_and_a_changed_file_does(load, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "x.gguf", load("tiny-llama"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = convert_gguf(str(file))
    assert folder.parent == tmp_path / "xdg" / "nanoinfer" / "gguf"
    before = {child.name: child.stat().st_mtime_ns for child in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(module, "_convert", None)
        assert convert_gguf(file) == folder
    assert before == {child.name: child.stat().st_mtime_ns for child in folder.iterdir()}
    os.utime(file, ns=(1, 1))  # the same size and content, another time
    assert convert_gguf(file) != folder


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_conversion_leaves_nothing(error, load, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "x.gguf", load("tiny-llama"))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            convert_gguf(file, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    assert (convert_gguf(file, tmp_path / "cache") / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "'gemma3', need llama, qwen2, qwen3"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"llama.context_length": None}, "context_length is missing"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.dimension_count": 16}, "dimension_count"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(128, np.float32)}}, r"blk\.0\.attn_q\.bias"),
        ({"llama.block_count": 3}, r"blk\.2\.attn_q\.weight is missing"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(changes, message, load, tmp_path):
    file = write_gguf(tmp_path / "x.gguf", load("tiny-llama"), **changes)
    with pytest.raises(ValueError, match=message) as caught:
        convert_gguf(file, tmp_path / "cache")
    assert str(file) in str(caught.value)
    assert "use the safetensors folder" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_damaged_files_are_refused_in_one_line(load, tmp_path):
    whole = write_gguf(tmp_path / "x.gguf", load("tiny-llama")).read_bytes()
    lengths = [0, 3, 4, 11, 23, 24, 40, 333, 3001, len(whole) // 2, len(whole) - 33]
    damaged = [whole[:length] for length in lengths] + [b"PK\3\4" + bytes(999), bytes(64)]
    for i, content in enumerate(damaged):
        file = tmp_path / f"{i}.gguf"
        file.write_bytes(content)
        with pytest.raises(ValueError, match="not a GGUF file, or cut short") as caught:
            convert_gguf(file, tmp_path / "cache")
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
