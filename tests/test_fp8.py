"""Checkpoints with FP8 weights in blocks of 128 x 128, as Qwen3-*-FP8 are published."""

import dataclasses
import functools
import json

import pytest
import torch
from oracle import hf_logprobs
from safetensors.torch import load_file, save_file
from tiny import randomise, save_tiny_tokenizer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.fp8 import load_blocks
from nanoinfer.graphs import worst_batch
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.linear import PackedWeight, dequantize_blocks, quantize_blocks_fp8
from nanoinfer.kernels.quantize import FP8, Quantized
from nanoinfer.layers.linear import Linear, QKVParallelLinear, RowParallelLinear
from nanoinfer.layers.parameter import Parallel
from nanoinfer.loader import load_weights
from nanoinfer.model_config import ModelConfig
from nanoinfer.models.qwen3 import CausalLM

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


def test_what_dequantising_takes_is_said_once(plain, tmp_path, caplog):
    folder = make_fp8(plain, tmp_path, torch.float32)
    with caplog.at_level("INFO", "nanoinfer"), LLM(folder, dtype="bfloat16") as llm:
        layers = llm.engine.model_config.num_hidden_layers
    said = [record.message for record in caplog.records if "FP8" in record.message]
    assert said == [f"dequantising {4 * layers} FP8 weights: 0.00 GiB, not 0.00"]


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


def load(folder, keep_fp8):
    config = ModelConfig.from_hf(folder)
    model = CausalLM(config, 64, Kernels(), dtype=torch.float32, device=torch.device("cpu"))
    load_weights(model, folder, False, keep_fp8)
    return model


@torch.no_grad()
def logits_of(model):
    """Of IDS as one prompt."""
    num_blocks = len(IDS) // 16 + 1
    caches = [
        spec.allocate(1 + num_blocks, 16, torch.device("cpu")) for spec in model.cache_specs()
    ]
    batch = worst_batch(len(IDS), len(IDS), 16, torch.device("cpu"))
    tables = torch.arange(1, 1 + num_blocks, dtype=torch.int32)[None]
    changes = {"input_ids": torch.tensor(IDS), "slot_mapping": 16 + torch.arange(len(IDS))}
    batch = dataclasses.replace(batch, block_tables=tables, **changes)
    return model.logits(model(batch, caches))


def emulate(x, values, scales):
    """y = x W^T in plain torch: rows quantised by 128 neighbours, sums of a group scaled once."""
    groups = x.float().unflatten(-1, (-1, 128))
    of_x = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448  # [M, G, 1]
    rounded = (groups / of_x).to(FP8).float()
    of_w = scales.repeat_interleave(128, 0)[: len(values)]  # [N, G]
    parts = torch.einsum("mgk,ngk->mgn", rounded, values.float().unflatten(-1, (-1, 128)))
    return (parts * of_x * of_w.T).sum(1)


def test_kept_weights_are_the_checkpoints_values(plain, tmp_path):
    """Fused projections too: q, k and v side by side, each with its own scales."""
    folder = make_fp8(plain, tmp_path)
    tensors, model = load_file(folder / "model.safetensors"), load(folder, keep_fp8=True)
    attention = model.get_submodule("model.layers.0.self_attn")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert attention.qkv_proj.weight.dtype == FP8
    assert same_bytes(
        attention.qkv_proj.weight, torch.cat([tensors[n].view(torch.uint8) for n in names])
    )
    expected = torch.cat([tensors[f"{name}_scale_inv"] for name in names])
    assert torch.equal(attention.qkv_proj.scales, expected)
    assert model.lm_head.scales is None


def same_bytes(found, expected):
    return torch.equal(found.view(torch.uint8), expected)


