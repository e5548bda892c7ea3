"""nanoinfer/layers and the references in nanoinfer/kernels, against transformers' own modules."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    apply_rotary_pos_emb,
)

from nanoinfer import LLM, CompletionOutput, SamplingParams
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.rotary import rotary_ref
from nanoinfer.kernels.silu_mul import silu_mul_ref
from nanoinfer.layers.activation import MLP
from nanoinfer.layers.rotary_embedding import get_rope, inverse_frequencies
from nanoinfer.model_config import RopeConfig

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BF16_EPS = 2**-8  # half a unit in the last place, relative
MAX_GRAPHS = 12


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- Rotary ---------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-3.2": {**LLAMA3, "factor": 32.0},
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "yarn": YARN,
    "yarn-tiny": {**YARN, "original_max_position_embeddings": 64},
    "yarn-no-ramp": {**YARN, "original_max_position_embeddings": 6},
    "yarn-ramp-beyond-the-end": {
        **YARN,
        "rope_theta": 20.0,
        "original_max_position_embeddings": 3000,
    },
    "yarn-factor-1": {**YARN, "factor": 1.0},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-one-beta": {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn-equal-mscales": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.8782488562869419},
    "yarn-attention-factor-wins": {**YARN, "attention_factor": 1.5, "mscale": 1.0,
                                   "mscale_all_dim": 0.5},
    "yarn-truncate-false": {**YARN, "truncate": False},
    "yarn-gpt-oss": {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "truncate": False},
}  # fmt: skip
HEAD_DIMS = [16, 64, 128]


def hf_config(
    name: str, head_dim: int = 64, theta: float = 1e6, max_position: int = 40960
) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters={"rope_theta": theta, **ROPES[name]},
    )


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_transformers(name, head_dim, theta):
    hf = hf_config(name, head_dim, theta)
    theirs = LlamaRotaryEmbedding(hf)
    inv_freq, factor = inverse_frequencies(RopeConfig.from_hf(hf, head_dim))
    torch.testing.assert_close(inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_every_method_changes_the_default():
    """Else the comparison above would show nothing."""
    default, _ = inverse_frequencies(RopeConfig.from_hf(hf_config("default"), 64))
    for name in set(ROPES) - {"default", "yarn-factor-1", "yarn-ramp-beyond-the-end"}:
        inv_freq, _ = inverse_frequencies(RopeConfig.from_hf(hf_config(name), 64))
        assert (inv_freq / default).min() < 0.5, name
        assert (inv_freq / default).max() <= 1, name


@pytest.mark.parametrize("partial_rotary_factor", [0.25, 0.5])
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn"])
def test_partial_frequencies_equal_transformers(name, partial_rotary_factor):
    hf = hf_config(name)
    hf.rope_parameters["partial_rotary_factor"] = partial_rotary_factor
    config = RopeConfig.from_hf(hf, 64)
    inv_freq, _ = inverse_frequencies(config)
    assert config.rotary_dim == 2 * len(inv_freq) == int(64 * partial_rotary_factor)
    if name != "default":  # which is not partial in transformers' Llama
        expected, _ = ROPE_INIT_FUNCTIONS[name](hf, "cpu")
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "yarn-mscale"])
def test_rotary_equals_transformers(name, dtype):
    hf = hf_config(name)
    positions = torch.tensor([0, 1, 2, 77, 3, 4095, 300, 0, 2047])
    query, key = random(9, 4, 64, dtype=dtype), random(9, 2, 64, dtype=dtype, seed=1)
    exact = LlamaRotaryEmbedding(hf)(torch.zeros(1), positions[None])  # cos, sin in fp32
    q, k = (x.float().transpose(0, 1)[None] for x in (query, key))
    expected = [x[0].transpose(0, 1) for x in apply_rotary_pos_emb(q, k, *exact)]
    rope = get_rope(RopeConfig.from_hf(hf, 64), 4096, CPU)
    found = rope(positions, query, key, Kernels())
    # Angles of thousands of radians in fp32 are off by some 1e-4 here and there.
    rtol = 1e-4 if dtype == torch.float32 else BF16_EPS
    for ours, theirs, x in zip(found, expected, (query, key), strict=True):
        assert ours.dtype == dtype
        assert ours.shape == x.shape
        torch.testing.assert_close(ours.float(), theirs, rtol=rtol, atol=1e-3)


def test_rotary_turns_pairs_half_a_head_apart():
    """(1, 0) at dims i and i + R/2 becomes (cos, sin); the table's row is [cos | sin]."""
    cos_sin = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.6, 0.0, 0.8, 1.0]])
    query = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])
    found, _ = rotary_ref(torch.tensor([1]), query, query, cos_sin)
    torch.testing.assert_close(found, torch.tensor([[[0.6, 0.0, 0.8, 2.0]]]))
    found, _ = rotary_ref(torch.tensor([0]), query, query, cos_sin)
    assert torch.equal(found, query)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotary_leaves_the_rest(dtype):
    whole = RopeConfig(head_dim=32, rotary_dim=32, theta=1e4)
    partial = RopeConfig(head_dim=96, rotary_dim=32, theta=1e4)
    positions = torch.tensor([0, 5, 9])
    query, key = random(3, 4, 96, dtype=dtype), random(3, 1, 96, dtype=dtype, seed=1)
    found = get_rope(partial, 16, CPU)(positions, query, key, Kernels())
    rope = get_rope(whole, 16, CPU)
    expected = rope(positions, query[..., :32], key[..., :32], Kernels())
    for ours, front, x in zip(found, expected, (query, key), strict=True):
        assert torch.equal(ours[..., :32], front)
        assert torch.equal(ours[..., 32:], x[..., 32:])
        assert not torch.equal(ours[1:, :, :32], x[1:, :, :32])


