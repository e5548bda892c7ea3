"""Tiny random checkpoints, saved as transformers saves them, that catch the bugs of an engine.

In: a name from `TINY_NAMES` and a folder. Out: a Hugging Face folder (config, weights, tokenizer,
generation config) of a few hundred kilobytes, the same on every run. Three rules make faults show:

1. norm weights are drawn from 0.5..1.5 (of the 1 + w form from -0.5..0.5), and what decides how
   fast a state fades at random, so a skipped or misplaced one changes tokens;
2. all other weights have std 0.3, so greedy outputs vary from token to token;
3. the model's vocabulary (273, odd on purpose) is larger than the tokenizer's (259), as in the
   padded Qwen models: ids without a token are produced.

The tokenizer is Qwen's without its merges: one token a byte (id = value of the byte), so every
character beyond ASCII spans tokens. As in Qwen, text is NFC-normalised first.
"""

import json
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

VOCAB_SIZE = 273
SPECIAL_TOKENS = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

_SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
# Wavelengths are 6, 15, 35, 84, ... positions: kept, kept, blended, divided by 8, ...
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MOE = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Fewer key heads than value heads: Qwen3.5's smallest model has as many, and hides which meet.
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_QWEN3_5 = {
    **_DELTA,
    "head_dim": 32,
    "num_hidden_layers": 4,  # three of them with a state, then one of attention
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}
# Half of a head is turned, and fast: a wrong position changes tokens within a few steps.
_POSITIONS = {
    **_QWEN3_5,
    "linear_num_value_heads": 16,  # rows of whole 32 bytes in any dtype: decoding is recorded
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}
# name: (model class, config class, what differs). head_dim 32 is not hidden / heads = 16, except in
# Qwen2, whose published configs have no such field: there the engine must find 16 itself.
_CHECKPOINTS = {
    "tiny-qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "tiny-qwen3-tied": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 32, "tie_word_embeddings": True},
    ),
    "tiny-qwen3-yarn": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 32, "rope_parameters": _YARN_ROPE},
    ),
    "tiny-qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "tiny-llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 32}),
    "tiny-llama-llama3rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"head_dim": 32, "rope_parameters": _LLAMA3_ROPE},
    ),
    "tiny-qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_MOE, "norm_topk_prob": True}),
    "tiny-qwen3-moe-dense": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_MOE, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "tiny-qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _QWEN3_5),
    "tiny-qwen3_5-positions": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, _POSITIONS),
    "tiny-qwen3_5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {**_QWEN3_5, **_MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32},
    ),
}
TINY_NAMES = tuple(_CHECKPOINTS)


def make_tiny(name: str, folder: Path) -> Path:
    """Write the checkpoint `name` into `folder` (created when missing) and return the folder."""
    if name not in _CHECKPOINTS:
        raise ValueError(f"name: got {name!r}, need one of {', '.join(TINY_NAMES)}")
    model_class, config_class, changes = _CHECKPOINTS[name]
    config = config_class(**{**_SIZES, "rope_parameters": dict(_ROPE), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).float()
        randomise(model)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        bos_token_id=256,
        eos_token_id=[258, 256],
        pad_token_id=256,
    )
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


def adds_one(name: str, model: str) -> bool:
    """A norm of the 1 + w form: all of Qwen3.5's but the one behind a gated delta net."""
    return "norm" in name and "qwen3_5" in model and "linear_attn.norm" not in name


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if adds_one(name, model.config.model_type):
            parameter.uniform_(-0.5, 0.5)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith(("A_log", "dt_bias")):
            parameter.uniform_(-1.0, 1.0)
        else:
            parameter.normal_(0.0, 0.3)


def save_tiny_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    vocab = {character: byte for byte, character in enumerate(_byte_level_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # For model type qwen2, transformers builds these two itself whatever the file says, so any
    # other choice would make AutoTokenizer disagree with tokenizer.json.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 256,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def _byte_level_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself, or for the others 256, 257, ... in turn."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
