"""RMSNorm and FP8 rows, against transformers' own modules, fp64 and arithmetic done by hand.

x = 1, 1, ... and eps = 0 make the normalised row the weight itself: how a row of chosen values is
put through a norm that quantises.
"""

import functools
import math
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from nanoinfer import LLM
from nanoinfer.demo import demo_model
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.quantize import FP8, Quantized, ScaleLayout, dequantize, quantize_ref
from nanoinfer.kernels.rms_norm import add_rms_norm_ref, rms_norm_gated_ref, rms_norm_ref
from nanoinfer.layers.embedding import Embedding
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.loader import load_weights

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = [FP32, BF16]
SCALES = [1e-4, 1.0, 1e4]  # at 1e-4 the eps counts
SHAPES = [(5, 64), (3, 4, 33), (1, 1), (0, 64)]
EPS = 1e-6
PLAIN = [Qwen3RMSNorm, LlamaRMSNorm]
ONE_PLUS = [Qwen3_5RMSNorm, GemmaRMSNorm, Gemma3RMSNorm]
needs_inductor = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="torch.compile's C++ includes Python.h",
)
LAYOUTS = [
    ScaleLayout(group_size, is_column_major, is_packed)
    for group_size in (32, 128)
    for is_column_major in (False, True)
    for is_packed in (False, True)
]


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.fixture(params=["ref", "cpu"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """References and C++. torch.empty gives bytes 255, NaN in every float: what is not written."""
    empty = torch.empty

    def poisoned(*size: Any, **how: Any) -> Tensor:
        tensor = empty(*size, **how)
        tensor.untyped_storage().fill_(255)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    return table(request.param)


@functools.cache
def table(name: str) -> Kernels:
    found = select_kernels(CPU, "ref" if name == "ref" else "auto", False)
    if found.name != name:
        pytest.skip("no C++ kernels here")
    return found


def make_norm(weight: Tensor, kernels: Kernels | None = None, eps: float = EPS, **how) -> RMSNorm:
    norm = RMSNorm(len(weight), eps, kernels or Kernels(), dtype=weight.dtype, device=CPU, **how)
    norm.load("weight", "", weight)
    return norm


def make_hf(kind: type[nn.Module], weight: Tensor, eps: float = EPS) -> nn.Module:
    norm = kind(len(weight), eps).to(weight.dtype)  # type: ignore[call-arg]
    norm.weight.data.copy_(weight)  # type: ignore[union-attr, operator]
    return norm.requires_grad_(False)


def in_fp64(x: Tensor, factor: Tensor, eps: float = EPS) -> Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * factor.double()


def ulps(found: Tensor, expected: Tensor) -> Tensor:
    """How many numbers of the dtype lie between, element by element."""
    kind, mask = {2: (torch.int16, 0x7FFF), 4: (torch.int32, 0x7FFFFFFF)}[found.itemsize]

    def order(x: Tensor) -> Tensor:
        bits = x.contiguous().view(kind).long()
        return torch.where(bits < 0, -(bits & mask), bits)

    return (order(found) - order(expected)).abs()


def assert_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def assert_twin(found: Tensor, expected: Tensor, kernels: Kernels) -> None:
    """The reference's bits; of C++ a rare element beyond a rounding, fp32 in another order."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if kernels.name == "ref":
        assert torch.equal(found, expected)
    elif found.dtype == FP32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-30)
    else:
        apart = ulps(found, expected)
        assert (apart <= 2).all()
        assert (apart > 0).sum() <= 1 + apart.numel() // 1000


# -- two calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_class_has_two_calls(kernels, dtype):
    norm = make_norm(random(64, dtype=dtype, seed=2), kernels)
    x, residual = random(3, 64, dtype=dtype), random(3, 64, dtype=dtype, seed=1)
    before = x.clone(), residual.clone()
    y = norm(x)
    assert isinstance(y, Tensor)
    assert_twin(y, rms_norm_ref(x, norm.weight, EPS), kernels)
    both = norm(x, residual)
    assert len(both) == 2
    for found, expected in zip(both, add_rms_norm_ref(x, residual, norm.weight, EPS), strict=True):
        assert_twin(found, expected, kernels)
    assert [*norm.state_dict()] == ["weight"]
    assert not norm.weight.requires_grad
    assert_bits(x, before[0])
    assert_bits(residual, before[1])


@pytest.mark.parametrize("scale", [1.0, 100.0])  # at 100 the sum loses most of x
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_residual_is_the_sum_as_torch_rounds_it(kernels, dtype, scale):
    norm = make_norm(random(65, dtype=dtype, seed=2), kernels)
    x, residual = random(7, 65, dtype=dtype), random(7, 65, dtype=dtype, seed=1, scale=scale)
    _, new_residual = norm(x, residual)
    assert_bits(new_residual, x + residual)
    assert_bits(new_residual, (x.double() + residual.double()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_add_then_norm_equals_transformers(kernels, dtype, scale):
    x, residual = random(7, 64, dtype=dtype), random(7, 64, dtype=dtype, seed=1, scale=scale)
    weight = random(64, seed=2).add(1).to(dtype)
    hf = make_hf(Qwen3RMSNorm, weight)
    assert_twin(make_norm(weight, kernels)(x, residual)[0], hf(residual + x), kernels)


def test_statistics_are_of_the_rounded_sum(kernels):
    """Those of the sum before its rounding give other bits, and not transformers'."""
    x, residual = random(64, 96, dtype=BF16), random(64, 96, dtype=BF16, seed=1, scale=16)
    weight = random(96, seed=2).add(1).to(BF16)
    y, _ = make_norm(weight, kernels)(x, residual)
    unrounded = x.float() + residual.float()
    of_unrounded = make_hf(Qwen3RMSNorm, weight)(unrounded).to(BF16)
    of_rounded = make_hf(Qwen3RMSNorm, weight)(residual + x)
    assert (of_unrounded != of_rounded).float().mean() > 0.1
    assert_twin(y, of_rounded, kernels)


def test_sum_of_squares_in_fp16_overflows_where_ours_is_finite():
    """A thousand squares of numbers near 30 add up to 900 thousand; fp16 ends at 65,504."""
    x = random(1, 1024, dtype=torch.float16, scale=30)
    squares = x.square()
    assert squares.isfinite().all()
    total = torch.zeros((), dtype=torch.float16)
    for square in squares[0]:
        total += square
    assert total.isinf()
    weight = torch.ones(1024, dtype=torch.float16)
    # torch adds fp16 up in fp32; ten times as large, each square overflows as well
    for rows in (x, 10 * x):
        y = make_norm(weight)(rows)
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.double(), in_fp64(rows, weight), rtol=1e-3, atol=1e-4)


# -- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hf", PLAIN)
def test_plain_form_equals_transformers(hf, shape, scale, dtype):
    x, weight = random(*shape, dtype=dtype, scale=scale), random(shape[-1], seed=1).add(1).to(dtype)
    assert_bits(make_norm(weight, eps=1e-5)(x), make_hf(hf, weight, 1e-5)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hf", ONE_PLUS)
def test_one_plus_form_equals_transformers(hf, shape, scale, dtype):
    x = random(*shape, dtype=dtype, scale=scale)
    weight = random(shape[-1], dtype=dtype, seed=1, scale=0.3)
    norm = make_norm(weight, form="one_plus")
    assert norm.weight.dtype == FP32  # in which the sum is kept, whatever the model's dtype
    assert_bits(norm(x), make_hf(hf, weight)(x))
    residual = random(*shape, dtype=dtype, seed=2, scale=scale)
    y, new_residual = norm(x, residual)
    assert_bits(new_residual, residual + x)
    assert_bits(y, make_hf(hf, weight)(residual + x))


def test_folding_one_plus_in_bf16_would_lose_bits():
    """w of 2^-9 is lost beside 1 in bf16; the forms round in different places besides."""
    weight = random(256, dtype=BF16, seed=1, scale=2**-9)
    folded = 1 + weight
    kept = make_norm(weight, form="one_plus").weight
    assert_bits(kept, 1 + weight.float())
    assert len(folded.unique()) < 16 < 100 < len(kept.unique())
    x = random(50, 256, dtype=BF16)
    one_plus, plain = make_norm(weight, form="one_plus")(x), make_norm(folded)(x)
    exact = in_fp64(x, 1 + weight.double())
    assert (one_plus != plain).float().mean() > 0.05
    assert (plain - exact).abs().mean() > 1.2 * (one_plus - exact).abs().mean()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_plus_form_rounds_once_and_plain_form_twice(kernels, dtype):
    """The same factor, exact in bf16, and yet other bits: not one form with another weight."""
    x, weight = random(50, 64, dtype=dtype), random(64, seed=1).mul(4).round().div(8).to(dtype)
    factor = 1 + weight
    assert_bits(factor.float(), 1 + weight.float())
    one_plus = make_norm(weight, kernels, form="one_plus")(x)
    plain = make_norm(factor, kernels)(x)
    once = in_fp64(x, factor).to(dtype)
    twice = in_fp64(x, torch.ones(64)).to(dtype) * factor
    if dtype == FP32:
        torch.testing.assert_close(one_plus, plain)
    else:
        assert (once != twice).float().mean() > 0.1
        assert ((one_plus != once).sum(), (plain != twice).sum()) <= (3, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_form_equals_transformers(shape, scale, dtype):
    x, gate = random(*shape, dtype=dtype, scale=scale), random(*shape, dtype=dtype, seed=2, scale=4)
    weight = random(shape[-1], seed=1).add(1).to(dtype)
    assert_bits(make_norm(weight)(x, gate=gate), make_hf(Qwen3_5RMSNormGated, weight)(x, gate))


def test_gate_is_applied_in_fp32(kernels):
    """silu rounded to bf16 before the product would give other bits."""
    x, gate = random(20, 64, dtype=BF16), random(20, 64, dtype=BF16, seed=2, scale=4)
    weight = random(64, seed=1).add(1).to(BF16)
    norm = make_norm(weight, kernels)
    expected = make_hf(Qwen3_5RMSNormGated, weight)(x, gate)
    assert (rms_norm_ref(x, weight, EPS) * F.silu(gate) != expected).float().mean() > 0.1
    assert_twin(norm(x, gate=gate), expected, kernels)


def test_gate_beside_a_residual_or_fp8_is_refused():
    x = random(3, 128)
    with pytest.raises(ValueError, match="gate"):
        make_norm(x[0])(x, x, x)
    with pytest.raises(ValueError, match="gate"):
        make_norm(x[0], quantized=ScaleLayout())(x, gate=x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_scale_multiplies_the_normalised_row(kernels, dtype):
    x, residual = random(9, 64, dtype=dtype), random(9, 64, dtype=dtype, seed=1)
    weight = random(64, seed=2).add(1).to(dtype)
    plain = make_norm(weight, kernels)
    for out_scale in (0.25, 2.0):  # powers of two: exact
        norm = make_norm(weight, kernels, out_scale=out_scale)
        assert_bits(norm(x), plain(x) * out_scale)
        assert_bits(norm(x, residual)[0], plain(x, residual)[0] * out_scale)
        assert_bits(norm(x, residual)[1], x + residual)
        # the gate is behind the row that is scaled
        assert_bits(norm(x, gate=residual), plain(x, gate=residual) * out_scale)
    norm = make_norm(weight, kernels, out_scale=0.3)
    rtol = 1e-5 if dtype == FP32 else 2**-7
    torch.testing.assert_close(norm(x).double(), 0.3 * in_fp64(x, weight), rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_loader_stores_what_rows_are_multiplied_by(dtype):
    weight = random(64, dtype=dtype, seed=1)
    assert_bits(make_norm(weight).weight.data, weight)
    assert_bits(make_norm(weight, form="one_plus").weight.data, 1 + weight.float())
    log = make_norm(weight, form="log")
    assert log.weight.dtype == dtype
    exact = weight.double().exp()
    torch.testing.assert_close(log.weight.double(), exact, rtol=2**-8, atol=0)
    x = random(5, 64, dtype=dtype)
    assert_bits(log(x), make_norm(weight.float().exp().to(dtype))(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoint_of_each_form_is_loaded(tmp_path, dtype):
    """End to end: safetensors in bf16, through `load_weights`, whatever the model's dtype."""
    forms = {"plain": lambda w: w, "one_plus": lambda w: 1 + w, "log": torch.exp}
    stored = {f"model.{form}.weight": random(8, dtype=BF16, seed=i) for i, form in enumerate(forms)}
    save_file({"model.embed_tokens.weight": random(4, 8), **stored}, tmp_path / "model.safetensors")
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = Embedding(4, 8, dtype=dtype, device=CPU)
    for form in forms:
        norm = RMSNorm(8, EPS, Kernels(), form=form, dtype=dtype, device=CPU)  # type: ignore[arg-type]
        model.model.add_module(form, norm)
    load_weights(model, tmp_path, tie=False)
    for form, function in forms.items():
        weight = model.model.get_submodule(form).weight
        assert weight.dtype == (FP32 if form == "one_plus" else dtype)
        expected = function(stored[f"model.{form}.weight"].double()).to(weight.dtype)
        torch.testing.assert_close(weight.data, expected, rtol=1e-6, atol=0)


def test_weight_of_another_shape_is_refused():
    norm = RMSNorm(64, EPS, Kernels(), dtype=FP32, device=CPU)
    for weight in (torch.ones(1), torch.ones(65), torch.ones(1, 64), torch.ones(64).int()):
        with pytest.raises(ValueError, match="64"):
            norm.load("weight", "", weight)


# -- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("width", [33, 64, 576, 1024, 4096])
@pytest.mark.parametrize("form", ["plain", "one_plus", "gated"])
def test_bf16_error_is_at_most_twice_transformers(kernels, form, width, scale):
    """Against fp64 from the same bf16 inputs, mean and largest over rows, residual added or not."""
    x, residual, gate = (
        random(32, width, dtype=BF16, seed=i, scale=scale if i < 2 else 1) for i in range(3)
    )
    weight = random(width, seed=3, scale=0.2).add(form != "one_plus").to(BF16)
    factor = weight.double() + (form == "one_plus")
    norm = make_norm(weight, kernels, form="one_plus" if form == "one_plus" else "plain")
    if form == "gated":
        exact = in_fp64(x, factor) * F.silu(gate.double())
        pairs = [(exact, norm(x, gate=gate), make_hf(Qwen3_5RMSNormGated, weight)(x, gate))]
    else:
        hf = make_hf(Qwen3_5RMSNorm if form == "one_plus" else Qwen3RMSNorm, weight)
        total = in_fp64(x.double() + residual.double(), factor)
        pairs = [
            (in_fp64(x, factor), norm(x), hf(x)),
            (total, norm(x, residual)[0], hf(x + residual)),
        ]
    for exact, ours, theirs in pairs:
        error, limit = (ours - exact).abs(), (theirs - exact).abs()
        assert limit.mean() > 0
        assert error.mean() <= 2 * limit.mean()
        assert error.max() <= 2 * limit.max()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("width", [1, 33, 1024, 4096])
def test_fp32_is_right_to_five_digits(kernels, width, scale):
    x, residual = random(8, width, scale=scale), random(8, width, seed=1, scale=scale)
    weight = random(width, seed=3, scale=0.2).add(1)
    norm, close = make_norm(weight, kernels), torch.testing.assert_close
    close(norm(x).double(), in_fp64(x, weight), rtol=1e-5, atol=0)
    total = x + residual
    close(norm(x, residual)[0].double(), in_fp64(total, weight), rtol=1e-5, atol=0)


def check_first_norm(folder: Path, text: str, dtype: torch.dtype, kernels: str) -> None:
    """Layer 0's norm of real rows beside a random residual, against arithmetic by hand."""
    with (
        torch.inference_mode(),
        LLM(folder, dtype=str(dtype)[6:], num_kv_blocks=4, device="cpu", kernels=kernels) as llm,
    ):
        model = llm.engine._pipeline.runner._model.model
        ids = torch.tensor(llm.get_tokenizer().encode(text))
        norm, hidden = model.layers[0].input_layernorm, model.embed_tokens(ids)
        residual = random(*hidden.shape, dtype=dtype)
        normed, new_residual = norm(hidden, residual)
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).model
        weight = hf.layers[0].input_layernorm.weight
        assert_bits(hidden, hf.embed_tokens(ids))
        theirs = hf.layers[0].input_layernorm(hidden + residual)
    assert normed.shape == new_residual.shape == hidden.shape == (len(ids), len(weight))
    assert (hidden != 0).any()
    total = hidden.float() + residual.float()
    assert_bits(new_residual, total.to(dtype))
    if dtype == FP32:
        rms = (total.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        torch.testing.assert_close(normed, total / rms * weight, rtol=1e-5, atol=1e-5)
    exact = in_fp64(hidden.double() + residual.double(), weight, norm.eps)
    error, limit = (normed - exact).abs(), (theirs - exact).abs()
    assert limit.max() > 0
    assert error.mean() <= 2 * limit.mean()
    assert error.max() <= 2 * limit.max()


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_norm_of_a_tiny_model_is_what_one_writes_by_hand(tiny, name, dtype):
    for kernels in ("ref", "auto"):
        check_first_norm(tiny(name), "Who are you?", dtype, kernels)


@pytest.mark.network
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_norm_of_the_demo_model_is_what_one_writes_by_hand(dtype):
    for kernels in ("ref", "auto"):
        check_first_norm(demo_model(), "Who are you, and who is 你?", dtype, kernels)


# -- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 0, 7), (3, 1025)])
def test_shapes_are_kept(kernels, shape, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    norm = make_norm(weight, kernels)
    for y in (norm(x), *norm(x, residual), norm(x, gate=residual)):
        assert y.shape == shape
        assert y.dtype == dtype
        assert y.isfinite().all()
    assert_twin(norm(x), rms_norm_ref(x, weight, EPS), kernels)
    gated = rms_norm_gated_ref(x, residual, weight, EPS)
    torch.testing.assert_close(norm(x, gate=residual), gated, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_apart(kernels, dtype):
    """q and k are slices of a fused projection: the same bits as of their copies."""
    fused, other = random(5, 200, dtype=dtype), random(5, 180, dtype=dtype, seed=1)
    x, residual = fused[:, 8:136].unflatten(-1, (4, 32)), other[:, 40:168].unflatten(-1, (4, 32))
    assert not x.is_contiguous()
    norm = make_norm(random(32, dtype=dtype, seed=2), kernels)
    copies = x.contiguous(), residual.contiguous()
    assert_bits(norm(x), norm(copies[0]))
    for found, expected in zip(norm(x, residual), norm(*copies), strict=True):
        assert_bits(found, expected)
    assert_bits(norm(x, gate=residual), norm(copies[0], gate=copies[1]))
    every_other = fused[::2]
    wide = make_norm(random(200, dtype=dtype, seed=3), kernels)
    assert_bits(wide(every_other), wide(every_other.contiguous()))


@pytest.mark.parametrize("which", ["x", "residual", "gate"])
def test_strided_columns_are_taken_by_the_reference_and_refused_by_cpp(which):
    row, column = random(6, 64), random(64, 6, seed=1).T
    arguments = {"x": row, which: column}
    weight = random(64, seed=2)
    copies = {name: tensor.contiguous() for name, tensor in arguments.items()}
    found, expected = make_norm(weight)(**arguments), make_norm(weight)(**copies)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match=rf"{which}, .*strides.*contiguous"):
        make_norm(weight, table("cpu"))(**arguments)


@pytest.mark.parametrize("shape", [(1, 64), (64,), (6, 1), (5, 64), (6, 63), (6, 1, 64)])
@pytest.mark.parametrize("which", ["residual", "gate"])
def test_residual_of_another_shape_is_refused_by_cpp(which, shape):
    """Never broadcast: the new residual would be another stream."""
    norm = make_norm(random(64), table("cpu"))
    with pytest.raises(ValueError, match=rf"{which}.*expand_as"):
        norm(random(6, 64), **{which: random(*shape)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_depend_on_that_row_only(kernels, dtype):
    x, residual = random(40, 576, dtype=dtype), random(40, 576, dtype=dtype, seed=1)
    norm = make_norm(random(576, dtype=dtype, seed=2), kernels)
    whole = norm(x, residual)
    for start, stop in ((0, 1), (7, 8), (13, 40)):
        alone = norm(x[start:stop], residual[start:stop])
        for part, rows in zip(alone, whole, strict=True):
            assert_bits(part, rows[start:stop])


def test_nan_stays_in_its_row(kernels):
    x = random(3, 64)
    x[1, 5] = torch.nan
    y, new_residual = make_norm(torch.ones(64), kernels)(x, torch.zeros(3, 64))
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()
    assert new_residual.isnan().sum() == 1


# -- FP8 output -----------------------------------------------------------------------------------


def exponents_of(scales: Tensor) -> Tensor:
    """Packed scales int32 [T, P] -> the four bytes of each, lowest first: [T, 4 P]."""
    assert scales.dtype == torch.int32
    return torch.stack([scales >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)


def scale_of(quantized: Quantized) -> Tensor:
    """fp32 [T, G], whatever the layout."""
    if quantized.scales.dtype == FP32:
        return quantized.scales
    return (exponents_of(quantized.scales).double() - 127).exp2().float()


def groups_of(x: Tensor, layout: ScaleLayout) -> Tensor:
    return x.double().unflatten(-1, (-1, layout.group_size))  # [T, G, group_size]


def assert_is_quantized(quantized: Quantized, x: Tensor, layout: ScaleLayout) -> None:
    """Scales as arithmetic in fp64 has them; each value the nearest of e4m3, or nearly so."""
    groups, scales = groups_of(x, layout), scale_of(quantized).double()
    assert quantized.values.dtype == FP8
    assert quantized.values.shape == x.shape
    assert scales.shape == groups.shape[:2]
    wanted = groups.abs().amax(-1).clamp(min=1e-4) / 448
    if layout.is_packed:
        assert torch.equal(scales, wanted.float().double().log2().ceil().exp2())
        assert (scales >= wanted * (1 - 1e-7)).all()
        assert (scales < 2 * wanted).all()
    else:
        torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0)
    assert quantized.values.float().isfinite().all()
    found = groups_of(dequantize(quantized), layout)
    # Half a step: 3 bits of mantissa, and steps of 2^-9 below 2^-6.
    step = torch.maximum(groups.abs() * 2**-4, scales[..., None] * 2**-10)
    assert ((found - groups).abs() <= step * (1 + 1e-5)).all()
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    largest = 1 / 16 if layout.is_packed else 16 / 448
    assert ((found - groups).abs() <= amax * largest * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_output_is_the_norm_in_groups_with_its_copy(kernels, layout, dtype):
    x, residual = random(5, 512, dtype=dtype), random(5, 512, dtype=dtype, seed=1, scale=3)
    weight = random(512, seed=2).add(1).to(dtype)
    norm = make_norm(weight, kernels, quantized=layout, keep_copy=True)
    plain = make_norm(weight, kernels)
    quantized = norm(x)
    assert isinstance(quantized, Quantized)
    assert quantized._fields == ("values", "scales", "copy")
    assert_bits(quantized.copy, plain(x))
    assert_is_quantized(quantized, quantized.copy, layout)
    quantized, new_residual = norm(x, residual)
    y, expected = plain(x, residual)
    assert_bits(new_residual, expected)
    assert_bits(quantized.copy, y)
    assert_is_quantized(quantized, y, layout)
    # without the copy: the same numbers
    alone, new_residual = make_norm(weight, kernels, quantized=layout)(x, residual)
    assert alone.copy is None
    assert_bits(alone.values.float(), quantized.values.float())
    assert_bits(alone.scales, quantized.scales)
    assert_bits(new_residual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_of_one_plus_form_is_of_its_rows(kernels, layout):
    x, weight = random(3, 512, dtype=BF16), random(512, dtype=BF16, seed=1, scale=0.3)
    norm = make_norm(weight, kernels, form="one_plus", quantized=layout, keep_copy=True)
    quantized = norm(x)
    assert_bits(quantized.copy, make_norm(weight, kernels, form="one_plus")(x))
    assert_is_quantized(quantized, quantized.copy, layout)


@pytest.mark.parametrize("T", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("num_groups", [1, 4, 8])
@pytest.mark.parametrize("is_packed", [False, True])
def test_columns_of_scales_start_on_16_bytes(kernels, is_packed, num_groups, T):
    num_groups *= 4 if is_packed else 1
    x, weight = random(T, num_groups * 32), torch.ones(num_groups * 32)
    rows, columns = (
        make_norm(weight, kernels, quantized=ScaleLayout(32, is_column_major, is_packed))(x)
        for is_column_major in (False, True)
    )
    width = num_groups // 4 if is_packed else num_groups
    assert rows.scales.shape == columns.scales.shape == (T, width)
    assert rows.scales.is_contiguous()
    assert columns.scales.stride() == (1, -(-T // 4) * 4)
    for g in range(width):
        assert columns.scales[:, g].data_ptr() % 16 == 0
    assert_bits(columns.scales.contiguous(), rows.scales)
    assert_bits(columns.values.float(), rows.values.float())


@pytest.mark.parametrize("is_column_major", [False, True])
def test_packed_bytes_are_exponents_rounded_up(kernels, is_column_major):
    """448 2^k is the power of two itself; one bf16 step above it, the next one."""
    largest = [448.0, 450.0, 446.0, 7 * 2.0**-10, 7.0625, 1.0, 1e-9, 3e38]
    expected = [127, 128, 127, 127 - 16, 122, 119, 105, 127 + 120]
    layout = ScaleLayout(4, is_column_major, is_packed=True)
    weight = torch.tensor(largest)[:, None] * torch.tensor([0.5, -1.0, 0.0, 0.25])
    quantized = make_norm(weight.flatten(), kernels, eps=0.0, quantized=layout)(torch.ones(3, 32))
    assert exponents_of(quantized.scales).tolist() == [expected] * 3
    for power, amax in zip(expected, largest, strict=True):
        assert max(amax, 1e-4) / 448 <= 2.0 ** (power - 127) < max(amax, 1e-4) / 224


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_rows_saturate_and_never_overflow(kernels, layout):
    weight = random(512, seed=1).sign() * torch.logspace(-30, 38, 512)
    norm = make_norm(weight, kernels, eps=0.0, quantized=layout, keep_copy=True)
    quantized = norm(torch.ones(2, 512))
    assert_bits(quantized.copy, weight.expand(2, -1))
    assert_is_quantized(quantized, quantized.copy, layout)
    weight = torch.full((512,), torch.finfo(FP32).max)
    quantized = make_norm(weight, kernels, eps=0.0, quantized=layout)(torch.ones(2, 512))
    assert quantized.values.float().isfinite().all()
    assert scale_of(quantized).isfinite().all()
    assert quantized.values.float().min() == (256 if layout.is_packed else 448)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_rows_have_a_scale(kernels, layout):
    x = random(3, 512)
    x[1] = 0
    quantized = make_norm(torch.ones(512), kernels, quantized=layout)(x)
    assert (quantized.values[1].float() == 0).all()
    smallest = 2.0**-22 if layout.is_packed else 1e-4 / 448
    assert scale_of(quantized)[1].tolist() == pytest.approx([smallest] * (512 // layout.group_size))
    assert (dequantize(quantized)[1] == 0).all()
    assert_is_quantized(quantized, make_norm(torch.ones(512), kernels)(x), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_rows_stay_nan(kernels, layout):
    x = random(3, 512)
    x[1, 200] = torch.nan
    rows = dequantize(make_norm(torch.ones(512), kernels, quantized=layout)(x))
    assert rows[1].isnan().all()
    assert rows[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_makes_its_group_nan_and_no_other(kernels, layout, value):
    weight = random(512, seed=1)
    weight[300] = value
    norm = make_norm(weight, kernels, eps=0.0, quantized=layout)
    groups = groups_of(dequantize(norm(torch.ones(1, 512))), layout)[0]
    spoilt = 300 // layout.group_size
    assert not groups[spoilt].flatten()[300 % layout.group_size].isfinite()
    kept = torch.cat([groups[:spoilt], groups[spoilt + 1 :]])
    assert kept.isfinite().all()
    if math.isnan(value):
        assert groups[spoilt].isnan().all()


@pytest.mark.parametrize(
    ("N", "layout"),
    [
        (500, ScaleLayout(128)),
        (64, ScaleLayout(128)),
        (129, ScaleLayout(128, is_column_major=True)),
        (384, ScaleLayout(128, is_packed=True)),  # three exponents do not fill an int32
        (96, ScaleLayout(32, is_column_major=True, is_packed=True)),
    ],
)
def test_groups_that_do_not_fill_the_row_are_refused(kernels, N, layout):
    with pytest.raises(ValueError, match=rf"{N} values.*multiple of"):
        make_norm(torch.ones(N), kernels, quantized=layout)(random(2, N))
    with pytest.raises(ValueError, match=rf"{N} values.*multiple of"):
        quantize_ref(random(2, N), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_scale_is_multiplied_before_scales_are_taken(kernels, layout):
    """It makes the row larger, and so its scales; the values of 8 bits stay as they were."""
    x, weight = random(3, 512), random(512, seed=1).add(1)
    one, four = (
        make_norm(weight, kernels, quantized=layout, keep_copy=True, out_scale=out_scale)(x)
        for out_scale in (1.0, 4.0)
    )
    assert_bits(four.copy, 4 * one.copy)
    assert_bits(scale_of(four), 4 * scale_of(one))
    assert_bits(four.values.float(), one.values.float())
    assert_bits(dequantize(four), 4 * dequantize(one))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [0, 1])
def test_fp8_of_few_rows(kernels, layout, T):
    x = random(T, 512)
    norm = make_norm(torch.ones(512), kernels, quantized=layout, keep_copy=True)
    quantized, new_residual = norm(x, x)
    assert quantized.values.shape == quantized.copy.shape == new_residual.shape == (T, 512)
    assert_is_quantized(quantized, quantized.copy, layout)


@given(
    seed=st.integers(0, 2**31),
    T=st.integers(0, 6),
    num_groups=st.integers(1, 9),
    group_size=st.sampled_from([1, 3, 16, 32]),
    is_column_major=st.booleans(),
    is_packed=st.booleans(),
    dtype=st.sampled_from([FP32, BF16, torch.float16]),
    exponents=st.lists(st.integers(-20, 14), min_size=1, max_size=3),
)
def test_round_trip(seed, T, num_groups, group_size, is_column_major, is_packed, dtype, exponents):
    """Any rows come back to within half a step; what came back comes back again unchanged."""
    layout = ScaleLayout(group_size, is_column_major, is_packed)
    num_groups *= 4 if is_packed else 1
    x = random(T, num_groups * group_size, seed=seed)
    powers = torch.tensor(exponents, dtype=FP32).exp2()
    x = (x * powers[torch.arange(x.numel()) % len(powers)].view_as(x)).to(dtype)
    quantized = quantize_ref(x, layout)
    assert_is_quantized(quantized, x, layout)
    rows = dequantize(quantized)
    again = dequantize(quantize_ref(rows, layout))
    torch.testing.assert_close(again, rows, rtol=0 if is_packed else 1e-6, atol=0)


# -- torch.compile --------------------------------------------------------------------------------


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """torch.compile only traces, which takes seconds; how many graphs it made."""
    torch._dynamo.reset()
    backend = CompileCounter()
    compile = torch.compile

    def trace(function: Any, options: Any = None, **how: Any) -> Any:  # options: inductor's
        return compile(function, backend=backend, **how)

    monkeypatch.setattr(torch, "compile", trace)
    return backend


@pytest.mark.parametrize("form", ["plain", "one_plus"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_graph_serves_all_layers(counter, dtype, form):
    """Any weight, eps and number of tokens; one token is a case of its own to torch.compile."""
    compiled = select_kernels(CPU, "ref", True)
    layers = [
        make_norm(random(64, dtype=dtype, seed=i), compiled, eps=1e-5 / (1 + i % 2), form=form)
        for i in range(28)
    ]

    def run(T: int) -> None:
        x, residual = random(T, 64, dtype=dtype), random(T, 64, dtype=dtype, seed=1)
        for norm in layers:
            expected = add_rms_norm_ref(x, residual, norm.weight, norm.eps)
            x, residual = norm(x, residual)
            assert_bits(x, expected[0])
            assert_bits(residual, expected[1])

    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        for T in (7, 2, 33, 256):
            run(T)
    assert counter.frame_count == 1
    with torch.inference_mode():
        run(1)
        run(1)
    assert counter.frame_count == 2


def test_compiled_norm_serves_many_engines(counter):
    """Engines of several dtypes and numbers of heads, one after the other, in one process."""
    for dtype in DTYPES:
        for num_kv_heads in (2, 1):  # 1 is a special case to torch.compile, as is one token
            kernels = select_kernels(CPU, "ref", True)
            for T in (1, 3, 33):
                qkv = random(T, 128 + 64 * num_kv_heads, dtype=dtype)
                q, k, _ = qkv.split((128, 32 * num_kv_heads, 32 * num_kv_heads), dim=-1)
                for x in (qkv, q.unflatten(-1, (-1, 32)), k.unflatten(-1, (-1, 32))):
                    weight = random(x.shape[-1], dtype=dtype)
                    with torch.inference_mode():
                        found = kernels.rms_norm(x, weight, EPS)
                    assert_bits(found, rms_norm_ref(x, weight, EPS))
    assert counter.frame_count > 4


def fused_kernels(source: str) -> tuple[int, int]:
    """How many kernels inductor has written, and how many calls of them."""
    return (
        len(re.findall(r"^cpp_fused\w* = ", source, re.MULTILINE)),
        len(re.findall(r"^ +cpp_fused\w*\(", source, re.MULTILINE)),
    )


@needs_inductor
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_add_and_norm_is_one_fused_kernel(dtype):
    """In what inductor writes; and how far it is from the reference and from C++.

    bf16: the same bits. Told to, inductor rounds the normalised row before it is multiplied by the
    weight; left to itself it does not, and one element in four ends one step beside.
    fp32: sums in another order, a few steps.
    """
    torch._dynamo.reset()
    compiled = select_kernels(CPU, "ref", True)
    weight = random(576, seed=2, scale=0.3).add(1).to(dtype)
    norm, others = make_norm(weight, compiled), [make_norm(weight), make_norm(weight, table("cpu"))]
    with torch.inference_mode():
        x, residual = random(40, 576, dtype=dtype), random(40, 576, dtype=dtype, seed=1)
        _, sources = run_and_get_code(norm, x, residual)
        assert [fused_kernels(source) for source in sources] == [(1, 1)]
        assert "extern_kernels." not in sources[0]
        for T, scale in ((40, 1.0), (7, 1e-4), (300, 1e4)):
            x = random(T, 576, dtype=dtype, scale=scale)
            residual = random(T, 576, dtype=dtype, seed=1, scale=scale)
            with torch._dynamo.config.patch(error_on_recompile=True):
                y, new_residual = norm(x, residual)
            assert_bits(new_residual, x + residual)
            for other in others:
                apart = ulps(y, other(x, residual)[0])
                if dtype == FP32:
                    assert apart.max() <= 8
                else:
                    assert apart.max() <= 1
                    assert (apart > 0).float().mean() <= 1e-3


@needs_inductor
@pytest.mark.parametrize("is_column_major", [False, True])
def test_compiled_norm_to_fp8_is_one_fused_kernel(is_column_major):
    """Sum, norm, copy, scales and values from one pass; the numbers are the reference's."""
    table("cpu")  # skips where there is no compiler
    torch._dynamo.reset()
    compiled = select_kernels(CPU, "ref", True)
    layout = ScaleLayout(32, is_column_major)
    weight = random(576, dtype=BF16, seed=2, scale=0.3)
    norms = [
        make_norm(weight, kernels, form="one_plus", quantized=layout, keep_copy=True)
        for kernels in (compiled, Kernels())
    ]
    x, residual = random(6, 576, dtype=BF16), random(6, 576, dtype=BF16, seed=1)
    with torch.inference_mode():
        (found, new_residual), sources = run_and_get_code(norms[0], x, residual)
        expected, _ = norms[1](x, residual)
    assert [fused_kernels(source) for source in sources] == [(1, 1)]
    assert_bits(new_residual, x + residual)
    assert (ulps(found.copy, expected.copy) > 0).float().mean() < 0.01
    assert_is_quantized(found, found.copy, layout)
    assert found.scales.stride() == expected.scales.stride()