def test_table_holds_cos_and_sin_in_float32():
    table = get_rope(RopeConfig(head_dim=32, rotary_dim=16, theta=1e4), 100, CPU).cos_sin
    assert table.shape == (100, 16)
    assert table.dtype == torch.float32
    assert torch.equal(table[0], torch.tensor([1.0] * 8 + [0.0] * 8))
    torch.testing.assert_close(table[:, 0], torch.arange(100.0).cos())
    torch.testing.assert_close(table[:, 8], torch.arange(100.0).sin())


def test_equal_parameters_share_one_table():
    def config(theta: float = 12345.0) -> RopeConfig:
        return RopeConfig(head_dim=32, rotary_dim=32, theta=theta)

    rope = get_rope(config(), 64, CPU)
    assert get_rope(config(), 64, torch.device("cpu")) is rope
    others = [get_rope(config(54321.0), 64, CPU), get_rope(config(), 65, CPU)]
    assert all(other.cos_sin is not rope.cos_sin for other in others)
    alive = weakref.ref(rope.cos_sin)
    del rope
    gc.collect()
    assert alive() is None  # nobody uses it
    assert get_rope(config(), 64, CPU).cos_sin.shape == (64, 32)


def test_layers_and_engines_share_the_table(tiny_qwen3):
    def tables(llm: LLM) -> set[int]:
        layers = llm.engine._runner._model.model.layers
        return {id(layer.self_attn._rope) for layer in layers}

    with LLM(tiny_qwen3, num_kv_blocks=16) as one, LLM(tiny_qwen3, num_kv_blocks=16) as two:
        assert len(tables(one) | tables(two)) == 1


# -- SwiGLU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 34), (0, 8)])
def test_silu_mul(dtype, shape):
    gate_up = random(*shape, dtype=dtype)
    half = shape[-1] // 2
    found = silu_mul_ref(gate_up)
    assert found.dtype == dtype
    assert torch.equal(found, F.silu(gate_up[..., :half]) * gate_up[..., half:])


def test_mlp_equals_transformers():
    hf = Qwen3MLP(Qwen3Config(hidden_size=32, intermediate_size=48)).requires_grad_(False)
    mlp = MLP(32, 48, Kernels(), dtype=torch.float32, device=CPU)
    for name in ("gate_proj", "up_proj"):
        mlp.gate_up_proj.load("weight", name, getattr(hf, name).weight)
    mlp.down_proj.weight.data.copy_(hf.down_proj.weight)
    x = random(5, 32)
    torch.testing.assert_close(mlp(x), hf(x))


# -- torch.compile --------------------------------------------------------------------------------


def test_compiled_kernels_are_chosen():
    eager, compiled = (select_kernels(CPU, "ref", use_compile) for use_compile in (False, True))
    assert eager == Kernels()
    for op in ("rms_norm", "add_rms_norm", "rotary", "silu_mul"):
        assert getattr(compiled, op) is not getattr(eager, op)
    for op in ("store_kv", "paged_attention"):
        assert getattr(compiled, op) is getattr(eager, op)


def compare_compiled_with_eager(folder: Path) -> None:
    """One token, many tokens, one sequence, many: no shape is beyond what is compiled."""
    prompts = [[5], [7, 8], list(range(20, 53)), list(range(100, 117))]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)

    def run(use_compile: bool) -> list[CompletionOutput]:
        options: dict[str, Any] = {"dtype": "float32", "kernels": "ref", "device": "cpu"}
        with LLM(folder, num_kv_blocks=32, compile=use_compile, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt in prompts:
                outputs += llm.generate(prompt, params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled = run(True)
    for ours, eager in zip(compiled, run(False), strict=True):
        assert ours.token_ids == eager.token_ids
        assert ours.cumulative_logprob == pytest.approx(eager.cumulative_logprob, abs=1e-4)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torch.compile only traces, which takes seconds, not minutes; the graphs made so far."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        graphs.append(str(graph.graph))
        return graph.forward

    compile = torch.compile

    def trace(function: Any, options: Any = None, **how: Any) -> Any:  # options: inductor's
        return compile(function, backend=backend, **how)

    monkeypatch.setattr(torch, "compile", trace)
    return graphs


@pytest.mark.parametrize(
    "name",
    [
        "tiny-qwen3",
        pytest.param("tiny-qwen2", marks=pytest.mark.slow),
        pytest.param("tiny-llama", marks=pytest.mark.slow),
    ],
)
def test_traced_engine_equals_eager(tiny, name, traced):
    """A few graphs serve all steps; what inductor makes of them: the test below."""
    compare_compiled_with_eager(tiny(name))
    assert 4 <= len(traced) <= MAX_GRAPHS


@pytest.mark.slow  # a minute, where inductor's cache is empty
def test_compiled_engine_equals_eager(tiny_qwen3):
    compare_compiled_with_eager(tiny_qwen3)
