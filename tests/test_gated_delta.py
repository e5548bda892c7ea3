"""The gated delta net: conv, rule and layer, against fp64 by hand and transformers' modules."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import NEEDED, kernel_library
from oracle import load_model
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from nanoinfer.batch import Batch
from nanoinfer.graphs import worst_batch
from nanoinfer.hybrid_config import DeltaConfig
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.causal_conv import causal_conv_ref, make_causal_conv_cpu
from nanoinfer.kernels.gated_delta import (
    CHUNK,
    Decay,
    gated_delta_chunks,
    gated_delta_ref,
    make_gated_delta_cpu,
)
from nanoinfer.kernels.sigmoid_mul import make_sigmoid_mul_cpu, sigmoid_mul_ref
from nanoinfer.layers.gated_delta_net import GatedDeltaNet, StateCache
from nanoinfer.loader import load_weights
from nanoinfer.model_config import ModelConfig
from nanoinfer.models.qwen3 import CausalLM

BF16, FP32 = torch.bfloat16, torch.float32
FORMS = ["ref", "chunks", "native", *NEEDED]
BODIES = ["ref", "native", *NEEDED]
# Sequences in a step: first position, tokens. 0: it starts, and its source is the null slot.
CASES = [
    [(0, 1)],
    [(7, 1)],
    [(0, CHUNK - 1), (5, 1), (0, CHUNK), (9, CHUNK + 1)],
    [(3, 2), (0, 3), (0, 4), (100, 200)],
    [(1, 1)] * 5,
]


def make(maker, machine, threads=2):
    return bound(maker, machine, threads)


@functools.cache
def bound(maker, machine, threads):
    return maker(kernel_library(machine), threads)


@pytest.fixture(params=FORMS)
def rule(request):
    known = {"ref": gated_delta_ref, "chunks": gated_delta_chunks}
    return known.get(request.param) or make(make_gated_delta_cpu, request.param)


@pytest.fixture(params=BODIES)
def conv(request):
    return causal_conv_ref if request.param == "ref" else make(make_causal_conv_cpu, request.param)


def places(case, num_slots, in_place=True):
    """cu_seqlens_q, sources, slots; sources apart from slots unless in place."""
    slots = torch.tensor([num_slots - 1 - i for i in range(len(case))], dtype=torch.int32)
    starts = torch.tensor([start for start, _ in case])
    sources = slots if in_place else slots - len(case)
    sources = torch.where(starts > 0, sources, 0).int()
    bounds = torch.tensor([0, *(n for _, n in case)]).cumsum(0).int()
    return bounds, sources, slots


def strided(*shape, dtype=FP32):
    """Rows that lie apart, as slices of a fused projection do."""
    flat = torch.randn(shape[0], shape[-1] * (shape[1] if len(shape) > 2 else 1) + 24).to(dtype)
    flat = flat[:, 8:-16]
    return flat.unflatten(1, shape[1:]) if len(shape) > 2 else flat


def inputs(case, HK=2, HV=4, DK=16, DV=24, dtype=FP32, seed=0):
    torch.manual_seed(seed)
    T = sum(n for _, n in case)
    q, k, v = (strided(T, *s, dtype=dtype) for s in ((HK, DK), (HK, DK), (HV, DV)))
    a, b = strided(T, HV, dtype=dtype), strided(T, HV, dtype=dtype)
    return q, k, v, a, b, Decay(torch.randn(HV), torch.randn(HV))


def make_state(*shape, dtype=FP32):
    """The null slot is NaN: nobody may use what it holds."""
    state = torch.randn(shape).to(dtype)
    state[0] = torch.nan
    return state


def by_hand(q, k, v, a, b, decay, state, bounds, sources, slots):
    """One token of one head at a time, in fp64."""
    out, after = torch.zeros(v.shape, dtype=torch.float64), state.double().clone()
    group = v.shape[1] // q.shape[1]
    for s in range(len(slots)):
        for h in range(v.shape[1]):
            S = (
                state[sources[s], h].double()
                if sources[s]
                else torch.zeros(state.shape[2:]).double()
            )
            for t in range(bounds[s], bounds[s + 1]):
                key, query = (x[t, h // group].double() for x in (k, q))
                key, query = (x / (x.dot(x) + 1e-6).sqrt() for x in (key, query))
                g = -decay.A_log[h].double().exp() * F.softplus(a[t, h].double() + decay.dt_bias[h])
                S = S * g.exp()
                S = S + torch.outer(key, b[t, h].double().sigmoid() * (v[t, h].double() - key @ S))
                out[t, h] = query @ S / q.shape[2] ** 0.5
            after[slots[s], h] = S
    return out, after


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_rule_is_what_one_writes_by_hand(rule, case, in_place):
    x, state = inputs(case), make_state(12, 4, 16, 24)
    where = places(case, 12, in_place)
    expected, after = by_hand(*x, state, *where)
    found = rule(*x, state, *where)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1:].double(), after[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [(1, 1, 128, 128), (2, 2, 8, 5), (1, 3, 20, 64), (2, 4, 7, 130)])
def test_rule_takes_heads_of_any_size(rule, dims):
    case = [(4, 3), (0, 70)]
    x, state = inputs(case, *dims), make_state(5, dims[1], *dims[2:])
    expected, after = by_hand(*x, state, *places(case, 5))
    torch.testing.assert_close(
        rule(*x, state, *places(case, 5)).double(), expected, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(state[1:].double(), after[1:], rtol=1e-5, atol=1e-5)


def test_rule_reads_bf16_rows_and_keeps_its_state_in_float32(rule):
    case = [(4, 70), (0, 9)]
    x, state = inputs(case, dtype=BF16), make_state(5, 4, 16, 24)
    expected, after = by_hand(*x, state, *places(case, 5))
    found = rule(*x, state, *places(case, 5))
    assert found.dtype == BF16
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(state[1:].double(), after[1:], rtol=1e-5, atol=1e-5)


def test_rule_in_chunks_of_any_size_is_the_whole(rule):
    x, whole = inputs([(0, 150)]), make_state(3, 4, 16, 24)
    expected = rule(*x, whole, *places([(0, 150)], 3))
    state, found = make_state(3, 4, 16, 24), []
    for start, n in ((0, 1), (1, 63), (64, 64), (128, 21), (149, 1)):
        part = [t[start : start + n] for t in x[:-1]]
        found.append(rule(*part, x[-1], state, *places([(start, n)], 3)))
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[2], whole[2], rtol=1e-5, atol=1e-5)


def test_rule_equals_transformers(rule):
    x, state = inputs([(4, 100)], DV=16), make_state(3, 4, 16, 16)
    q, k, v, a, b, decay = x
    g = -decay.A_log.exp() * F.softplus(a + decay.dt_bias)
    batched = [t[None] for t in (q, k, v)]
    options = {"g": g[None], "beta": b.sigmoid()[None], "initial_state": state[2][None].clone()}
    options |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = rule(*x, state, *places([(4, 100)], 3))
    for theirs in (hf.torch_chunk_gated_delta_rule, hf.torch_recurrent_gated_delta_rule):
        expected, after = theirs(*batched, **options)
        torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state[2], after[0], rtol=1e-5, atol=1e-5)


def test_padding_writes_the_null_slot_only(rule):
    """Lanes of a graph that no sequence uses: source and slot 0, one token or none."""
    case = [(4, 1), (0, 1), (0, 1)]
    x, state = inputs(case), make_state(5, 4, 16, 24)
    bounds, sources, slots = places(case, 5)
    slots[1:] = 0
    before, alone = state.clone(), state.clone()
    rule(*x, state, bounds, sources, slots)
    first = [t[:1] for t in x[:-1]]
    rule(*first, x[-1], alone, *(torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [4], [4])))
    assert torch.equal(state[4], alone[4])
    assert torch.equal(state[1:4], before[1:4])


def test_bits_of_a_sequence_do_not_depend_on_its_neighbours():
    rule = make(make_gated_delta_cpu, "native")
    case = [(4, 40), (0, 33), (2, 1)]
    x, state = inputs(case, 2, 4, 64, 64), make_state(9, 4, 64, 64)
    bounds, sources, slots = places(case, 9)
    alone = state.clone()
    together = rule(*x, state, bounds, sources, slots)
    rows = slice(40, 73)
    part = [t[rows] for t in x[:-1]]
    single = bound(make_gated_delta_cpu, "native", 1)
    found = single(*part, x[-1], alone, torch.tensor([0, 33]).int(), sources[1:2], slots[1:2])
    assert torch.equal(found, together[rows])
    assert torch.equal(alone[slots[1]], state[slots[1]])


@pytest.mark.parametrize(
    "change", ["dtype", "stride", "heads", "state", "indices", "out of bounds"]
)
def test_rule_refuses_what_the_kernel_cannot_take(change):
    rule = make(make_gated_delta_cpu, "native")
    q, k, v, a, b, decay = inputs([(4, 3)])
    state, where = make_state(3, 4, 16, 24), list(places([(4, 3)], 3))
    if change == "dtype":
        k = k.double()
    elif change == "stride":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif change == "heads":
        v, state = v[:, :3], make_state(3, 3, 16, 24)
    elif change == "state":
        state = state.bfloat16()
    elif change == "indices":
        where[1] = where[1].long()
    else:
        where[2] = where[2] + 1
    before = state.clone()
    with pytest.raises(ValueError, match=r"got .*need "):
        rule(q, k, v, a, b, decay, state, *where)
    assert torch.equal(state[1:], before[1:])


# -- convolution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("C", [16, 128, 200])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_conv_is_what_one_writes_by_hand(conv, case, C, in_place):
    torch.manual_seed(0)
    K, T = 4, sum(n for _, n in case)
    x, weight, state = strided(T, C), torch.randn(K, C), make_state(12, K - 1, C)
    bounds, sources, slots = places(case, 12, in_place)
    after, expected = state.clone(), torch.zeros(T, C)
    for s in range(len(case)):
        past = state[sources[s]] if sources[s] else torch.zeros(K - 1, C)
        rows = torch.cat((past, x[bounds[s] : bounds[s + 1]]))
        for i in range(case[s][1]):
            expected[bounds[s] + i] = F.silu((rows[i : i + K] * weight).sum(0))
        after[slots[s]] = rows[-(K - 1) :]
    found = conv(x, weight, state, bounds, sources, slots)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[1:], after[1:])


def test_conv_rounds_where_bf16_rounds(conv):
    torch.manual_seed(0)
    x, weight = strided(40, 96, dtype=BF16), torch.randn(4, 96).to(BF16).float()
    state = make_state(3, 3, 96, dtype=BF16)
    rows = torch.cat((state[2], x)).float()
    sums = sum(rows[j : j + 40] * weight[j] for j in range(4)).to(BF16)
    found = conv(x, weight, state, *places([(5, 40)], 3))
    torch.testing.assert_close(found, F.silu(sums), rtol=2**-7, atol=1e-6)
    assert torch.equal(state[2], x[-3:])


@pytest.mark.parametrize("change", ["dtype", "channels", "indices", "out of bounds"])
def test_conv_refuses_what_the_kernel_cannot_take(change):
    conv = make(make_causal_conv_cpu, "native")
    x, weight, state = torch.randn(3, 8), torch.randn(4, 8), make_state(3, 3, 8)
    where = list(places([(4, 3)], 3))
    if change == "dtype":
        state = state.bfloat16()
    elif change == "channels":
        weight = weight[:, :7]
    elif change == "indices":
        where[0] = where[0].long()
    else:
        where[1] = where[1] - 9
    with pytest.raises(ValueError, match=r"got .*need "):
        conv(x, weight, state, *where)


# -- gate of attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("machine", ["native", *NEEDED])
@pytest.mark.parametrize("D", [1, 20, 64])
def test_sigmoid_mul_is_its_reference(dtype, machine, D):
    torch.manual_seed(0)
    fused = (20 * torch.randn(50, 3, 2 * D)).to(dtype)
    x, gate = torch.randn(50, 3, D).to(dtype), fused[..., D:]
    found = make(make_sigmoid_mul_cpu, machine)(x, gate)
    tolerance = {FP32: 2e-6, BF16: 2**-7}[dtype]
    torch.testing.assert_close(found, sigmoid_mul_ref(x, gate), rtol=tolerance, atol=1e-37)


def test_sigmoid_mul_refuses_what_the_kernel_cannot_take():
    gate = make(make_sigmoid_mul_cpu, "native")
    x = torch.randn(2, 3, 8)
    for bad in ((x, x.bfloat16()), (x, x[..., :4]), (x.transpose(0, 1), x.transpose(0, 1))):
        with pytest.raises(ValueError, match=r"got .*need "):
            gate(*bad)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("chunks", [[1], [30], [7, 1, 22]])
def test_gated_attention_equals_transformers(tiny, chunks, kernels):
    """Query and gate head by head, norms of 1 + w, a quarter of each head turned."""
    folder = tiny("tiny-qwen3_5")
    theirs, T = load_model(folder).model, sum(chunks)
    torch.manual_seed(0)
    x = torch.randn(T, 64)
    angles = theirs.rotary_emb(x[None], torch.arange(T)[None, None].expand(3, 1, -1))
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    expected, _ = theirs.layers[3].self_attn(x[None], angles, mask)
    table = select_kernels(torch.device("cpu"), kernels, False)
    cpu = torch.device("cpu")
    ours = CausalLM(ModelConfig.from_hf(folder), 64, table, dtype=FP32, device=cpu)
    load_weights(ours, folder, tie=False)
    layer, found, start = ours.model.layers[3].self_attn, [], 0
    cache = layer.cache_spec.allocate(1 + -(-T // 4), 4, cpu)
    for n in chunks:
        numbers = torch.arange(start, start + n)
        batch = dataclasses.replace(
            worst_batch(n, n, 4, cpu),
            positions=numbers,
            slot_mapping=4 + numbers,
            seq_lens=torch.tensor([start + n], dtype=torch.int32),
            block_tables=torch.arange(1, 1 + -(-T // 4), dtype=torch.int32)[None],
        )
        found.append(layer(x[start : start + n], cache, batch, None))
        start += n
    torch.testing.assert_close(torch.cat(found), expected[0], rtol=1e-5, atol=1e-5)


# -- the layer ------------------------------------------------------------------------------------

CONFIG = Qwen3_5TextConfig(
    hidden_size=64,
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
DELTA = DeltaConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16, conv_width=4
)


def layers() -> tuple[hf.Qwen3_5GatedDeltaNet, GatedDeltaNet]:
    """Theirs with random weights, and ours with the same."""
    torch.manual_seed(0)
    theirs = hf.Qwen3_5GatedDeltaNet(CONFIG, 0).float().eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.3)
    factory = {"dtype": FP32, "device": torch.device("cpu")}
    config = SimpleNamespace(delta=DELTA, hidden_size=64, rms_norm_eps=CONFIG.rms_norm_eps)
    ours = GatedDeltaNet(config, Kernels(), **factory)
    weights = theirs.state_dict()
    for name in ("A_log", "dt_bias"):
        ours.load(name, "", weights.pop(name))
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        part = module if module.startswith("in_proj") else ""
        ours.get_submodule("in_proj" if part else module).load(kind, part, tensor)
    return theirs, ours


def run_layer(layer: GatedDeltaNet, x, cache: StateCache, case) -> torch.Tensor:
    bounds, sources, slots = places(case, len(cache.state))
    dummy = worst_batch(1, 1, 4, torch.device("cpu"))
    fields = {"cu_seqlens_q": bounds, "states": torch.stack((sources, slots))}
    return layer(x, cache, Batch(**{**vars(dummy), **fields}), None)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 200])
def test_layer_equals_transformers(length):
    theirs, ours = layers()
    x = torch.randn(length, 64)
    cache = ours.cache_spec.allocate(2, 16, torch.device("cpu"))
    found = run_layer(ours, x, cache, [(0, length)])
    torch.testing.assert_close(found, theirs(x[None])[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_layer_in_chunks_equals_transformers_on_the_whole():
    theirs, ours = layers()
    x, found = torch.randn(90, 64), []
    cache = ours.cache_spec.allocate(2, 16, torch.device("cpu"))
    for start, n in ((0, 2), (2, 1), (3, 80), (83, 6), (89, 1)):
        found.append(run_layer(ours, x[start : start + n], cache, [(start, n)]))
    torch.testing.assert_close(torch.cat(found), theirs(x[None])[0], rtol=1e-5, atol=1e-5)


def test_a_state_takes_what_its_spec_says():
    spec = layers()[1].cache_spec
    cache = spec.allocate(3, 16, torch.device("cpu"))
    assert cache.conv.shape == (3, 3, 128)
    assert (cache.state.shape, cache.state.dtype) == ((3, 4, 16, 16), FP32)
    assert sum(t[0].numel() * t.itemsize for t in cache) == spec.bytes_per_unit(16)
