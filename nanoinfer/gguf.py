"""Turn a GGUF file, once, into the Hugging Face folder that the rest of the engine reads.

In: a `.gguf` file of a Llama, Qwen2 or Qwen3 model, quantised or not.
Out: a folder in the user's cache with config.json, model.safetensors, tokenizer.json,
tokenizer_config.json (with the chat template) and generation_config.json.
Invariant: a folder in the cache is complete. It is written beside its place and renamed into it;
its name holds the file's path, size and time, so a changed file is converted anew.

Two traps: `llama` files store the rows of q and k in interleaved rotary order (`_unpermute`), and
a tokenizer is only named (`tokenizer.ggml.pre`), its splitting rules are not in the file
(`_pre_tokenizer`). What has no exact twin in the folder is refused by name, never dropped.
A production engine computes on the quantised blocks; here they become bfloat16.

Shapes: H heads, D head dim, E hidden.
"""

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from nanoinfer.kernels.build import cache_home

logger = logging.getLogger("nanoinfer")

_FORMAT_VERSION = 1  # raised by any change of what is written: folders of the old one are ignored
_ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_ROPE_DIVISORS = "rope_freqs.weight"  # a table of D / 2 numbers, not a weight
_ROPE_KEYS = {"type", "factor", "original_context_length", "finetuned"}  # under rope.scaling

# How text is cut before merging: the published tokenizers differ in how many digits stay together.
_DIGITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


