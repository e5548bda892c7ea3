"""The C++ twins of the small kernels, against their references: bits, or where not, ulps."""

import functools
import math

import pytest
import torch
from conftest import NEEDED, kernel_library

from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.norm_rope_store import (
    HeadNorms,
    make_norm_rope_store,
    make_norm_rope_store_cpu,
    norm_rope_store_ref,
)
from nanoinfer.kernels.quantize import ScaleLayout, quantize_ref
from nanoinfer.kernels.rms_norm import (
    RmsNormCpu,
    add_rms_norm_ref,
    rms_norm_gated_ref,
    rms_norm_ref,
)
from nanoinfer.kernels.rotary import Rope, make_rotary_cpu, rotary_ref
from nanoinfer.kernels.silu_mul import make_silu_mul_cpu, silu_mul_ref
from nanoinfer.kernels.store_kv import make_store_kv_cpu, store_kv_ref

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [FP32, BF16]
SIZES = [1, 5, 64, 80, 576, 1024]
ROWS = [0, 1, 3, 50]
SCALES = [1e-4, 1.0, 1e4]
NORMS = ("rms_norm", "add_rms_norm", "rms_norm_gated", "rms_norm_quantized")
MAKERS = {
    **{op: lambda library, threads, op=op: getattr(RmsNormCpu(library, threads), op)
       for op in NORMS},
    "rotary": make_rotary_cpu,
    "silu_mul": make_silu_mul_cpu,
    "store_kv": make_store_kv_cpu,
    "norm_rope_store": make_norm_rope_store_cpu,
}  # fmt: skip
FLAGS = [False, True]
LAYOUTS = [ScaleLayout(n, column, packed) for n in (4, 5) for column in FLAGS for packed in FLAGS]


@pytest.fixture(autouse=True, params=["native", *NEEDED])
def machine(request, monkeypatch):
    """All tests are run with the kernels built for each level of CPU that this one has."""
    kernel_library(request.param)
    monkeypatch.setattr("test_cpu_kernels.MACHINE", request.param)
    return request.param


MACHINE = "native"


def twin(op, threads=1):
    return bound(op, threads, MACHINE)


@functools.cache
def bound(op, threads, machine):
    return MAKERS[op](kernel_library(machine), threads)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """torch.empty gives NaN, so that an element that a kernel leaves out shows."""
    torch.manual_seed(0)

    def poisoned(*size, dtype=FP32):
        return torch.full(*size, torch.nan if dtype.is_floating_point else -1, dtype=dtype)

    monkeypatch.setattr(torch, "empty", poisoned)


def strided(*shape, dtype=FP32, scale=1.0):
    """Rows that lie apart, as the slice of a fused matrix that q or gate_up is."""
    flat = (torch.randn(shape[0], math.prod(shape[1:]) + 24) * scale).to(dtype)
    return flat[:, 8:-16].unflatten(1, shape[1:])


def ulps(found, expected):
    """How many bf16 numbers lie between, element by element."""

    def order(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (order(found) - order(expected)).abs()


def assert_twin(found, expected):
    """fp32: 1e-6. bf16: equal bits but for the rare element on the other side of a rounding.

    Where the first of two roundings falls otherwise, one ulp times a weight is two at most.
    """
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.is_contiguous()
    if found.dtype == FP32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-37)
        return
    apart = ulps(found, expected)
    assert (apart > 0).sum() <= 1 + apart.numel() // 1000
    assert (apart <= 2).all()


