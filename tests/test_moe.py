"""Mixture of experts: routing and products, by hand and against transformers' blocks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import MULTIPLYING, kernel_library
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeTextConfig, Qwen3MoeConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from nanoinfer import LLM, SamplingParams
from nanoinfer.hybrid_config import MoEConfig
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.linear import LinearCpu
from nanoinfer.kernels.moe import Experts, MoeCpu, Routing, moe_ref, route
from nanoinfer.layers.moe import MoE

BF16, FP32 = torch.bfloat16, torch.float32
BODIES = ["ref", "native", *MULTIPLYING]
# T, E, I, X, K
SIZES = [(1, 64, 32, 8, 2), (7, 64, 64, 8, 1), (50, 32, 100, 4, 4), (40, 130, 6, 3, 2)]


@functools.cache
def bound(machine, threads=2):
    return MoeCpu(kernel_library(machine), threads)


@pytest.fixture(params=BODIES)
def moe(request):
    """x, logits, plain experts, routing -> y."""
    if request.param == "ref":
        return moe_ref
    kernel = bound(request.param)
    return lambda x, logits, experts, routing: kernel.moe(x, logits, kernel.pack(experts), routing)


def make_case(T, E, I, X, dtype=FP32):  # noqa: E741
    torch.manual_seed(0)
    x, logits = torch.randn(T, E).to(dtype), 3 * torch.randn(T, X)
    gate_up, down = torch.randn(X, 2 * I, E) / E**0.5, torch.randn(X, E, I) / I**0.5
    return x, logits, Experts(gate_up.to(dtype), down.to(dtype))


def by_hand(x, logits, experts, routing):
    """One token at a time, in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(x.double()):
        p = logits[t].double().softmax(-1)
        chosen = p.argsort(descending=True)[: routing.top_k].tolist()
        total = p[chosen].sum() if routing.is_normalised else 1
        for e in chosen:
            gate, up = (experts.gate_up[e].double() @ row).chunk(2)
            out[t] += p[e] / total * (experts.down[e].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_mixture_is_what_one_writes_by_hand(moe, sizes, is_normalised):
    *shape, top_k = sizes
    case, routing = make_case(*shape), Routing(top_k, is_normalised)
    found = moe(*case, routing)
    torch.testing.assert_close(found.double(), by_hand(*case, routing), rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_where_the_reference_rounds():
    case, routing, kernel = make_case(60, 64, 96, 6, dtype=BF16), Routing(3, True), bound("native")
    expected = moe_ref(*case, routing)
    found = kernel.moe(*case[:2], kernel.pack(case[2]), routing)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)
    error = (found.double() - by_hand(*case, routing)).abs().mean()
    assert error <= 1.1 * (expected.double() - by_hand(*case, routing)).abs().mean()


def test_no_expert_but_the_chosen_ones_is_read(moe):
    x, logits, experts = make_case(5, 64, 32, 8)
    logits[:, 3] = -torch.inf
    expected = moe(x, logits, experts, Routing(2, True))
    experts.gate_up[3], experts.down[3] = torch.nan, torch.nan
    assert torch.equal(moe(x, logits, experts, Routing(2, True)), expected)


def test_all_tokens_at_one_expert_are_more_than_a_panel(moe):
    x, logits, experts = make_case(1100, 32, 16, 3)
    logits[:, 1] = 50
    found = moe(x, logits, experts, Routing(1, True))
    gate, up = F.linear(x, experts.gate_up[1]).chunk(2, -1)
    expected = F.linear(F.silu(gate) * up, experts.down[1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bits_of_a_token_do_not_depend_on_its_neighbours():
    x, logits, experts = make_case(70, 64, 96, 4)
    kernel = bound("native")
    packed = kernel.pack(experts)
    together = kernel.moe(x, logits, packed, Routing(2, True))
    alone = bound("native", 1).moe(x[33:34], logits[33:34], packed, Routing(2, True))
    assert torch.equal(alone, together[33:34])


def test_routing_takes_the_largest_and_may_normalise():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = route(logits, Routing(2, False))
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    weights, _ = route(logits, Routing(2, True))
    torch.testing.assert_close(weights, logits[:, [1, 2]].softmax(-1))


@pytest.mark.parametrize("change", ["dtype", "logits", "width", "experts", "top_k"])
def test_what_the_kernel_cannot_take_is_refused(change):
    x, logits, experts = make_case(3, 64, 32, 8)
    kernel, routing = bound("native"), Routing(2, True)
    packed = kernel.pack(experts)
    if change == "dtype":
        x = x.bfloat16()
    elif change == "logits":
        logits = logits.bfloat16()
    elif change == "width":
        x = x[:, :32]
    elif change == "experts":
        logits = logits[:, :7]
    else:
        routing = Routing(9, True)
    with pytest.raises(ValueError, match=r"got .*need "):
        kernel.moe(x, logits, packed, routing)


def test_odd_rows_of_bf16_cannot_be_packed():
    *_, experts = make_case(1, 64, 33, 2, dtype=BF16)
    with pytest.raises(ValueError, match="33 values, need a multiple of 2"):
        bound("native").pack(experts)


# -- the layer ------------------------------------------------------------------------------------


def make_layer(theirs, config, kernels):
    factory = {"dtype": FP32, "device": torch.device("cpu")}
    ours = MoE(config, 64, kernels, **factory)
    for name, tensor in theirs.state_dict().items():
        module, _, kind = name.rpartition(".")
        part = ""
        if module.endswith(("gate_proj", "up_proj")):
            module, _, part = module.rpartition(".")
            module += ".gate_up_proj"
        ours.get_submodule(module).load(kind, part, tensor)
    ours.experts.pack(kernels.pack_experts)
    return ours


KINDS = {
    "qwen3": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, {"norm_topk_prob": True}),
    "unnormalised": (Qwen3MoeSparseMoeBlock, Qwen3MoeConfig, {"norm_topk_prob": False}),
    "shared": (
        Qwen3_5MoeSparseMoeBlock,
        Qwen3_5MoeTextConfig,
        {"shared_expert_intermediate_size": 48},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_equals_transformers(kind, kernels):
    block, config, options = KINDS[kind]
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    hf = config(hidden_size=64, num_hidden_layers=4, **sizes, **options)
    torch.manual_seed(0)
    theirs = block(hf).float().eval()
    for parameter in theirs.parameters():
        parameter.normal_(0, 0.3)
    table = select_kernels(torch.device("cpu"), kernels, False)
    ours = make_layer(theirs, MoEConfig.from_hf(hf), table)
    x = torch.randn(1, 37, 64)
    torch.testing.assert_close(ours(x[0]), theirs(x)[0], rtol=1e-5, atol=1e-4)
    logits = theirs.gate(x[0])[0]
    assert ours.router_logits(x[0]).dtype == FP32
    torch.testing.assert_close(ours.router_logits(x[0]), logits, rtol=1e-5, atol=1e-5)


def test_router_logits_of_bf16_rows_are_sums_in_float32():
    config = MoEConfig(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        shared_expert_intermediate_size=0,
        layers=frozenset({0}),
    )
    layer = MoE(config, 64, Kernels(), dtype=BF16, device=torch.device("cpu"))
    layer.gate.weight.data.normal_()
    x = torch.randn(5, 64).bfloat16()
    expected = x.double() @ layer.gate.weight.data.double().T
    torch.testing.assert_close(layer.router_logits(x).double(), expected, rtol=1e-5, atol=1e-5)
    for library in (None, kernel_library("native")):  # oneDNN alone rounds: it gets no router
        layer.gate.pack(LinearCpu(library, 1).pack)
        found = layer.router_logits(x).double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_which_layers_are_a_mixture():
    def layers(**options):
        config = Qwen3MoeConfig(num_hidden_layers=6, **options)
        return sorted(MoEConfig.from_hf(config).layers)

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(mlp_only_layers=[0, 4]) == [1, 2, 3, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(num_experts=0) == []


# -- checkpoints ----------------------------------------------------------------------------------


def answers(folder, **options):
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3], list(range(40))], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def fused(tiny, tmp_path):
    """The same checkpoint with each layer's experts in two tensors."""
    folder = tiny("tiny-qwen3-moe")
    weights, stacked = load_file(folder / "model.safetensors"), {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."

        def take(kind, prefix=prefix):
            return torch.stack([weights.pop(f"{prefix}{i}.{kind}.weight") for i in range(8)])

        stacked[f"{prefix}gate_up_proj"] = torch.cat((take("gate_proj"), take("up_proj")), 1)
        stacked[f"{prefix}down_proj"] = take("down_proj")
    assert not any(".experts." in name for name in weights)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({**weights, **stacked}, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_both_layouts_of_experts_are_read(tiny, fused):
    assert answers(fused) == answers(tiny("tiny-qwen3-moe"))


@pytest.mark.parametrize("change", ["missing", "twice"])
def test_a_wrong_expert_is_named(fused, change):
    weights = load_file(fused / "model.safetensors")
    name = "model.layers.1.mlp.experts"
    if change == "missing":
        del weights[f"{name}.down_proj"]
        match = r"layers\.1\.mlp\.experts\.0\.down_proj\.weight.* missing, in all 8 tensor"
    else:
        weights[f"{name}.3.up_proj.weight"] = torch.zeros(32, 64)
        match = r"experts\.(3\.up_proj\.weight|gate_up_proj).* is there twice"
    save_file(weights, fused / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=match):
        answers(fused)


def test_int8_experts_are_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r"quantization: got int8 .*need None"):
        answers(tiny("tiny-qwen3-moe"), quantization="int8")
