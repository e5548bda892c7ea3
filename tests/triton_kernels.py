"""The Triton twins in Triton's interpreter, against the references. Run by test_triton.py.

The interpreter must be chosen before triton is imported, and has a process of its own. It knows
fp32 and fp16, not bf16 (scripts/compile_kernels.py compiles those).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import test_gated_delta as delta
import test_moe as mixture
import torch
import triton
import triton.language as tl
from test_paged_attention import make_case
from test_quantized_kv import in_8_bits, make_store_case, new_caches

from nanoinfer.kernels.causal_conv import causal_conv_ref
from nanoinfer.kernels.draw import draw_ref
from nanoinfer.kernels.gated_delta import gated_delta_ref
from nanoinfer.kernels.gumbel import gumbel, row_keys
from nanoinfer.kernels.linear import linear_ref, quantize_blocks_fp8
from nanoinfer.kernels.moe import Routing, moe_ref
from nanoinfer.kernels.norm_rope_store import HeadNorms, norm_rope_store_ref
from nanoinfer.kernels.paged_attention import paged_attention_ref
from nanoinfer.kernels.quantize import ScaleLayout, quantize_ref
from nanoinfer.kernels.quantized_kv import KV_DTYPES
from nanoinfer.kernels.rotary import Rope
from nanoinfer.kernels.store_kv import store_kv_ref
from nanoinfer.kernels.triton_attention import paged_attention_triton, store_kv_triton
from nanoinfer.kernels.triton_delta import causal_conv_triton, gated_delta_triton
from nanoinfer.kernels.triton_draw import draw_triton, noise_of
from nanoinfer.kernels.triton_fp8 import multiply_triton, quantize_triton
from nanoinfer.kernels.triton_moe import moe_triton
from nanoinfer.kernels.triton_norm_rope import norm_rope_store_triton

FP16, FP32 = torch.float16, torch.float32
TOLERANCE = {FP32: {"rtol": 1e-5, "atol": 1e-5}, FP16: {"rtol": 4e-3, "atol": 4e-3}}
DTYPES = [FP32, FP16]
# (queries, keys) of each sequence
STEPS = {
    "one": [(1, 1)],
    "decoding": [(1, 70), (1, 33), (1, 1), (1, 16)],
    "padding": [(1, 40), (1, 0), (1, 0)],
    "prompts": [(5, 5), (33, 33), (16, 16)],
    "chunk": [(70, 100)],
    "mixed": [(1, 50), (20, 25), (1, 7), (3, 3)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("step", STEPS)
def test_paged_attention(step, heads, dtype):
    """Slots that no sequence owns are NaN; rows behind the last sequence are 0."""
    for head_dim, pad in ((32, 0), (20, 3)):
        case = make_case(STEPS[step], *heads, head_dim=head_dim, dtype=dtype, pad=pad)
        expected = paged_attention_ref(*[x.float() if x is case[0] else x for x in case[:1]],
                                       *(x.float() for x in case[1:3]), *case[3:])  # fmt: skip
        found = paged_attention_triton(*case)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("step", ["decoding", "padding", "mixed"])
def test_paged_attention_in_8_bits(step, dtype, is_rotated):
    for q_dtype, head_dim in ((FP32, 32), (FP32, 20), (FP16, 32)):
        case = make_case(STEPS[step], head_dim=head_dim, dtype=q_dtype)
        k, v, scales = in_8_bits(case[1], case[2], dtype, is_rotated)
        rest = (*case[3:], scales)
        expected = paged_attention_ref(case[0].float(), k, v, *rest)
        found = paged_attention_triton(case[0], k, v, *rest)
        torch.testing.assert_close(found.float(), expected, **TOLERANCE[q_dtype])


@pytest.mark.parametrize("is_rotated", [False, True])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [32, 20])
def test_store_in_8_bits(head_dim, dtype, is_rotated):
    """Where e4m3 rounds up to a power of two, the interpreter (not a GPU) loses the carry."""
    case, slots = make_store_case(FP32, head_dim), torch.randperm(64)[:21]
    caches = [new_caches(dtype, head_dim, is_rotated) for _ in range(2)]
    bodies = (norm_rope_store_triton, norm_rope_store_ref)
    found, expected = (
        body(*case, cache.k, cache.v, slots, cache.scales)
        for body, cache in zip(bodies, caches, strict=True)
    )
    torch.testing.assert_close(found, expected, **TOLERANCE[FP32])
    for name in ("k", "v"):
        scales = [getattr(cache.scales, name) for cache in caches]
        torch.testing.assert_close(*scales)
        ours, right = (getattr(cache, name).float() for cache in caches)
        is_power = (torch.frexp(right).mantissa.abs() == 0.5) & (dtype != torch.int8)
        assert ((ours == right) | (is_power & (ours == right / 2))).float().mean() > 0.999


ROWS_DRAWN = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (0.7, 0, 0.8, 0.0),
    (1.5, 0, 1.0, 0.1), (1.0, 50, 0.9, 0.01), (1e30, 0, 0.999, 0.0), (1.0, 5000, 0.5, 0.0),
    (1e-30, 0, 1.0, 0.0), (5.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0), (1.0, 0, 1.0, 1.0),
]  # fmt: skip


@pytest.mark.parametrize("vocab_size", [5, 300, 2500])
def test_draw(vocab_size):
    """The reference's ids, also where some are forbidden and where all are equal."""
    torch.manual_seed(0)
    params = [torch.tensor(values) for values in zip(*ROWS_DRAWN, strict=True)]
    for step in range(6):
        logits = torch.randn(len(ROWS_DRAWN), vocab_size) * 3
        if step == 4:
            logits[:, ::3] = -torch.inf
        if step == 5:
            logits.zero_()
        keys = row_keys(torch.arange(len(logits)) + 100 * step, torch.arange(len(logits)))
        expected = draw_ref(logits.clone(), *params, keys)
        assert draw_triton(logits.clone(), *params, keys).tolist() == expected.tolist()