# -- RMSNorm --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", SIZES)
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize("scale", SCALES)
def test_rms_norm(dtype, N, T, scale):
    weight = (torch.randn(N) + 1).to(dtype)
    for shape in ((T, N), (T, 3, N)):
        x, residual = strided(*shape, dtype=dtype, scale=scale), strided(*shape, dtype=dtype)
        assert_twin(twin("rms_norm")(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
        found, added = twin("add_rms_norm")(x, residual, weight, 1e-6)
        expected, sums = add_rms_norm_ref(x, residual, weight, 1e-6)
        assert torch.equal(added, sums)
        assert added.is_contiguous()
        assert_twin(found, expected)


def test_rms_norm_rounds_before_the_weight():
    """1 / sqrt(mean + eps) is 1.0035, in bf16 1: without that rounding the result were 2."""
    x, weight = torch.ones(1, 64, dtype=BF16), torch.full((64,), 1.9921875, dtype=BF16)
    assert torch.equal(twin("rms_norm")(x, weight, -0.007)[0], weight)


def test_rms_norm_changes_no_input():
    x, residual, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    before = x.clone(), residual.clone(), weight.clone()
    twin("add_rms_norm")(x, residual, weight, 1e-6)
    assert all(map(torch.equal, (x, residual, weight), before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", SIZES)
def test_fp32_weight_and_factor(dtype, N):
    """The weight of 1 + w: one rounding. A factor goes to the row before it."""
    weight = torch.randn(N) + 1
    x = strided(5, N, dtype=dtype)
    for scale in (1.0, 0.3):
        assert_twin(twin("rms_norm")(x, weight, 1e-6, scale), rms_norm_ref(x, weight, 1e-6, scale))
        arguments = (x, x, weight, 1e-6, scale)
        assert_twin(twin("add_rms_norm")(*arguments)[0], add_rms_norm_ref(*arguments)[0])
        assert_twin(twin("rms_norm_gated")(*arguments), rms_norm_gated_ref(*arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", SIZES)
@pytest.mark.parametrize("T", ROWS)
def test_rms_norm_gated(dtype, N, T):
    weight = (torch.randn(N) + 1).to(dtype)
    for shape in ((T, N), (T, 3, N)):
        x, gate = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype, scale=10.0)
        found = twin("rms_norm_gated")(x, gate, weight, 1e-6)
        assert_twin(found, rms_norm_gated_ref(x, gate, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("T", [*ROWS, 4])
@pytest.mark.parametrize("with_residual", [False, True])
def test_quantised_norm_is_the_norm_quantised(dtype, layout, T, with_residual):
    N, weight = 80, (torch.randn(80) + 1).to(dtype)
    x, residual = strided(T, N, dtype=dtype), strided(T, N, dtype=dtype)
    for rows in (x, residual):  # small beside large: E4M3 without a leading one, and zeros
        rows *= 2.0 ** torch.randint(-16, 1, (T, N))
    if with_residual:
        row, sums = twin("add_rms_norm")(x, residual, weight, 1e-6, 0.7)
    else:
        row, sums, residual = twin("rms_norm")(x, weight, 1e-6, 0.7), None, None
    expected = quantize_ref(row, layout)
    arguments = (x, residual, weight, 1e-6, layout)
    for keep_copy in (False, True):
        found, added = twin("rms_norm_quantized")(*arguments, keep_copy, 0.7)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(found.scales, expected.scales)
        assert T == 0 or found.scales.stride() == expected.scales.stride()
        assert (found.copy is not None) == keep_copy
        assert found.copy is None or torch.equal(found.copy, row)
        height = T + -T % 4 if layout.is_column_major else T
        assert found.scales.untyped_storage().nbytes() == height * 4 * found.scales.size(1)
        if layout.is_column_major:
            columns = found.scales.as_strided((found.scales.size(1), height), (height, 1))
            assert not columns[:, T:].any()
        assert (added is None) if sums is None else torch.equal(added, sums)


# -- Rotary ---------------------------------------------------------------------------------------

ROPES = [(2, 2, 0), (10, 6, 4), (10, 6, 2), (64, 64, 0), (80, 32, 0), (128, 128, 0), (96, 0, 0)]


def make_rope(R, offset=0, is_interleaved=False):
    angles = torch.randn(99, R // 2) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return Rope(table, torch.randint(0, 3, (R // 2,)).repeat(2), offset, is_interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "R", "offset"), ROPES)
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("is_conjugate", [False, True])
def test_rotary(dtype, D, R, offset, T, is_interleaved, is_conjugate):
    rope = make_rope(R, offset, is_interleaved)
    query, key = strided(T, 4, D, dtype=dtype, scale=1e3), strided(T, 1, D, dtype=dtype)
    if T > 1:  # heads that lie apart, too
        query = query[:, ::2]
    for positions in (torch.randint(0, 99, (T,)), torch.randint(0, 99, (3, T))):
        found = twin("rotary")(positions, query, key, rope, is_conjugate)
        expected = rotary_ref(positions, query, key, rope, is_conjugate)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.is_contiguous()
        alone, none = twin("rotary")(positions, query, None, rope, is_conjugate)
        assert none is None
        assert torch.equal(alone, found[0])


# -- SwiGLU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", SIZES)
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize("scale", [*SCALES, 20.0])
def test_silu_mul(dtype, N, T, scale):
    gate_up = strided(T, 2 * N, dtype=dtype, scale=scale)
    gate_up[(gate_up > -89) & (gate_up < -87)] = -80  # between, ours is 0, theirs not yet: below
    assert_twin(twin("silu_mul")(gate_up), silu_mul_ref(gate_up))


def test_silu_is_accurate_everywhere():
    gate = torch.cat((torch.linspace(-87, 87, 20011), torch.tensor([0.0, -0.0, 1e38, 1e-38])))
    found = twin("silu_mul")(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    exact = gate.double() / (1 + (-gate.double()).exp())
    torch.testing.assert_close(found.double(), exact, rtol=6e-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_extremes_is_the_references(dtype):
    extremes = [-torch.inf, -3e38, -1e4, -104.5, -100.0, -90.0, 90.0, 1e4, 3e38, torch.inf]
    gate = torch.tensor([*extremes, torch.nan], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)))[None]
    expected = silu_mul_ref(gate_up)
    torch.testing.assert_close(
        twin("silu_mul")(gate_up), expected, rtol=0, atol=1e-36, equal_nan=True
    )


# -- The store of keys and values -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("D", [1, 5, 80])
@pytest.mark.parametrize("T", ROWS)
def test_store_kv(dtype, D, T):
    k, v = (strided(T, 2, D, dtype=dtype) for _ in range(2))
    slots = torch.randperm(12 * 16)[:T]
    ours, expected = ([torch.zeros(12, 16, 2, D, dtype=dtype) for _ in range(2)] for _ in range(2))
    twin("store_kv")(k, v, *ours, slots)
    store_kv_ref(k, v, *expected, slots)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("slot", [-1, 32])
def test_bad_slot_writes_nothing(slot):
    memory = torch.zeros(8, 16, 2, 8)  # what lies around the caches would show the damage
    rows, caches = torch.randn(3, 2, 8), (memory[1:3], memory[5:7])
    with pytest.raises(ValueError, match=rf"got {slot} at token 1, need 0 to 31"):
        twin("store_kv")(rows, rows, *caches, torch.tensor([3, slot, 99]))
    assert not memory.any()


# -- Norm, rotation and store in one --------------------------------------------------------------


def fused_case(dtype, T, D=16, R=8, offset=4, is_interleaved=False, is_mrope=False, weights=FP32):
    """Arguments of norm_rope_store but for the caches: q, k, v are views of one projection."""
    q, k, v = strided(T, 8 * D, dtype=dtype).split((4 * D, 2 * D, 2 * D), dim=-1)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in (q, k, v))
    norms = None
    if weights is not None:
        norms = HeadNorms(torch.randn(D).to(weights), torch.randn(D).to(weights), 1e-6)
    positions = torch.randint(0, 99, (3, T) if is_mrope else (T,))
    return q, k, v, norms, positions, make_rope(R, offset, is_interleaved)


def fresh_caches(dtype, D=16):
    return [torch.zeros(5, 16, 2, D, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [None, "rows", FP32])
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize(("is_interleaved", "is_mrope"), [(False, False), (True, True)])
@pytest.mark.parametrize(("D", "R", "offset"), [(16, 8, 4), (5, 4, 1), (80, 80, 0)])
def test_norm_rope_store_is_the_three_kernels_in_turn(
    dtype, weights, T, is_interleaved, is_mrope, D, R, offset
):
    weights = dtype if weights == "rows" else weights
    arguments = fused_case(dtype, T, D, R, offset, is_interleaved, is_mrope, weights)
    slots = torch.randperm(80)[:T]

    def norm_rope(q, k, norms, positions, rope):
        if norms is not None:
            q = twin("rms_norm")(q, norms.q_weight, norms.eps)
            k = twin("rms_norm")(k, norms.k_weight, norms.eps)
        return twin("rotary")(positions, q, k, rope)

    three = make_norm_rope_store(norm_rope, twin("store_kv"))
    found, expected, reference = (fresh_caches(dtype, D) for _ in range(3))
    found.append(twin("norm_rope_store")(*arguments, *found, slots))
    expected.append(three(*arguments, *expected, slots))
    reference.append(norm_rope_store_ref(*arguments, *reference, slots))
    assert all(map(torch.equal, found, expected))
    for ours, theirs in zip(found, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-5 if dtype == BF16 else 1e-5)


def test_norm_rope_store_with_threads_and_neighbours():
    T = 60
    *heads, norms, positions, rope = fused_case(BF16, T, 128, 128, 0, is_mrope=True, weights=BF16)
    slots, results = torch.randperm(80)[:T], []
    for threads, rows in ((1, slice(0, T)), (2, slice(0, T)), (1, slice(7, 8))):
        caches = fresh_caches(BF16, 128)
        arguments = (*[x[rows] for x in heads], norms, positions[:, rows].contiguous(), rope)
        out = twin("norm_rope_store", threads)(*arguments, *caches, slots[rows])
        results.append([out, *caches])
    one, two, alone = results
    assert all(map(torch.equal, one, two))
    at = divmod(int(slots[7]), 16)
    assert torch.equal(alone[0][0], one[0][7])
    assert all(torch.equal(a[at], b[at]) for a, b in zip(alone[1:], one[1:], strict=True))


@pytest.mark.parametrize("is_mrope", FLAGS)
@pytest.mark.parametrize(("what", "value"), [("position", 99), ("position", -1),
                                             ("slot", 80), ("slot", -1)])  # fmt: skip
def test_norm_rope_store_writes_nothing_for_a_bad_position_or_slot(is_mrope, what, value):
    *arguments, positions, rope = fused_case(FP32, 3, is_mrope=is_mrope)
    memory = torch.zeros(14, 16, 2, 16)  # around the caches, too
    slots, caches = torch.tensor([1, 2, 3]), (memory[1:6], memory[8:13])
    (positions if what == "position" else slots)[..., -1] = value
    named = value if what == "slot" or not is_mrope else rf"\[{value}, {value}, {value}\]"
    name, last = ("positions", 98) if what == "position" else ("slot_mapping", 79)
    with pytest.raises(ValueError, match=f"{name}: got {named} at token 2, need 0 to {last}"):
        twin("norm_rope_store")(*arguments, positions, rope, *caches, slots)
    assert not memory.any()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_bad_position_of_any_axis_is_refused(axis):
    rope, positions = make_rope(8), torch.ones(3, 4, dtype=torch.int64)
    positions[axis, 2] = 99
    x = torch.zeros(4, 1, 8)
    with pytest.raises(ValueError, match=r"got \[.*99.*\] at token 2, need 0 to 98"):
        twin("rotary")(positions, x, x, rope)


# -- All of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_neighbours_change_no_bit(dtype):
    """Two threads give what one gives, and a row alone what it gives among others."""
    T = 50  # enough work for two threads
    x, residual = (strided(T, 1024, dtype=dtype) for _ in range(2))
    query, key = strided(T, 8, 128, dtype=dtype), strided(T, 2, 128, dtype=dtype)
    weight, table = torch.randn(1024).to(dtype), torch.randn(T, 64)
    positions, gate_up = torch.randperm(T), strided(T, 2 * 576, dtype=dtype)
    rope, three = Rope(table, torch.arange(64) % 32 % 3), torch.randint(0, T, (3, T))
    cases = [
        ("rms_norm", lambda rows: (x[rows], weight, 1e-6)),
        ("add_rms_norm", lambda rows: (x[rows], residual[rows], weight, 1e-6)),
        ("rms_norm_gated", lambda rows: (x[rows], residual[rows], weight, 1e-6)),
        ("rms_norm_quantized", lambda rows: (x[rows], residual[rows], weight, 1e-6, LAYOUTS[0])),
        ("rotary", lambda rows: (positions[rows], query[rows], key[rows], rope)),
        ("rotary", lambda rows: (three[:, rows].contiguous(), query[rows], key[rows], rope)),
        ("silu_mul", lambda rows: (gate_up[rows],)),
    ]

    def run(op, threads, arguments):
        found = twin(op, threads)(*arguments)
        if op == "rms_norm_quantized":
            return found[0].values.view(torch.uint8), found[0].scales, found[1]
        return found if isinstance(found, tuple) else (found,)

    for op, arguments in cases:
        one, two = (run(op, threads, arguments(slice(None))) for threads in (1, 2))
        alone = run(op, 2, arguments(slice(7, 8)))
        assert all(map(torch.equal, one, two))
        assert all(torch.equal(a[7:8], b) for a, b in zip(one, alone, strict=True))
    caches = [torch.zeros(4, 16, 2, 128, dtype=dtype) for _ in range(4)]
    for threads in (1, 2):
        twin("store_kv", threads)(key, key, *caches[2 * threads - 2 : 2 * threads], positions)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


X, W, HEADS, TABLE = torch.zeros(3, 8), torch.zeros(8), torch.zeros(3, 2, 8), torch.zeros(9, 8)
ROPE, HEAD_NORMS = Rope(TABLE), HeadNorms(W, W, 1e-6)
POSITIONS, CACHE = torch.arange(3), torch.zeros(2, 4, 2, 8)
FUSED = {"q": HEADS, "k": HEADS, "v": HEADS, "norms": HEAD_NORMS, "positions": POSITIONS,
         "rope": ROPE, "k_cache": CACHE, "v_cache": CACHE, "slots": POSITIONS}  # fmt: skip


def fused_with(**others):
    return tuple((FUSED | others).values())


REFUSED = [
    ("rms_norm", (X.half(), W.half(), 1e-6), "x, weight: got torch.float16"),
    ("rms_norm", (X, W.bfloat16(), 1e-6), "got torch.float32, torch.bfloat16"),
    ("rms_norm", (X, torch.zeros(7), 1e-6), r"got \(3, 8\), \(7,\)"),
    ("rms_norm", (X[0], W, 1e-6), r"got \(8,\), \(8,\), need \[T, N\]"),
    ("rms_norm", (torch.zeros(8, 3).T, W, 1e-6), r"got strides \(1, 3\)"),
    ("rms_norm", (X.to("meta"), W, 1e-6), "got meta, cpu"),
    ("add_rms_norm", (X, X[:2], W, 1e-6), r"residual: got \(2, 8\)"),
    ("add_rms_norm", (X, X.bfloat16(), W, 1e-6), "residual, weight: got torch.bfloat16"),
    ("rms_norm_gated", (X, X[:2], W, 1e-6), r"gate: got \(2, 8\)"),
    ("rms_norm_quantized", (HEADS, None, W, 1e-6, ScaleLayout(4)), r"x: got \(3, 2, 8\)"),
    ("rms_norm_quantized", (X, None, W, 1e-6, ScaleLayout(3)), "8 values, need a multiple of 3"),
    ("rms_norm_quantized", (X, None, W, 1e-6, ScaleLayout(4, False, True)), "multiple of 16"),
    ("add_rms_norm", (X, torch.zeros(8, 3).T, W, 1e-6), "residual, weight: got strides"),
    ("rotary", (POSITIONS, HEADS.double(), HEADS.double(), ROPE), "got torch.float64"),
    ("rotary", (POSITIONS, HEADS, HEADS.bfloat16(), ROPE), "float32, torch.bfloat16"),
    ("rotary", (POSITIONS.int(), HEADS, HEADS, ROPE), "positions, cos_sin: got torch.int32"),
    ("rotary", (POSITIONS, HEADS, HEADS, Rope(TABLE.bfloat16())), "torch.int64, torch.bfloat16"),
    ("rotary", (POSITIONS[:2], HEADS, HEADS, ROPE), r"got \(2,\)"),
    ("rotary", (POSITIONS, X, X, ROPE), r"need \[T\], \[T, H, D\]"),
    ("rotary", (POSITIONS, HEADS, HEADS[..., :4], ROPE), "one head dim"),
    ("rotary", (POSITIONS, HEADS[..., :4], HEADS[..., :4], ROPE), "even R of at most 4"),
    ("rotary", (POSITIONS, HEADS, HEADS, Rope(TABLE[:, :3])), "even R"),
    ("rotary", (POSITIONS, HEADS, HEADS, Rope(TABLE[:, :4])), "positions, cos_sin: got strided"),
    ("rotary", (POSITIONS, HEADS.mT.contiguous().mT,
                HEADS, ROPE), "got strides"),
    ("rotary", (POSITIONS + 7, HEADS, HEADS, ROPE), "got 9 at token 2, need 0 to 8"),
    ("rotary", (POSITIONS - 1, HEADS, HEADS, ROPE), "got -1 at token 0"),
    ("rotary", (POSITIONS.expand(3, 3).contiguous(), HEADS, HEADS, ROPE), "need positions"),
    ("rotary", (POSITIONS, HEADS, HEADS, Rope(TABLE[:, :6].contiguous(), None, 4)), "at most 4"),
    ("rotary", (POSITIONS, HEADS, HEADS, Rope(TABLE[:, :6].contiguous(), None, -1)), "even R"),
    ("norm_rope_store", fused_with(norms=HeadNorms(W, W.half(), 1)), "k_weight: got torch.float16"),
    ("norm_rope_store", fused_with(norms=HeadNorms(W.bfloat16(), W, 1)), "q_weight: got torch.bf"),
    ("norm_rope_store", fused_with(**{name: x.bfloat16() for name, x in FUSED.items()
                                      if name in ("q", "k", "v", "k_cache", "v_cache")},
                                   norms=HeadNorms(W, W.bfloat16(), 1)), "k_weight: .* for both"),
    ("norm_rope_store", fused_with(norms=HeadNorms(W[:4], W, 1)), r"q_weight: .*float32 \(4,\)"),
    ("norm_rope_store", fused_with(norms=HeadNorms(W, torch.zeros(8, 2)[:, 0], 1)), "k_weight"),
    ("norm_rope_store", fused_with(q=HEADS.half(), k=HEADS.half()), "query, key: got torch.fl"),
    ("norm_rope_store", fused_with(q=HEADS.mT.contiguous().mT), "query, key: got strides"),
    ("norm_rope_store", fused_with(q=HEADS[:2]), r"query, .* got \(3,\), \(2, 2, 8\)"),
    ("norm_rope_store", fused_with(k=HEADS.bfloat16()), "query, key: got .*torch.bfloat16"),
    ("norm_rope_store", fused_with(k=torch.zeros(3, 4, 8)[:, ::2]), "k: got strides"),
    ("norm_rope_store", fused_with(v=HEADS[:2]), r"v: got \(2, 2, 8\)"),
    ("norm_rope_store", fused_with(v=HEADS.bfloat16()), "v: got .* torch.bfloat16"),
    ("norm_rope_store", fused_with(v=HEADS.mT.contiguous().mT), "v: got strides"),
    ("norm_rope_store", fused_with(positions=POSITIONS.int()), "positions, .* got torch.int32"),
    ("norm_rope_store", fused_with(rope=Rope(TABLE[:, :3])), "even R"),
    ("norm_rope_store", fused_with(rope=Rope(TABLE[:, :4])), "positions, cos_sin: got strided"),
    ("norm_rope_store", fused_with(k_cache=CACHE[..., :4]), r"k: got \(3, 2, 8\)"),
    ("norm_rope_store", fused_with(v_cache=CACHE.mT.contiguous().mT), "v_cache, .* got strided"),
    ("norm_rope_store", fused_with(slots=POSITIONS.int()), "slot_mapping: got torch.int32"),
    ("rotary", (POSITIONS.expand(3, 3).contiguous(), HEADS, HEADS,
                Rope(TABLE, torch.zeros(8, dtype=torch.int32))), "axes: got torch.int32"),
    ("rotary", (POSITIONS, HEADS, HEADS, Rope(TABLE, torch.zeros(7).long())), r"axes: .* \(7,\)"),
    ("norm_rope_store", (HEADS, HEADS, HEADS, HeadNorms(W.to("meta"), W, 1e-6), POSITIONS, ROPE,
                         CACHE, CACHE, POSITIONS), "q_weight: got torch.float32 .* on meta"),
    ("silu_mul", (X.half(),), "gate_up: got torch.float16"),
    ("silu_mul", (X[:, :7],), r"got \(3, 7\)"),
    ("silu_mul", (HEADS,), r"got \(3, 2, 8\), need \[T, 2N\]"),
    ("silu_mul", (torch.zeros(8, 3).T,), "got strides"),
    ("store_kv", (HEADS.half(), HEADS, CACHE, CACHE, POSITIONS), "k: got .* torch.float16"),
    ("store_kv", (HEADS, HEADS[:2], CACHE, CACHE, POSITIONS), r"v: got \(2, 2, 8\)"),
    ("store_kv", (HEADS, HEADS, CACHE, CACHE, POSITIONS.int()), "slot_mapping: got torch.int32"),
    ("store_kv", (HEADS, HEADS, CACHE, CACHE[:1], POSITIONS), "k_cache, v_cache: got"),
    ("store_kv", (HEADS, HEADS, CACHE.mT.contiguous().mT, CACHE, POSITIONS), "got strided"),
    ("store_kv", (HEADS, torch.zeros(3, 4, 8)[:, ::2], CACHE, CACHE, POSITIONS), "v: got strides"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arguments", "message"), REFUSED)
def test_refusals(op, arguments, message):
    with pytest.raises(ValueError, match=message):
        twin(op)(*arguments)


def test_engine_gets_the_twins():
    twin("rms_norm")
    table = select_kernels(torch.device("cpu"), "auto", use_compile=False)
    ops = {*Kernels._fields} - {"name", "recorder", "keeps_fp8"}
    others = {"paged_attention", "draw", "pack_weight"}
    others |= {"sigmoid_mul", "causal_conv", "gated_delta", "moe", "pack_experts"}
    assert ops == {*MAKERS, *others}
    for op in ops:
        assert getattr(table, op) is not getattr(Kernels(), op)
    compiled = select_kernels(torch.device("cpu"), "auto", use_compile=True)
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert compiled.store_kv.__name__ == "store_kv_cpu"
    assert compiled.rms_norm._torchdynamo_orig_callable.__code__ is not rms_norm_ref.__code__
    assert_twin(table.rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