def test_logits_of_kept_weights_are_as_near_as_the_arithmetic_allows(plain, tmp_path):
    folder = make_fp8(plain, tmp_path)
    model, expected = load(folder, keep_fp8=True), hf_logprobs(plain, IDS)
    kept = relative_rms(logits_of(model), expected)
    for module in model.modules():
        if isinstance(module, Linear) and module.scales is not None:
            values, scales = module.weight.data, module.scales
            multiply = functools.partial(lambda v, s, x, b, wide: emulate(x, v, s), values, scales)
            module._packed = PackedWeight(multiply, lambda: None, None)
    emulated = relative_rms(logits_of(model), expected)
    assert kept <= 5e-2
    assert emulated <= 5e-2 * 1.2
    assert kept <= 1.2 * emulated


def test_a_matrix_with_some_parts_in_fp8_is_dequantised(plain, tmp_path):
    """q and k without scales beside v with them: one matrix has one dtype."""
    name = "model.layers.0.self_attn.{}_proj.weight"
    original = load_file(plain / "model.safetensors")
    changes = {name.format(part): original[name.format(part)] for part in "qk"}
    changes |= {f"{key}_scale_inv": None for key in changes}
    folder = make_fp8(plain, tmp_path, **changes)
    model = load(folder, keep_fp8=True)
    layer = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    assert (layer.weight.dtype, layer.scales) == (torch.float32, None)
    assert torch.equal(layer.weight[:512], original[name.format("q")])
    assert model.get_submodule("model.layers.0.mlp.down_proj").scales is not None


def test_slices_through_a_block_are_refused():
    layer = QKVParallelLinear(128, 64, 2, 1)
    values, scales = quantize_blocks_fp8(torch.randn(128, 128))
    load_blocks(layer, "q_proj", values, scales, "q")
    with pytest.raises(ValueError, match=r"k is \[64, 128\], need .* multiples of 128"):
        load_blocks(layer, "k_proj", *quantize_blocks_fp8(torch.randn(64, 128)), "k")
    with pytest.raises(ValueError, match=r"q is \[256, 128\], need \[128, 128\]"):
        load_blocks(layer, "q_proj", *quantize_blocks_fp8(torch.randn(256, 128)), "q")


def test_ranks_of_rows_take_their_columns():
    weight = torch.randn(128, 512)
    values, scales = quantize_blocks_fp8(weight)
    for rank in range(2):
        layer = RowParallelLinear(512, 128, parallel=Parallel(rank, 2))
        load_blocks(layer, "", values, scales, "o")
        own = slice(256 * rank, 256 * rank + 256)
        assert same_bytes(layer.weight, values.view(torch.uint8)[:, own])
        assert torch.equal(layer.scales, scales[:, own.start // 128 : own.stop // 128])


@pytest.mark.parametrize(
    ("M", "K", "N"), [(64, 2048, 4096), (8, 1024, 256), (3, 1152, 256), (1, 768, 2048)]
)
def test_cublas_takes_our_scales(M, K, N):
    """The shapes and strides that `scaled_mm` demands, on tensors of a GPU that is not there."""
    triton_fp8 = pytest.importorskip("nanoinfer.kernels.triton_fp8")
    padded = M + -M % 4
    values, scales = torch.empty(padded, K, dtype=FP8)[:M], torch.empty(K // 128, padded).T[:M]
    for_cublas = triton_fp8.scales_for_cublas(torch.ones(N // 128, K // 128))
    assert torch.equal(for_cublas[: K // 128].T, torch.ones(N // 128, K // 128))
    assert not for_cublas[K // 128 :].any()
    with FakeTensorMode():
        values, scales, weight, for_cublas = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
            for x in (values, scales, torch.empty(N, K, dtype=FP8), for_cublas)
        )
        rows = Quantized(values, scales)
        y = triton_fp8.multiply_cublas(rows, weight, for_cublas, None, torch.bfloat16)
        assert (y.shape, y.dtype) == ((M, N), torch.bfloat16)
        as_in_the_file = torch.empty(N // 128, K // 128, device="cuda")
        with pytest.raises(RuntimeError, match="scale"):
            triton_fp8.multiply_cublas(rows, weight, as_in_the_file, None, torch.bfloat16)


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