class _Named(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{name} is missing")


def convert_gguf(path: str | Path, cache_dir: Path | None = None) -> Path:
    """Return the Hugging Face folder of the GGUF file `path`, converting it on the first call.

    `cache_dir` holds the converted folders (default: `gguf` in `cache_home()`).
    Raises ValueError where the file is damaged or holds what cannot be converted faithfully.
    """
    path = Path(path).expanduser().resolve()
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0{_FORMAT_VERSION}"
    root = cache_dir or cache_home() / "gguf"
    folder = root / f"{path.stem}-{xxhash.xxh3_64_hexdigest(identity.encode())}"
    if folder.is_dir():
        return folder
    logger.info("converting %s (%d MB) into %s", path.name, stat.st_size // 10**6, folder)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=root) as draft:
        try:
            _convert(path, Path(draft))
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"{path}: {error}; use the safetensors folder") from error
        if not folder.is_dir():  # another process may have been first
            Path(draft).rename(folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    facts, tensors = _read(path)
    config = _config(facts, tensors)
    config.save_pretrained(folder)
    transformers.GenerationConfig(**_token_ids(facts)).save_pretrained(folder)
    text = json.dumps(_tokenizer_config(facts), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    _tokenizer(facts).save(str(folder / "tokenizer.json"))
    weights = _weights(config, tensors)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _read(path: Path) -> tuple[_Named, _Named]:
    """Return the file's keys, `llama.block_count` as `block_count`, and its (mapped) tensors."""
    from gguf import GGUFReader  # type: ignore[attr-defined]

    try:
        reader = GGUFReader(path, mode="c")  # copy on write: torch wants writable arrays
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError("not a GGUF file, or cut short: download it again") from error
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"architecture: got {architecture!r}, need {', '.join(_ARCHITECTURES)}")
    prefix = f"{architecture}."
    facts = {key.removeprefix(prefix): field.contents() for key, field in reader.fields.items()}
    return _Named(facts), _Named({tensor.name: tensor for tensor in reader.tensors})


def _config(facts: _Named, tensors: _Named) -> Any:
    architecture, num_heads = facts["general.architecture"], facts["attention.head_count"]
    head_dim = facts.get("attention.key_length", facts["embedding_length"] // num_heads)
    for key, need in (("rope.dimension_count", head_dim), ("attention.sliding_window", 0)):
        if facts.get(key, need) != need:
            raise ValueError(f"{key}: got {facts[key]}, need {need}")
    return transformers.AutoConfig.for_model(
        architecture,
        architectures=[f"{_ARCHITECTURES[architecture]}ForCausalLM"],
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=facts["embedding_length"],
        intermediate_size=facts["feed_forward_length"],
        num_hidden_layers=facts["block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=facts["attention.head_count_kv"],
        head_dim=head_dim,
        # float32 in the file: 9.999999747378752e-06 was 1e-05
        rms_norm_eps=float(f"{facts['attention.layer_norm_rms_epsilon']:.6g}"),
        max_position_embeddings=facts["context_length"],
        rope_parameters=_rope(facts, tensors, head_dim),
        tie_word_embeddings="output.weight" not in tensors,
        dtype=_dtype(tensors),
        **_token_ids(facts),
    )


def _dtype(tensors: _Named) -> str:
    """Choose what to store by the matrices: norms are float32 in every file."""
    kinds = {tensor.tensor_type.name for tensor in tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _token_ids(facts: _Named) -> dict[str, Any]:
    names = ("bos", "eos", "eot", "padding")
    bos, eos, eot, pad = (facts.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    ends = [token_id for token_id in dict.fromkeys((eos, eot)) if token_id is not None]
    return {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": pad}


def _rope(facts: _Named, tensors: _Named, head_dim: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": facts.get("rope.freq_base", 10000.0)}
    keys = {key.removeprefix("rope.scaling.") for key in facts if key.startswith("rope.scal")}
    if _ROPE_DIVISORS in tensors and facts["general.architecture"] == "llama" and not keys:
        divisors = torch.from_numpy(tensors.pop(_ROPE_DIVISORS).data)
        return rope | _llama3_scaling(divisors, rope["rope_theta"], head_dim)
    kind, factor = facts.get("rope.scaling.type", "linear"), facts.get("rope.scaling.factor", 1.0)
    if not keys <= _ROPE_KEYS or kind not in ("none", "linear", "yarn"):
        raise ValueError(f"rope scaling: got {kind!r} with {sorted(keys)}, need linear or yarn")
    if kind == "none" or factor in (0.0, 1.0):
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = facts.get("rope.scaling.original_context_length", facts["context_length"])
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3_scaling(divisors: torch.Tensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the factor behind a table of frequency divisors, if it is a published one.

    All published Llama 3 models have the same low, high and original, and differ in the factor.
    """
    low, high, original, factor = 1.0, 4.0, 8192, float(f"{divisors.max().item():.6g}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim  # [D / 2]
    turns = original / (2 * torch.pi) * theta**-exponents
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as trained, 0: divided by factor
    expected = 1 / ((1 - kept) / factor + kept)
    if len(divisors) != len(expected) or not expected.allclose(divisors.double(), rtol=1e-5):
        raise ValueError(f"the tensor {_ROPE_DIVISORS} is not the table of a Llama 3 model")
    scaling = {"low_freq_factor": low, "high_freq_factor": high, "factor": factor}
    return {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}


def _tokenizer_config(facts: _Named) -> dict[str, Any]:
    tokens, names = facts["tokenizer.ggml.tokens"], ("bos", "eos", "padding", "unknown")
    ids = {f"{name[:3]}_token": facts.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    return {
        # This class leaves tokenizer.json as it is; others bring their own splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts["context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": facts.get("tokenizer.chat_template"),
        **{name: tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    }


def _tokenizer(facts: _Named) -> Tokenizer:
    model, name = facts["tokenizer.ggml.model"], facts["tokenizer.ggml.pre"]
    if model != "gpt2" or name not in ("smollm", *_DIGITS):
        need = f"'gpt2' with smollm, {', '.join(_DIGITS)}"
        raise ValueError(f"tokenizer: got {model!r} with {name!r}, need {need}")
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    vocab = {tokens[i]: i for i, kind in enumerate(kinds) if kind != _UNUSED}
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    tokenizer.normalizer = normalizers.NFC() if name == "qwen2" else None
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(text, special=kind == _CONTROL, normalized=False)])
    if facts.get("tokenizer.ggml.add_bos_token", name == "llama-bpe"):
        bos_id = facts["tokenizer.ggml.bos_token_id"]
        bos = (tokens[bos_id], bos_id)
        tokenizer.post_processor = processors.TemplateProcessing([bos[0], "$A"], None, [bos])
    return tokenizer


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name == "smollm":  # "1234" is four tokens
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    words = Regex(_WORDS + _DIGITS[name] + _OTHERS)
    return Sequence([Split(words, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


def _weights(config: Any, tensors: _Named) -> dict[str, torch.Tensor]:
    """Fill the parameters of transformers' model; every tensor of the file must have its place."""
    import gguf

    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = {}
    for hf_name, parameter in model.named_parameters():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name
        tensor = tensors.pop(name, None)
        if tensor is None or tensor.shape[::-1].tolist() != list(parameter.shape):
            raise ValueError(f"the tensor {name} is missing or not of shape {parameter.shape}")
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        if config.model_type == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _unpermute(weight, config.head_dim)
        weights[hf_name] = weight.to(config.dtype).contiguous()
    if tensors:
        raise ValueError(f"the tensors {', '.join(tensors)} have no place in {config.model_type}")
    return weights


def _unpermute(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Turn llama.cpp's row order 0, D/2, 1, D/2 + 1, ... of each head back into 0, 1, 2, ..."""
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])  # [H, D / 2, 2, E]
    return pairs.transpose(1, 2).reshape(weight.shape)
