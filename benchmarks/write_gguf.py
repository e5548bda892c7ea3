"""A Hugging Face folder as the GGUF file that llama.cpp reads.

In: the folder of a Qwen3 or Llama model with default rope, and how its matrices are to be held.
Out: the file, in the user's cache, written once for each state of the folder; norms are float32.
It has no vocabulary, only its size: benchmarks send token ids. llama.cpp turns the rows 2i and
2i + 1 of a Llama head together, Hugging Face the rows i and D/2 + i, so q and k are reordered.
llama.cpp's own convert_hf_to_gguf.py does the same, and much more, but insists on a tokenizer.

    python benchmarks/write_gguf.py FOLDER q8_0
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import xxhash
from safetensors.torch import load_file

from nanoinfer.kernels.build import cache_home
from nanoinfer.model_config import ModelConfig

_FORMAT_VERSION = 1  # raised by any change of what is written: files of the old one are ignored
TYPES = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
_ARCHITECTURES = {
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
}


def write_gguf(folder: Path, kind: str, cache_dir: Path | None = None) -> Path:
    """Return the GGUF file of `folder` with matrices of `kind`, a key of `TYPES`.

    `cache_dir` holds the files (default: `gguf_files` in `cache_home()`).
    Raises ValueError where the model is of another family or its rope is scaled.
    """
    model = ModelConfig.from_hf(folder)
    if model.architecture not in _ARCHITECTURES or model.rope.kind != "default":
        got = f"{model.architecture} with {model.rope.kind} rope"
        raise ValueError(f"{folder}: got {got}, need {', '.join(_ARCHITECTURES)} with default rope")
    shards = sorted(folder.glob("*.safetensors"))
    sources = [folder / "config.json", *shards]
    state = [(str(source.resolve()), source.stat().st_mtime_ns) for source in sources]
    digest = xxhash.xxh3_64_hexdigest(repr((state, _FORMAT_VERSION)).encode())
    path = (cache_dir or cache_home() / "gguf_files") / f"{folder.name}-{kind}-{digest}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    _write(unfinished, model, shards, kind)
    return unfinished.rename(path)


def _write(path: Path, model: ModelConfig, shards: list[Path], kind: str) -> None:
    architecture = _ARCHITECTURES[model.architecture]
    names = gguf.get_tensor_name_map(architecture, model.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_facts(writer, model, kind)
    for shard in shards:
        for hf_name, tensor in load_file(shard).items():
            name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ValueError(f"{shard}: the tensor {hf_name} has no place in a GGUF file")
            if name == "output.weight" and model.tie_word_embeddings:
                continue  # llama.cpp then uses the embedding
            weight = tensor.to(torch.float32).numpy()
            if architecture == gguf.MODEL_ARCH.LLAMA and ("attn_q." in name or "attn_k." in name):
                weight = _permute(weight, model.head_dim)
            held = TYPES[kind][0] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(weight, held), raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_facts(writer: gguf.GGUFWriter, model: ModelConfig, kind: str) -> None:
    writer.add_file_type(TYPES[kind][1])
    writer.add_block_count(model.num_hidden_layers)
    writer.add_context_length(model.max_model_len)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_dimension_count(model.rope.rotary_dim)
    writer.add_rope_freq_base(model.rope.theta)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _permute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Order the rows of each head 0, D/2, 1, D/2 + 1, ..."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])  # [H, 2, D / 2, E]
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


if __name__ == "__main__":
    print(write_gguf(Path(sys.argv[1]), sys.argv[2]))
