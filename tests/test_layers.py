"""nanoinfer/layers and the references in nanoinfer/kernels, against transformers' own modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
)

from nanoinfer import LLM, CompletionOutput, SamplingParams
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.silu_mul import silu_mul_ref
from nanoinfer.layers.activation import MLP

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
BF16_EPS = 2**-8  # half a unit in the last place, relative
MAX_GRAPHS = 12


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