def test_noise_is_near_the_references_where_it_wins():
    """All ids are alike: the largest noise decides, which is where fp32 would be off most."""
    R, V = 8, 60_000
    ones = torch.ones(R)
    for step in range(3):
        logits = torch.randn(R, V) * 0.3
        keys = row_keys(torch.arange(R) + 50 * step, torch.arange(R))
        given = (ones, torch.zeros(R, dtype=torch.int64), ones, torch.zeros(R), keys)
        expected = draw_ref(logits.clone(), *given)
        assert draw_triton(logits.clone(), *given).tolist() == expected.tolist()


@triton.jit
def _noises(hashes, out):
    i = tl.arange(0, 64)
    tl.store(out + i, noise_of(tl.load(hashes + i)))


def test_noise_of_the_largest_hashes():
    hashes = 2**24 - 1 - torch.cat((torch.arange(32), torch.logspace(1.5, 7.2, 32).int())).int()
    found = torch.empty(64)
    _noises[(1,)](hashes, found)
    torch.testing.assert_close(found.double(), gumbel(hashes), atol=1e-4, rtol=1e-5)


def test_store_kv():
    torch.manual_seed(0)
    k, v = (torch.randn(5, 80)[:, 8:68].unflatten(1, (3, 20)) for _ in range(2))
    slots = torch.tensor([5, 9, 0, 14, 3])
    found, expected = ([torch.zeros(4, 4, 3, 20) for _ in range(2)] for _ in range(2))
    store_kv_triton(k, v, *found, slots)
    store_kv_ref(k, v, *expected, slots)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


