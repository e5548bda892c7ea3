"""Checkpoints with FP8 weights in blocks of 128 x 128, as Qwen3-*-FP8 are published."""

import json

import pytest
import torch
from oracle import hf_logprobs
from safetensors.torch import load_file, save_file
from tiny import randomise, save_tiny_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.kernels.linear import dequantize_blocks, quantize_blocks_fp8
from nanoinfer.kernels.quantize import FP8

# hidden / 128 = 3 is no multiple of 4, which some kernels want padded.
SIZES = {
    "vocab_size": 273,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
IDS = torch.randint(0, 273, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).float()
        randomise(model)
        for name, parameter in model.named_parameters():
            if "_proj" in name:  # as a trained model's: attention is not a choice of one key
                parameter.data.mul_(0.1)
    model.save_pretrained(folder)
    save_tiny_tokenizer(folder)
    return folder


def make_fp8(plain, folder, scale_dtype=torch.float32, **changes):
    """The same checkpoint with every projection of the layers in FP8."""
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj." in name:
            tensor, scales = quantize_blocks_fp8(tensor)
            tensors[f"{name}_scale_inv"] = scales.to(scale_dtype)
        tensors[name] = tensor
    tensors |= changes
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": FORMAT}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def logprobs_of(folder, **options):
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    with LLM(folder, num_kv_blocks=8, device="cpu", skip_tokenizer_init=True, **options) as llm:
        (output,) = llm.generate(IDS, params, use_tqdm=False)
    rows = output.prompt_logprobs[1:]
    return torch.tensor([[row[i].logprob for i in range(len(row))] for row in rows])


def relative_rms(found, expected):
    centred = expected - expected.mean(-1, keepdim=True)
    error = (found - found.mean(-1, keepdim=True)) - centred
    return float(error.pow(2).mean().sqrt() / centred.pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_near_the_original(plain, tmp_path, scale_dtype, dtype):
    folder = make_fp8(plain, tmp_path, scale_dtype)
    error = relative_rms(logprobs_of(folder, dtype=dtype), hf_logprobs(plain, IDS)[:-1])
    assert 1e-3 < error <= 5e-2


def test_weights_are_values_times_scales(plain, tmp_path):
    """Exactly what a model with the dequantised weights says."""
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = (
            dequantize_blocks(*quantize_blocks_fp8(tensor)) if "_proj." in name else tensor
        )
    (tmp_path / "wide").mkdir()
    (tmp_path / "fp8").mkdir()
    (tmp_path / "wide/config.json").write_text((plain / "config.json").read_text())
    save_file(tensors, tmp_path / "wide/model.safetensors", {"format": "pt"})
    found = logprobs_of(make_fp8(plain, tmp_path / "fp8"), dtype="float32")
    assert torch.equal(found, logprobs_of(tmp_path / "wide", dtype="float32"))


NAME = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({f"{NAME}_scale_inv": torch.ones(2, 4)}, rf"{NAME}.* scales \[2, 4\], need .* \[3, 4\]"),
        ({NAME: torch.ones(384, 512)}, rf"{NAME}.* is torch.float32 .*need torch.float8_e4m3fn"),
        ({f"{NAME}_scale_inv": None}, rf"{NAME}.* is torch.float8_e4m3fn .*need float"),
        ({"model.norm.weight_scale_inv": torch.ones(1)}, r"model\.norm\.weight.* need "),
        ({"model.other.weight_scale_inv": torch.ones(1)}, r"other\.weight_scale_inv.* no weight"),
    ],
)
def test_what_does_not_fit_is_named(plain, tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        logprobs_of(make_fp8(plain, tmp_path, **changes), dtype="float32")


@pytest.mark.parametrize("change", [{"weight_block_size": [64, 64]}, {"quant_method": "awq"}])
def test_other_formats_are_refused(plain, tmp_path, change):
    folder = make_fp8(plain, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization_config .* not supported; need fp8"):
        logprobs_of(folder)


def test_the_tiny_checkpoint_is_in_fp8(plain, tmp_path):
    tensors = load_file(make_fp8(plain, tmp_path) / "model.safetensors")
    assert sum(tensor.dtype == FP8 for tensor in tensors.values()) == 14
    assert tensors["lm_head.weight"].dtype == torch.float32
