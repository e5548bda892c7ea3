"""The C++ twins of the small kernels, against their references: bits, or where not, ulps."""

import functools
import math

import pytest
import torch

from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.build import KernelBuildError, load_library
from nanoinfer.kernels.rms_norm import (
    add_rms_norm_ref,
    make_add_rms_norm_cpu,
    make_rms_norm_cpu,
    rms_norm_ref,
)
from nanoinfer.kernels.rotary import make_rotary_cpu, rotary_ref
from nanoinfer.kernels.silu_mul import make_silu_mul_cpu, silu_mul_ref
from nanoinfer.kernels.store_kv import make_store_kv_cpu, store_kv_ref

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [FP32, BF16]
SIZES = [1, 5, 64, 80, 576, 1024]
ROWS = [0, 1, 3, 50]
SCALES = [1e-4, 1.0, 1e4]
MAKERS = {
    "rms_norm": make_rms_norm_cpu,
    "add_rms_norm": make_add_rms_norm_cpu,
    "rotary": make_rotary_cpu,
    "silu_mul": make_silu_mul_cpu,
    "store_kv": make_store_kv_cpu,
}


@functools.cache
def twin(op, threads=1):
    try:
        return MAKERS[op](load_library(), threads)
    except KernelBuildError as error:
        pytest.skip(f"no C++ kernels here: {error}")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """torch.empty gives NaN, so that an element that a kernel leaves out shows."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(*size, torch.nan, **how))


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


# -- Rotary ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("D", "R"), [(2, 2), (10, 6), (64, 64), (80, 32), (128, 128), (96, 0)])
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize("scale", SCALES)
def test_rotary(dtype, D, R, T, scale):
    angles = torch.randn(99, R // 2) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.randint(0, 99, (T,))
    query = strided(T, 4, D, dtype=dtype, scale=scale)
    key = strided(T, 1, D, dtype=dtype, scale=scale)
    if T > 1:  # heads that lie apart, too
        query = query[:, ::2]
    found = twin("rotary")(positions, query, key, table)
    for ours, expected in zip(found, rotary_ref(positions, query, key, table), strict=True):
        assert torch.equal(ours, expected)
        assert ours.is_contiguous()


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
    rows, caches = torch.randn(3, 2, 8), [torch.zeros(2, 16, 2, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=rf"got {slot} at token 1, need 0 to 31"):
        twin("store_kv")(rows, rows, *caches, torch.tensor([3, slot, 99]))
    assert not any(cache.any() for cache in caches)


# -- All of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_neighbours_change_no_bit(dtype):
    """Two threads give what one gives, and a row alone what it gives among others."""
    T = 50  # enough work for two threads
    x, residual = (strided(T, 1024, dtype=dtype) for _ in range(2))
    query, key = strided(T, 8, 128, dtype=dtype), strided(T, 2, 128, dtype=dtype)
    weight, table = torch.randn(1024).to(dtype), torch.randn(T, 64)
    positions, gate_up = torch.randperm(T), strided(T, 2 * 576, dtype=dtype)
    cases = {
        "rms_norm": lambda rows: (x[rows], weight, 1e-6),
        "add_rms_norm": lambda rows: (x[rows], residual[rows], weight, 1e-6),
        "rotary": lambda rows: (positions[rows], query[rows], key[rows], table),
        "silu_mul": lambda rows: (gate_up[rows],),
    }
    for op, arguments in cases.items():
        one = twin(op, 1)(*arguments(slice(None)))
        two = twin(op, 2)(*arguments(slice(None)))
        alone = twin(op, 2)(*arguments(slice(7, 8)))
        if isinstance(one, torch.Tensor):
            one, two, alone = [one], [two], [alone]
        assert all(map(torch.equal, one, two))
        assert all(torch.equal(a[7:8], b) for a, b in zip(one, alone, strict=True))
    caches = [torch.zeros(4, 16, 2, 128, dtype=dtype) for _ in range(4)]
    for threads in (1, 2):
        twin("store_kv", threads)(key, key, *caches[2 * threads - 2 : 2 * threads], positions)
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


X, W, HEADS, TABLE = torch.zeros(3, 8), torch.zeros(8), torch.zeros(3, 2, 8), torch.zeros(9, 8)
POSITIONS, CACHE = torch.arange(3), torch.zeros(2, 4, 2, 8)
REFUSED = [
    ("rms_norm", (X.half(), W.half(), 1e-6), "x, weight: got torch.float16"),
    ("rms_norm", (X, W.bfloat16(), 1e-6), "got torch.float32, torch.bfloat16"),
    ("rms_norm", (X, torch.zeros(7), 1e-6), r"got \(3, 8\), \(7,\)"),
    ("rms_norm", (X[0], W, 1e-6), r"got \(8,\), \(8,\), need \[T, N\]"),
    ("rms_norm", (torch.zeros(8, 3).T, W, 1e-6), r"got strides \(1, 3\)"),
    ("rms_norm", (X.to("meta"), W, 1e-6), "got meta, cpu"),
    ("add_rms_norm", (X, X[:2], W, 1e-6), r"residual: got \(2, 8\)"),
    ("add_rms_norm", (X, X.bfloat16(), W, 1e-6), "residual, weight: got torch.bfloat16"),
    ("add_rms_norm", (X, torch.zeros(8, 3).T, W, 1e-6), "residual, weight: got strides"),
    ("rotary", (POSITIONS, HEADS.double(), HEADS.double(), TABLE), "got torch.float64"),
    ("rotary", (POSITIONS, HEADS, HEADS.bfloat16(), TABLE), "float32, torch.bfloat16"),
    ("rotary", (POSITIONS.int(), HEADS, HEADS, TABLE), "positions, cos_sin: got torch.int32"),
    ("rotary", (POSITIONS, HEADS, HEADS, TABLE.bfloat16()), "torch.int64, torch.bfloat16"),
    ("rotary", (POSITIONS[:2], HEADS, HEADS, TABLE), r"got \(2,\)"),
    ("rotary", (POSITIONS, X, X, TABLE), r"need \[T\], \[T, H, D\]"),
    ("rotary", (POSITIONS, HEADS, HEADS[..., :4], TABLE), "one head dim"),
    ("rotary", (POSITIONS, HEADS[..., :4], HEADS[..., :4], TABLE), "even R of at most 4"),
    ("rotary", (POSITIONS, HEADS, HEADS, TABLE[:, :3]), "even R"),
    ("rotary", (POSITIONS, HEADS, HEADS, TABLE[:, :4]), "positions, cos_sin: got strided"),
    ("rotary", (POSITIONS, HEADS.mT.contiguous().mT,
                HEADS, TABLE), "got strides"),
    ("rotary", (POSITIONS + 7, HEADS, HEADS, TABLE), "got 9 at token 2, need 0 to 8"),
    ("rotary", (POSITIONS - 1, HEADS, HEADS, TABLE), "got -1 at token 0"),
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
    for op in MAKERS:
        assert getattr(table, op) is not getattr(Kernels(), op)
    compiled = select_kernels(torch.device("cpu"), "auto", use_compile=True)
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert compiled.store_kv.__name__ == "store_kv_cpu"
    assert compiled.rms_norm._torchdynamo_orig_callable.__code__ is not rms_norm_ref.__code__
    assert_twin(table.rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