ROPES = [  # head dim, turned, from, interleaved, three axes, norms' dtype
    (32, 32, 0, False, False, FP32),
    (32, 8, 0, False, True, FP32),
    (20, 8, 4, True, False, None),
    (64, 16, 16, True, True, FP32),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", ROPES)
def test_norm_rope_store(rope, dtype):
    D, R, offset, is_interleaved, has_axes, norm_dtype = rope
    torch.manual_seed(0)
    q, k, v = (delta.strided(5, heads, D, dtype=dtype) for heads in (4, 2, 2))
    axes = torch.randint(0, 3, (R // 2,)).repeat(2) if has_axes else None
    positions = torch.randint(0, 50, (3, 5) if has_axes else (5,))
    table = Rope(torch.randn(50, R), axes, offset, is_interleaved)
    slots = torch.tensor([5, 9, 3, 8, 15])
    for weight_dtype in {norm_dtype, None if norm_dtype is None else dtype}:
        norms = None
        if weight_dtype is not None:
            norms = HeadNorms(*(torch.randn(D).to(weight_dtype) for _ in range(2)), 1e-6)
        caches = [[torch.zeros(4, 4, 2, D, dtype=dtype) for _ in range(2)] for _ in range(2)]
        expected = norm_rope_store_ref(q, k, v, norms, positions, table, *caches[0], slots)
        found = norm_rope_store_triton(q, k, v, norms, positions, table, *caches[1], slots)
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
        torch.testing.assert_close(caches[1][0], caches[0][0], **TOLERANCE[dtype])
        assert torch.equal(caches[1][1], caches[0][1])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("case", delta.CASES, ids=range(len(delta.CASES)))
def test_gated_delta(case, in_place):
    x, state = delta.inputs(case), delta.make_state(12, 4, 16, 24)
    where, after = delta.places(case, 12, in_place), state.clone()
    expected = gated_delta_ref(*x, after, *where)
    torch.testing.assert_close(gated_delta_triton(*x, state, *where), expected, **TOLERANCE[FP32])
    torch.testing.assert_close(state[1:], after[1:], **TOLERANCE[FP32])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("case", delta.CASES, ids=range(len(delta.CASES)))
def test_causal_conv(case, in_place):
    torch.manual_seed(0)
    x, weight = delta.strided(sum(n for _, n in case), 300), torch.randn(4, 300)
    state = delta.make_state(12, 3, 300)
    where, after = delta.places(case, 12, in_place), state.clone()
    expected = causal_conv_ref(x, weight, after, *where)
    found = causal_conv_triton(x, weight, state, *where)
    torch.testing.assert_close(found, expected, **TOLERANCE[FP32])
    assert torch.equal(state[1:], after[1:])


def test_causal_conv_of_other_widths_is_refused():
    where = delta.places([(1, 1)], 3)
    with pytest.raises(ValueError, match="got 3 taps, need 4"):
        causal_conv_triton(torch.randn(1, 8), torch.randn(3, 8), torch.randn(3, 2, 8), *where)


def test_padding_writes_the_null_slots_only():
    x, state = delta.inputs([(4, 1), (0, 1), (0, 1)]), delta.make_state(5, 4, 16, 24)
    bounds, sources, slots = delta.places([(4, 1), (0, 1), (0, 1)], 5)
    slots[1:] = 0
    before = state.clone()
    gated_delta_triton(*x, state, bounds, sources, slots)
    assert torch.equal(state[1:4], before[1:4])
    assert not torch.equal(state[4], before[4])


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("sizes", mixture.SIZES)
def test_moe(sizes, is_normalised):
    *shape, top_k = sizes
    case, routing = mixture.make_case(*shape), Routing(top_k, is_normalised)
    expected = moe_ref(*case, routing)
    torch.testing.assert_close(moe_triton(*case, routing), expected, **TOLERANCE[FP32])


@pytest.mark.parametrize("M", [1, 3, 20])
def test_fp8_rows_are_quantised(M):
    """Where a value rounds up to a power of two, the interpreter (not a GPU) loses the carry."""
    torch.manual_seed(0)
    x = torch.randn(M, 400)[:, 8:392] * torch.logspace(-3, 3, M)[:, None]
    found, expected = quantize_triton(x), quantize_ref(x, ScaleLayout(128))
    torch.testing.assert_close(found.scales, expected.scales)
    assert found.scales.stride(0) == 1
    ours, right = found.values.float(), expected.values.float()
    is_power = torch.frexp(right).mantissa.abs() == 0.5
    assert ((ours == right) | (is_power & (ours == right / 2))).all()
    assert (ours != right).float().mean() < 0.05


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 200, 384), (20, 64, 128), (3, 300, 256)])
def test_fp8_product(M, N, K, has_bias):
    torch.manual_seed(0)
    x, bias = torch.randn(M, K), torch.randn(N) if has_bias else None
    weight, scales = quantize_blocks_fp8(torch.randn(N, K))
    rows, expected = quantize_triton(x), torch.empty(M, N)
    linear_ref(rows, weight, scales, bias, expected)
    found = multiply_triton(rows, weight, scales, bias, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
