"""nanoinfer/layers/linear.py and kernels/linear.py: every sentence of the contract, by name.

Values are small integers (or eighths) wherever rounding is not the question: their sums are exact
in fp32, so that the right answer is one bit pattern, whatever order a body adds in.
"""

import functools
import itertools
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import MULTIPLYING, kernel_library
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import nanoinfer
from nanoinfer import LLM, SamplingParams
from nanoinfer.kernels.build import KernelBuildError
from nanoinfer.kernels.linear import (
    BLOCK,
    LinearCpu,
    PackedWeight,
    check_out,
    empty_rows,
    flatten_rows,
    has_aligned_rows,
    linear_ref,
    pack_never,
    quantize_blocks_fp8,
    quantize_rows_int8,
    quantize_tokens,
    rows_of_blocks,
)
from nanoinfer.kernels.quantize import FP8, Quantized, ScaleLayout, dequantize, quantize_ref
from nanoinfer.layers.embedding import Embedding
from nanoinfer.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanoinfer.layers.parameter import Parallel

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
FP32_UNIT = 2.0**-24  # largest relative error of one rounding
UNITS = {FP32: FP32_UNIT, BF16: 2.0**-8}

has_packing = torch.backends.mkldnn.is_available() and bool(
    torch.ops.mkldnn._is_mkldnn_bf16_supported()
)
needs_packing = pytest.mark.skipif(not has_packing, reason="this CPU has no bf16 instructions")
shared_param = pytest.param("shared", marks=needs_packing)
onednn_param = pytest.param("onednn", marks=needs_packing)

# name: dtype of x, what the weight is turned into, and the kernels that pack it
KINDS: dict[str, tuple[torch.dtype, torch.dtype | None, str | None]] = {
    "fp32": (FP32, None, None),
    "bf16": (BF16, None, None),
    "packed": (BF16, None, "own"),
    "shared": (BF16, None, "shared"),
    "onednn": (BF16, None, "onednn"),
    "int8": (FP32, torch.int8, None),
    "int8-bf16": (BF16, torch.int8, None),
    "int8-packed": (FP32, torch.int8, "native"),
    "int8-bf16-packed": (BF16, torch.int8, "native"),
    "fp8": (FP32, FP8, None),
    "fp8-bf16": (BF16, FP8, None),
}
PLAIN = ["fp32", "bf16", "packed", shared_param, onednn_param]  # one contract, five bodies
INT8 = ["int8", "int8-bf16", "int8-packed", "int8-bf16-packed"]
ALL = [*PLAIN, *INT8, "fp8", "fp8-bf16"]
assert len(ALL) == len(KINDS)


@functools.cache
def linear_cpu(name: str, threads: int = 2) -> LinearCpu:
    """With the C++ library built for a CPU, or as it is where none can be built.

    "shared": with oneDNN's kernel for many rows, on the same bytes; "own": with ours for all.
    """
    if name == "onednn":
        return LinearCpu(None, 1)
    packer = LinearCpu(kernel_library("native" if name in ("own", "shared") else name), threads)
    if name in ("own", "shared"):
        packer.uses_onednn = name == "shared"
    return packer


def has_own_kernel(kind: str, K: int) -> bool:
    """Blocks that our kernel reads: whole units, and whole steps as oneDNN rounds them up."""
    steps = {"own": 2, "shared": 32, "native": 4}
    return KINDS[kind][2] in steps and K % steps[KINDS[kind][2]] == 0


def random(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def make(
    kind: str, K: int, N: int, bias: bool = False, weight: Tensor | None = None
) -> tuple[Linear, Tensor, Tensor]:
    """A layer of integers, its weight and its bias (zeros if none) in fp64."""
    dtype, form, packer = KINDS[kind]
    linear = Linear(K, N, bias, dtype=dtype, device=CPU)
    weight = (integers(N, K, seed=1) if weight is None else weight).to(dtype)
    vector = (integers(N, seed=2) / 4).to(dtype)
    linear.load("weight", "", weight)
    if bias:
        linear.load("bias", "", vector)
    if form is not None:
        linear.quantize(form)
    if packer is not None:
        packed = linear.pack(linear_cpu(packer).pack)
        is_read_by_us = packed is not None and packed.blocks is not None
        assert is_read_by_us == has_own_kernel(kind, K), (kind, K)
        assert (linear.weight.numel() == 0) == (packed is not None)
    return linear, weight.double(), vector.double() * bias


def padded(shape: tuple[int, ...], dtype: torch.dtype, value: float = math.nan) -> Tensor:
    """A buffer as `out` must be; what lies between its rows is NaN."""
    out = empty_rows(shape, dtype, CPU)
    assert out._base is not None
    out._base.fill_(math.nan)
    return out.fill_(value)


def between_rows(out: Tensor) -> Tensor:
    assert out._base is not None
    return out._base[..., out.shape[-1] :]


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty hands out NaN: whatever a layer leaves unwritten shows."""
    empty = torch.empty

    def poisoned_empty(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned_empty)


# -- weight.dtype decides -------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("K", "N"), [(64, 128), (96, 273), (33, 65), (300, 1), (1, 40)])
@pytest.mark.parametrize("kind", PLAIN)
def test_float_weights_give_the_product_rounded_once(kind, K, N, bias, poisoned):
    linear, weight, vector = make(kind, K, N, bias)
    dtype = KINDS[kind][0]
    for M in (1, 3, 16, 100):
        x = integers(M, K, dtype=dtype, seed=M)
        y = linear(x)
        assert y.dtype == dtype
        assert torch.equal(y, (x.double() @ weight.T + vector).to(dtype))


@pytest.mark.parametrize(("K", "N"), [(64, 128), (257, 33), (1024, 96)])
@pytest.mark.parametrize("kind", PLAIN)
def test_float_weights_sum_in_float32(kind, K, N):
    """Any order of K additions errs by at most K units of sum |x w|; then y is rounded."""
    weight = random(N, K, seed=1)
    linear, weight, vector = make(kind, K, N, bias=True, weight=weight)
    dtype = KINDS[kind][0]
    x = random(7, K, dtype=dtype)
    exact = x.double() @ weight.T + vector
    size = x.double().abs() @ weight.T.abs() + vector.abs()
    bound = UNITS[dtype] * exact.abs() + 2 * K * FP32_UNIT * size
    assert ((linear(x).double() - exact).abs() <= bound).all()


def emulated_int8(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x W^T in fp64 from integers of its own, and the steps of x's rows and of W's."""
    x, weight = x.float(), weight.float()  # in fp32: near ties fall alike
    w_step = weight.abs().amax(1).clamp(min=1e-4) / 127
    low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
    x_step = (high - low).clamp(min=1e-4) / 255
    zero = (-low / x_step).round()[:, None]
    values = ((x / x_step[:, None]).round() + zero).clamp(0, 255) - zero
    product = values.double() @ (weight / w_step[:, None]).round().double().T  # exact
    x_step, w_step = x_step.double(), w_step.double()
    return product * x_step[:, None] * w_step, x_step, w_step


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("K", "N"), [(64, 128), (33, 5), (300, 273), (1, 1)])
@pytest.mark.parametrize("kind", INT8)
def test_int8_weights_multiply_integers_of_each_token_and_row(kind, K, N, bias, poisoned):
    dtype = KINDS[kind][0]
    # Rows and tokens of different sizes: a scale of another row would show.
    weight = (random(N, K, seed=1) * 2.0 ** (torch.arange(N) % 7)[:, None]).to(dtype)
    x = (random(9, K) * 2.0 ** torch.arange(9.0)[:, None]).to(dtype)
    linear, weight, vector = make(kind, K, N, bias, weight)
    assert linear.weight.dtype == torch.int8
    assert linear.weight.shape == ((0,) if has_own_kernel(kind, K) else (N, K))
    assert linear.scales.shape == (N,)
    y, (expected, x_step, w_step) = linear(x).double(), emulated_int8(x, weight)
    expected = expected + vector
    # Two scales and their products are rounded, and y.
    bound = UNITS[dtype] * expected.abs() + 6 * FP32_UNIT * (expected.abs() + vector.abs())
    assert ((y - expected).abs() <= bound).all()
    # And it is the product, each factor off by half a step.
    exact = x.double() @ weight.T + vector
    half_x, half_w = x_step[:, None] / 2, w_step / 2
    steps = half_x * weight.abs().sum(1) + half_w * x.double().abs().sum(1, keepdim=True)
    steps = (steps + K * half_x * half_w) * 1.001
    assert ((y - exact).abs() <= steps + bound).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_int8_rows_reach_127_and_zeros_stay_zeros(dtype):
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [-3e4, 1.0, 2e4]], dtype=dtype)
    values, factors = quantize_rows_int8(x)
    assert values.dtype == torch.int8
    assert factors.dtype == FP32
    assert values[0].tolist() == [64, -127, 32]  # 63.5 and 31.75
    assert values[1].tolist() == [0, 0, 0]
    assert values[2].abs().max() == 127
    assert factors.isfinite().all()
    assert (factors > 0).all()
    error = (values.double() * factors.double()[:, None] - x.double()).abs()
    assert (error <= factors.double()[:, None] * 0.5001).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_tokens_use_all_256_values_and_zero_is_exact(dtype):
    x = torch.tensor(
        [
            [1.0, -2.0, 0.5, 0.0],
            [0, 0, 0, 0],
            [3, 1, 2, 0],
            [-3e4, -1, -2e4, 0],
            [2, 2, 2, 2],
            [127.5, -127.5, 0, 1],  # both ends are rounded away from 0: one too many
        ],
        dtype=dtype,
    )
    values, factors, zeros = quantize_tokens(x)
    assert (values.dtype, factors.dtype, zeros.dtype) == (torch.uint8, FP32, torch.int32)
    assert values.tolist()[0] == [255, 0, 212, 170]
    assert zeros.tolist() == [170, 0, 0, 255, 0, 128]
    assert values[1].tolist() == [0] * 4
    assert values[2].tolist() == [255, 85, 170, 0]
    assert values[3].tolist()[::3] == [0, 255]
    assert values[4].tolist() == [255] * 4
    assert values[5].tolist() == [255, 0, 128, 129]
    assert (factors > 0).all()
    found = (values.double() - zeros[:, None]) * factors.double()[:, None]
    assert not found[x == 0].any()
    assert ((found - x.double()).abs() <= factors.double()[:, None] * 0.5001).all()


def blockwise(weight: Tensor) -> Tensor:
    """[N, K] in fp64 as 128 x 128 blocks store it, block by block."""
    result = torch.empty_like(weight, dtype=torch.float64)
    for n in range(0, len(weight), 128):
        for k in range(0, weight.size(1), 128):
            block = weight[n : n + 128, k : k + 128].float()
            scale = block.abs().max().clamp(min=1e-4) / 448
            stored = (block / scale).to(FP8).double() * scale.double()
            result[n : n + 128, k : k + 128] = stored
    return result


def block_sized_weight(N: int, K: int) -> Tensor:
    """Blocks of very different sizes: a scale of another block would show."""
    n, k = torch.meshgrid(torch.arange(N) // 128, torch.arange(K) // 128, indexing="ij")
    return random(N, K, seed=1) * 16.0 ** ((n + 2 * k) % 4 - 2.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("K", "N"), [(128, 128), (257, 130), (40, 5), (129, 300), (384, 1)])
@pytest.mark.parametrize("kind", ["fp8", "fp8-bf16"])
def test_fp8_weights_have_a_scale_for_each_block(kind, K, N, bias, poisoned):
    dtype = KINDS[kind][0]
    linear, weight, vector = make(kind, K, N, bias, block_sized_weight(N, K))
    assert linear.weight.dtype == FP8
    assert linear.weight.shape == (N, K)
    assert linear.scales.shape == (-(-N // BLOCK), -(-K // BLOCK))
    x = random(9, K, dtype=dtype)
    stored, rows = blockwise(weight), x.double()
    expected = rows @ stored.T + vector
    size = rows.abs() @ stored.T.abs() + vector.abs()
    bound = UNITS[dtype] * expected.abs() + (2 * K + 4) * FP32_UNIT * size
    y = linear(x).double()
    assert ((y - expected).abs() <= bound).all()
    # And it is the product: e4m3 has 4 bits, and steps of 2^-9 next to zero.
    off = (weight.abs() * 2.0**-4).clamp(min=weight.abs().max().item() * 2.0**-18)
    assert ((stored - weight).abs() <= off * 1.001).all()


LAYOUTS = [ScaleLayout(32, *how) for how in [(False, False), (True, False), (False, True)]]
LAYOUTS += [ScaleLayout(32, True, True), ScaleLayout(128)]
LAYOUT_NAMES = ["rows", "columns", "packed-rows", "packed-columns", "rows-of-128"]


def decoded(x: Quantized, layout: ScaleLayout) -> Tensor:
    """[T, N] in fp64, one group after the other."""
    rows = x.values.double()
    for t in range(len(rows)):
        for group in range(rows.size(1) // layout.group_size):
            if layout.is_packed:
                word = int(x.scales[t, group // 4])
                scale = 2.0 ** ((word >> 8 * (group % 4) & 255) - 127)
            else:
                scale = float(x.scales[t, group])
            rows[t, group * layout.group_size : (group + 1) * layout.group_size] *= scale
    return rows


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [*PLAIN, "int8-bf16", "int8-bf16-packed", "fp8-bf16"])
@pytest.mark.parametrize("K", [128, 384])  # four groups of 32 are one int32
@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_quantized_rows_are_multiplied_with_their_scales(layout, K, kind, bias, poisoned):
    """A group's values as the scales say, for every layout of scales and every kind of weight."""
    N = 33
    rows = random(5, K) * 4.0 ** (torch.arange(K) // 32 % 5 - torch.arange(5.0)[:, None])
    x = quantize_ref(rows, layout)
    exact = decoded(x, layout)
    assert torch.equal(dequantize(x), exact.float())
    linear, weight, vector = make(kind, K, N, bias, block_sized_weight(N, K))
    if kind.startswith("int8"):
        expected = emulated_int8(exact, weight)[0] + vector
    else:
        stored = blockwise(weight) if kind == "fp8-bf16" else weight
        expected = exact @ stored.T + vector
        weight = stored
    size = exact.abs() @ weight.T.abs() + vector.abs()
    y = linear(x)
    assert y.dtype == BF16
    assert y.shape == (5, N)
    assert has_aligned_rows(y)
    bound = UNITS[BF16] * expected.abs() + 2 * K * FP32_UNIT * size
    assert ((y.double() - expected).abs() <= bound).all()
    for name, before in (("out", math.nan), ("out_acc", 0.0)):
        out = padded((5, N), BF16, before)
        assert linear(x, **{name: out}) is out
        assert torch.equal(out, y)
        assert between_rows(out).isnan().all()
    assert linear(quantize_ref(rows[:0], layout)).shape == (0, N)


def test_weight_dtype_alone_decides():
    """The same object, before and after: nothing but the weight (and its scales) changed."""
    x, weight = random(3, 64), random(32, 64, seed=1)
    found = {}
    for dtype in (FP32, torch.int8, FP8):
        linear = make("fp32", 64, 32, weight=weight)[0]
        names = set(vars(linear))
        if dtype != FP32:
            linear.quantize(dtype)
        assert linear.weight.dtype == dtype
        assert set(vars(linear)) == names
        found[dtype] = linear(x)
        assert not linear.weight.requires_grad
    assert not torch.equal(found[FP32], found[torch.int8])
    assert not torch.equal(found[FP32], found[FP8])
    for dtype in (torch.int8, FP8):
        torch.testing.assert_close(found[dtype], found[FP32], rtol=0, atol=2.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e5m2])
def test_other_dtypes_of_weights_are_refused(dtype):
    linear = make("fp32", 8, 4)[0]
    with pytest.raises(ValueError, match=rf"dtype: got {dtype}, need .*int8.*float8_e4m3fn"):
        linear.quantize(dtype)
    assert linear.weight.dtype == FP32


# -- Rows on 32-byte boundaries -------------------------------------------------------------------


def physical_width(N: int, dtype: torch.dtype) -> int:
    while N * dtype.itemsize % 32:
        N += 1
    return N


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_rows_start_on_32_bytes_in_storage_rounded_up_only_when_needed(kind, bias, poisoned):
    dtype = KINDS[kind][0]
    for N in (*range(1, 41), 273):
        linear, weight, vector = make(kind, 16, N, bias)
        width = physical_width(N, dtype)
        for shape in [(5,), (1,), (2, 3), (2, 1, 2), (), (0,), (2, 0)]:
            x = integers(*shape, 16, dtype=dtype)
            y = linear(x)
            assert y.shape == (*shape, N)
            assert y.dtype == dtype
            assert has_aligned_rows(y)
            storage = torch.empty((*shape, width), dtype=dtype)
            assert y.stride() == storage[..., :N].stride()
            assert y.storage_offset() == 0
            assert y.data_ptr() % 32 == 0
            if y.numel():
                assert y.untyped_storage().nbytes() == storage.untyped_storage().nbytes()
            if kind in ("fp32", "bf16", "packed", "onednn"):
                assert torch.equal(y, (x.double() @ weight.T + vector).to(dtype))
            assert y.isfinite().all()


def test_empty_rows_draws_the_boundary():
    y = empty_rows((2, 5), FP32, CPU)
    assert (y.shape, y.stride()) == ((2, 5), (8, 1))
    assert y._base.shape == (2, 8)
    assert empty_rows((4, 8), FP32, CPU).stride() == (8, 1)
    assert empty_rows((4, 8), BF16, CPU).stride() == (16, 1)
    assert empty_rows((4, 33), torch.int8, CPU).stride() == (64, 1)


# -- out= and out_acc= ----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N", [1, 5, 32, 273])
@pytest.mark.parametrize("kind", ALL)
def test_out_is_written_in_place_and_nothing_beside_it(kind, N, bias):
    dtype = KINDS[kind][0]
    linear, *_ = make(kind, 48, N, bias)
    for shape in [(1,), (5,), (2, 3), (), (0,)]:
        x = integers(*shape, 48, dtype=dtype)
        out = padded((*shape, N), dtype)
        assert linear(x, out=out) is out
        assert torch.equal(out, linear(x))
        assert between_rows(out).isnan().all()


@pytest.mark.parametrize("kind", PLAIN)
def test_out_may_have_rows_further_apart(kind):
    """Any aligned rows will do: here a column of a wider matrix."""
    dtype = KINDS[kind][0]
    linear, weight, _ = make(kind, 48, 5)
    x = integers(3, 48, dtype=dtype)
    matrix = torch.full((3, 64), math.nan, dtype=dtype)
    out = matrix[:, 32:37]
    assert linear(x, out=out) is out
    assert torch.equal(matrix[:, 32:37], (x.double() @ weight.T).to(dtype))
    assert matrix.isnan().sum() == 3 * (64 - 5)


REFUSED: dict[str, tuple[Callable[[torch.dtype], Tensor], str]] = {
    "fewer rows": (lambda dtype: padded((2, 5), dtype), r"\(2, 5\)"),
    "fewer columns": (lambda dtype: padded((3, 4), dtype), r"\(3, 4\)"),
    "one more dimension": (lambda dtype: padded((1, 3, 5), dtype), r"\(1, 3, 5\)"),
    "flat": (lambda dtype: padded((15,), dtype), r"\(15,\)"),
    "dtype": (lambda dtype: padded((3, 5), torch.float16), "float16"),
    "rows side by side": (lambda dtype: torch.zeros(3, 5, dtype=dtype), r"\(5, 1\)"),
    "rows on 16 bytes": (
        lambda dtype: torch.zeros(3, 48 // dtype.itemsize, dtype=dtype)[:, :5],
        r"strides \(\d+, 1\)",
    ),
    "start between boundaries": (
        lambda dtype: torch.zeros(3, 64, dtype=dtype)[:, 1:6],
        r"strides \(64, 1\) of .* at 0x",
    ),
    "the same row again": (
        lambda dtype: torch.zeros(1, 64, dtype=dtype)[:, :5].expand(3, 5),
        r"\(0, 1\)",
    ),
    "every other value": (lambda dtype: torch.zeros(3, 64, dtype=dtype)[:, :10:2], r"\(64, 2\)"),
    "columns for rows": (lambda dtype: torch.zeros(5, 32, dtype=dtype)[:, :3].T, r"\(1, 32\)"),
}


@pytest.mark.parametrize("name", ["out", "out_acc"])
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", PLAIN)
def test_out_that_breaks_the_contract_is_refused(kind, case, name):
    make_out, found = REFUSED[case]
    dtype = KINDS[kind][0]
    linear, *_ = make(kind, 48, 5)
    out = make_out(dtype)
    before = out.clone()
    match = rf"^{name}: got .*{found}.*, need .*; try .*empty_rows"
    with pytest.raises(ValueError, match=match):
        linear(integers(3, 48, dtype=dtype), **{name: out})
    assert torch.equal(out.nan_to_num(99), before.nan_to_num(99))


@pytest.mark.parametrize("name", ["out", "out_acc"])
def test_rows_that_overlap_are_refused(name):
    """Rows of 9 that are 8 apart."""
    linear, *_ = make("fp32", 48, 9)
    out = torch.zeros(64).as_strided((3, 9), (8, 1))
    with pytest.raises(ValueError, match=rf"^{name}: got strides \(8, 1\).*need .*apart"):
        linear(integers(3, 48), **{name: out})


def test_the_stride_of_a_single_row_or_column_is_not_looked_at():
    for out in (torch.zeros(64)[:5].as_strided((1, 5), (5, 1)), torch.zeros(2, 8)[:, :1]):
        check_out("out", out, tuple(out.shape), FP32)
    with pytest.raises(ValueError, match="need values of a row side by side"):
        check_out("out", torch.zeros(8, 4).T[:1], (1, 8), FP32)


@pytest.mark.parametrize("kind", ["fp32", "packed", shared_param, onednn_param, "int8-packed"])
def test_out_and_out_acc_together_are_refused(kind):
    linear, *_ = make(kind, 48, 5)
    dtype = KINDS[kind][0]
    out, out_acc = padded((3, 5), dtype, 0.0), padded((3, 5), dtype, 0.0)
    with pytest.raises(ValueError, match="out, out_acc: got both, need one"):
        linear(integers(3, 48, dtype=dtype), out=out, out_acc=out_acc)


def accumulate(
    kind: str, M: int, N: int, bias: bool, is_cancelling: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The buffer after out_acc; its values before, the product and the bias in fp64.

    All are multiples of 1/8 below 2^14, so that every sum is exact in fp32.
    """
    dtype = KINDS[kind][0]
    linear, weight, vector = make(kind, 64, N, bias)
    x = integers(M, 64, dtype=dtype, seed=M)
    product = x.double() @ weight.T
    before = padded((M, N), dtype)
    before.copy_(-product if is_cancelling else integers(M, N, seed=3) * 15 / 8)
    y = before.double()
    assert linear(x, out_acc=before) is before
    assert between_rows(before).isnan().all()
    return before, y, product, vector.expand(M, N)


@pytest.mark.parametrize("is_cancelling", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("N", [1, 5, 32, 273])
@pytest.mark.parametrize("kind", PLAIN)
def test_out_acc_adds_the_product_and_rounds_once(kind, N, bias, is_cancelling):
    dtype = KINDS[kind][0]
    for M in (0, 1, 3, 64):
        found, y, product, vector = accumulate(kind, M, N, bias, is_cancelling)
        assert torch.equal(found, (y + product + vector).to(dtype))


@pytest.mark.parametrize("N", [1, 5, 32, 273])
def test_rounding_twice_would_show_in_the_test_above(N):
    """Else that would show nothing: the same numbers, rounded on the way."""
    _, weight, vector = make("bf16", 64, N, bias=True)
    product = integers(64, 64, seed=64).double() @ weight.T
    y, cancelling = (integers(64, N, seed=3) * 15 / 8).to(BF16), (-product).to(BF16)
    once = (y.double() + product + vector).to(BF16)
    assert not torch.equal(y + (product + vector).to(BF16), once)
    assert not torch.equal((y.double() + product).to(BF16) + vector.to(BF16), once)
    # Cancelled, not even the first bit is right.
    assert (cancelling + product.to(BF16)).count_nonzero() == 0
    assert (cancelling.double() + product).count_nonzero() > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [*INT8, "fp8", "fp8-bf16"])
def test_out_acc_adds_quantised_products_and_rounds_once(kind, bias):
    dtype = KINDS[kind][0]
    linear, weight, vector = make(kind, 160, 33, bias, random(33, 160, seed=1))
    x = random(5, 160, dtype=dtype)
    if linear.weight.dtype == torch.int8:
        product, size = emulated_int8(x, weight)[0], 0.0
    else:
        stored = blockwise(weight)
        product, size = x.double() @ stored.T, x.double().abs() @ stored.T.abs()
    out = padded((5, 33), dtype)
    out.copy_(-product)
    expected = out.double() + product + vector
    slack = 2 * 160 * FP32_UNIT * size + 8 * FP32_UNIT * (product.abs() + vector.abs())
    assert linear(x, out_acc=out) is out
    assert ((out.double() - expected).abs() <= UNITS[dtype] * expected.abs() + slack).all()
    assert between_rows(out).isnan().all()


# -- Leading dimensions ---------------------------------------------------------------------------


def test_flattening_keeps_the_padded_row_stride():
    out = padded((2, 3, 4, 5), FP32)
    rows = flatten_rows("out", out)
    assert (rows.shape, rows.stride()) == ((24, 5), (8, 1))
    assert rows.data_ptr() == out.data_ptr()
    assert flatten_rows("out", out[0, 0, 0]).shape == (1, 5)
    assert flatten_rows("out", padded((2, 0, 5), FP32)).shape == (0, 5)


@pytest.mark.parametrize("name", ["out", "out_acc"])
@pytest.mark.parametrize("kind", PLAIN)
def test_three_dimensional_out_is_written_row_by_row(kind, name):
    dtype = KINDS[kind][0]
    linear, weight, _ = make(kind, 48, 5)
    x = integers(2, 3, 48, dtype=dtype)
    out = padded((2, 3, 5), dtype, 0.0)
    assert linear(x, **{name: out}) is out
    assert torch.equal(out, (x.double() @ weight.T).to(dtype))
    assert between_rows(out).isnan().all()


@pytest.mark.parametrize("name", ["out", "out_acc"])
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("case", ["gap between planes", "planes for rows", "planes overlap"])
def test_out_that_flattening_would_misread_is_refused(kind, case, name):
    dtype = KINDS[kind][0]
    linear, *_ = make(kind, 48, 5)
    if case == "gap between planes":
        out = padded((2, 4, 5), dtype, 0.0)[:, :3]
    elif case == "planes for rows":
        out = padded((3, 2, 5), dtype, 0.0).transpose(0, 1)
    else:
        out = torch.zeros(4, 16, dtype=dtype).as_strided((2, 3, 5), (16, 16, 1))
    assert has_aligned_rows(out)  # each row by itself is as it should be
    with pytest.raises(ValueError, match=r"got strides \(.*\) for \(2, 3, 5\), need .*; try"):
        linear(integers(2, 3, 48, dtype=dtype), **{name: out})
    assert not out.any()


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A view with any strides and start into a buffer of counted values."""
    widths = st.sampled_from([1, 3, 8, 9, 17])
    shape = [*draw(st.lists(st.integers(0, 3), max_size=2)), draw(widths)]
    steps = st.sampled_from([0, 1, 2, 4, 8, 16, 24, 32, 48, 64])
    strides = [draw(steps) for _ in shape]
    if draw(st.booleans()):
        strides[-1] = 1
    start = draw(st.sampled_from([0, 1, 4, 8, 16]))
    return torch.arange(2000.0).as_strided(shape, strides, start)


def checked(out: Tensor) -> Tensor:
    check_out("out", out, tuple(out.shape), FP32)
    return out


def rows_of(x: Tensor) -> list[Tensor]:
    return [x] if x.dim() == 1 else [row for part in x for row in rows_of(part)]


@settings(max_examples=500, deadline=None)
@given(strided())
def test_a_buffer_is_accepted_if_and_only_if_its_rows_are_aligned_and_evenly_apart(out):
    """Against addresses counted one by one."""
    rows = rows_of(out) if out.numel() else []
    addresses = [[row[i : i + 1].data_ptr() for i in range(len(row))] for row in rows]
    all_addresses = {address for row in addresses for address in row}
    starts = [row[0] for row in addresses]
    is_fine = (
        all(row == [*range(row[0], row[0] + 4 * len(row), 4)] for row in addresses)
        and all(start % 32 == 0 for start in starts)
        and len(all_addresses) == out.numel()
        and len({b - a for a, b in itertools.pairwise(starts)}) <= 1
    )
    if not is_fine:
        with pytest.raises(ValueError, match=r"got strides .*, need .*; try"):
            flatten_rows("out", checked(out))
        return
    flat = flatten_rows("out", checked(out))
    assert flat.shape == (math.prod(out.shape[:-1]), out.shape[-1])
    assert [row.data_ptr() for row in flat if out.numel()] == starts


# -- Which x is taken -----------------------------------------------------------------------------


@pytest.mark.parametrize("N", [32, 33])  # a whole number of boundaries, and not
@pytest.mark.parametrize("kind", ALL)
def test_x_need_not_be_contiguous(kind, N):
    dtype = KINDS[kind][0]
    linear, *_ = make(kind, 48, N, bias=True)
    columns = integers(5, 100, dtype=dtype)[:, 3:51]
    transposed = integers(48, 7, dtype=dtype).T
    planes = integers(3, 2, 48, dtype=dtype).transpose(0, 1)
    every_other = integers(5, 96, dtype=dtype)[::2, ::2]
    expanded = integers(1, 48, dtype=dtype).expand(4, 48)
    for x in (columns, transposed, planes, every_other, expanded):
        y, same = linear(x), linear(x.clone(memory_format=torch.contiguous_format))
        if kind.startswith("fp8"):  # fractions: another layout may be summed in another order
            torch.testing.assert_close(y, same, rtol=2**-7 if dtype == BF16 else 1e-5, atol=1e-3)
        else:
            assert torch.equal(y, same)
        assert y.shape == (*x.shape[:-1], N)
        assert has_aligned_rows(y)


@pytest.mark.parametrize("K", [33, 48])
@pytest.mark.parametrize("N", [32, 33])
@pytest.mark.parametrize("kind", ALL)
def test_x_of_another_width_is_refused(kind, N, K):
    """Before anything is written."""
    dtype = KINDS[kind][0]
    linear, *_ = make(kind, K, N)
    for width in (1, K - 1, K + 1, 2 * K):
        with pytest.raises((ValueError, RuntimeError)):
            linear(integers(3, width, dtype=dtype))
        out = padded((3, N), dtype)
        with pytest.raises(ValueError, match=rf"x: got \(3, {width}\), need \[..., {K}\]"):
            linear(integers(3, width, dtype=dtype), out=out)
        assert out.isnan().all()


@pytest.mark.parametrize("N", [32, 33])
@pytest.mark.parametrize("kind", PLAIN)
def test_x_of_another_dtype_is_refused(kind, N):
    """Never converted behind one's back."""
    linear, *_ = make(kind, 48, N)
    for dtype in {FP32, BF16, torch.float64} - {KINDS[kind][0]}:
        with pytest.raises((ValueError, RuntimeError)):
            linear(integers(3, 48, dtype=dtype))


# -- Ranks ----------------------------------------------------------------------------------------

SIZES = [1, 2, 4]


def checkpoint(*names_and_rows: tuple[str, int], K: int) -> dict[str, dict[str, Tensor]]:
    """Whole tensors, as a checkpoint has them: {"weight": {part: [N, K]}, "bias": {part: [N]}}."""
    return {
        "weight": {n: integers(r, K, seed=10 + i) for i, (n, r) in enumerate(names_and_rows)},
        "bias": {n: integers(r, seed=20 + i) / 4 for i, (n, r) in enumerate(names_and_rows)},
    }


def load_ranks(
    layer: Callable[..., Linear],
    tensors: dict[str, dict[str, Tensor]],
    size: int,
    bias: bool,
    dtype: torch.dtype = FP32,
    packer: str | None = None,
) -> list[Linear]:
    """Every rank's layer, from the same whole tensors; each element of them written by `load`."""
    ranks = []
    for rank in range(size):
        linear = layer(bias=bias, parallel=Parallel(rank, size), dtype=dtype, device=CPU)
        assert [*linear.state_dict()] == (["weight", "bias"] if bias else ["weight"])
        for name, parameter in linear.named_parameters():
            assert not parameter.requires_grad
            parameter.fill_(math.nan)
            for part in linear.cuts:
                linear.load(name, part, tensors[name][part])
            assert not parameter.isnan().any(), name
        if packer is not None:  # after the cut, never before
            linear.pack(linear_cpu(packer).pack)
            assert linear.weight.numel() == 0
        ranks.append(linear)
    return ranks


def whole(tensors: dict[str, dict[str, Tensor]], part: str, x: Tensor, bias: bool) -> Tensor:
    """The product of a part of the checkpoint."""
    product = x.double() @ tensors["weight"][part].double().T
    return (product + tensors["bias"][part].double() * bias).to(x.dtype)


forms = pytest.mark.parametrize(
    ("dtype", "packer"),
    [
        (FP32, None),
        (BF16, None),
        (BF16, "own"),
        pytest.param(BF16, "shared", marks=needs_packing),
        pytest.param(BF16, "onednn", marks=needs_packing),
    ],
    ids=["fp32", "bf16", "packed", "shared", "onednn"],
)


@forms
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_columns_side_by_side_are_the_product(size, bias, dtype, packer):
    tensors = checkpoint(("", 20), K=32)
    ranks = load_ranks(
        lambda **how: ColumnParallelLinear(32, 20, **how), tensors, size, bias, dtype, packer
    )
    assert [(rank.in_features, rank.out_features) for rank in ranks] == [(32, 20 // size)] * size
    x = integers(3, 32, dtype=dtype)
    found = torch.cat([rank(x) for rank in ranks], dim=-1)
    assert torch.equal(found, whole(tensors, "", x, bias))


@forms
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_merged_columns_are_the_products_part_by_part(size, bias, dtype, packer):
    parts = {"gate_proj": 20, "up_proj": 12}
    tensors = checkpoint(*parts.items(), K=32)
    ranks = load_ranks(
        lambda **how: MergedColumnParallelLinear(32, parts, **how),
        tensors, size, bias, dtype, packer,
    )  # fmt: skip
    assert {rank.out_features for rank in ranks} == {32 // size}
    x = integers(3, 32, dtype=dtype)
    rows = [rank(x).split((20 // size, 12 // size), dim=-1) for rank in ranks]
    for part, found in zip(parts, zip(*rows, strict=True), strict=True):
        assert torch.equal(torch.cat(found, dim=-1), whole(tensors, part, x, bias)), part


HEADS = [(1, 4, 2), (2, 4, 2), (4, 4, 2), (4, 8, 2), (2, 4, 4), (4, 4, 1), (4, 8, 8)]


@forms
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "num_heads", "num_kv_heads"), HEADS)
def test_every_query_head_finds_its_keys_on_its_rank(
    size, num_heads, num_kv_heads, bias, dtype, packer
):
    """Query head h reads key-value head h * KV // H; with fewer of those than ranks, a copy."""
    D, K = 6, 32
    rows = {"q_proj": num_heads * D, "k_proj": num_kv_heads * D, "v_proj": num_kv_heads * D}
    tensors = checkpoint(*rows.items(), K=K)
    ranks = load_ranks(
        lambda **how: QKVParallelLinear(K, D, num_heads, num_kv_heads, **how),
        tensors, size, bias, dtype, packer,
    )  # fmt: skip
    x = integers(3, K, dtype=dtype)
    q, k, v = (whole(tensors, part, x, bias).unflatten(-1, (-1, D)) for part in rows)
    seen = []
    for rank, linear in enumerate(ranks):
        assert sum(linear.sizes) == linear.out_features
        parts = linear(x).split(linear.sizes, dim=-1)
        found_q, found_k, found_v = (part.unflatten(-1, (-1, D)) for part in parts)
        H, KV = num_heads // size, max(num_kv_heads // size, 1)
        assert (found_q.size(1), found_k.size(1), found_v.size(1)) == (H, KV, KV)
        for h in range(H):
            head = rank * H + h
            kv_head = head * num_kv_heads // num_heads
            assert torch.equal(found_q[:, h], q[:, head])
            assert torch.equal(found_k[:, h * KV // H], k[:, kv_head])
            assert torch.equal(found_v[:, h * KV // H], v[:, kv_head])
            seen.append(head)
    assert seen == [*range(num_heads)]


@forms
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_ranks_of_rows_add_up_to_the_product_and_one_bias(size, bias, dtype, packer):
    tensors = checkpoint(("", 20), K=32)
    ranks = load_ranks(
        lambda **how: RowParallelLinear(32, 20, **how), tensors, size, bias, dtype, packer
    )
    assert [(rank.in_features, rank.out_features) for rank in ranks] == [(32 // size, 20)] * size
    x = integers(3, 32, dtype=dtype)
    pieces = [rank(part) for rank, part in zip(ranks, x.chunk(size, -1), strict=True)]
    exact = [
        part.double() @ weight.double().T + tensors["bias"][""].double() * (bias and rank == 0)
        for rank, (part, weight) in enumerate(
            zip(x.chunk(size, -1), tensors["weight"][""].chunk(size, 1), strict=True)
        )
    ]
    for found, expected in zip(pieces, exact, strict=True):
        assert torch.equal(found, expected.to(dtype))
    total = torch.stack(exact).sum(0)
    assert torch.equal(total.to(dtype), whole(tensors, "", x, bias))
    if dtype == FP32:
        assert torch.equal(torch.stack(pieces).sum(0), whole(tensors, "", x, bias))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_quantising_comes_after_the_cut(size, dtype):
    """A rank's columns have the scales of its own rows: those of int8 are the whole matrix's."""
    N, K = 128 * size, 160
    weight = random(N, K, seed=1)
    tensors = {"weight": {"": weight}}
    ranks = load_ranks(lambda **how: ColumnParallelLinear(K, N, **how), tensors, size, False)
    linear = make("fp32", K, N, weight=weight)[0]
    for rank in (linear, *ranks):
        rank.quantize(dtype)
    x = random(3, K)
    torch.testing.assert_close(torch.cat([rank(x) for rank in ranks], -1), linear(x))
    assert torch.equal(torch.cat([rank.scales for rank in ranks]), linear.scales)


UNEVEN: dict[str, tuple[Callable[[Parallel], Linear], str]] = {
    "column": (lambda p: ColumnParallelLinear(8, 6, parallel=p), "out_features: got 6"),
    "merged": (
        lambda p: MergedColumnParallelLinear(8, {"gate_proj": 8, "up_proj": 6}, parallel=p),
        "up_proj: got 6",
    ),
    "q heads": (lambda p: QKVParallelLinear(8, 4, 6, 2, parallel=p), "num_heads: got 6"),
    "more kv heads": (lambda p: QKVParallelLinear(8, 4, 8, 6, parallel=p), "num_kv_heads: got 6"),
    "row": (lambda p: RowParallelLinear(6, 8, parallel=p), "in_features: got 6"),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_shares_are_refused_by_number(case):
    layer, what = UNEVEN[case]
    for rank in range(4):
        with pytest.raises(ValueError, match=rf"^{what}, need a multiple of 4 ranks"):
            layer(Parallel(rank, 4))


def test_ranks_that_share_no_heads_evenly_are_refused():
    with pytest.raises(ValueError, match="key-value heads: got 4, need a multiple of 3"):
        QKVParallelLinear(8, 4, 12, 3, parallel=Parallel(0, 4))


LAYERS: dict[str, tuple[Callable[..., Linear], dict[str, int]]] = {
    "whole": (lambda parallel, **how: Linear(32, 24, **how), {"": 24}),
    "column": (lambda **how: ColumnParallelLinear(32, 24, **how), {"": 24}),
    "merged": (
        lambda **how: MergedColumnParallelLinear(32, {"a": 8, "b": 16}, **how),
        {"a": 8, "b": 16},
    ),
    "qkv": (
        lambda **how: QKVParallelLinear(32, 4, 4, 2, **how),
        {"q_proj": 16, "k_proj": 8, "v_proj": 8},
    ),
    "row": (lambda **how: RowParallelLinear(32, 24, **how), {"": 24}),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", LAYERS)
def test_wrong_shapes_are_refused_and_never_broadcast(case, rank):
    layer, parts = LAYERS[case]
    linear = layer(bias=True, parallel=Parallel(rank, 2), dtype=FP32, device=CPU)
    for part, rows in parts.items():
        wrong = {
            "weight": [(rows, 31), (rows, 1), (rows, 16), (1, 32), (rows // 2, 32),
                       (rows + 1, 32), (rows,), (1, rows, 32), (32, rows + 1)],
            "bias": [(rows + 1,), (1,), (rows // 2,), (), (rows, 1), (1, rows)],
        }  # fmt: skip
        for name, shapes in wrong.items():
            parameter = getattr(linear, name).data.fill_(math.nan)
            for shape in shapes:
                with pytest.raises(ValueError, match=r"need float \[.*as config.json says"):
                    linear.load(name, part, torch.ones(shape))
            assert parameter.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, FP8, torch.bool], ids=str)
def test_only_floats_are_loaded(dtype):
    linear = Linear(8, 4, dtype=FP32, device=CPU)
    with pytest.raises(ValueError, match=f"is {dtype}"):
        linear.load("weight", "", torch.ones(4, 8).to(dtype))


def test_checkpoints_of_another_float_are_converted():
    for dtype in (BF16, torch.float16, FP32):
        linear = Linear(8, 4, dtype=BF16, device=CPU)
        weight = random(4, 8, dtype=dtype)
        linear.load("weight", "", weight)
        assert torch.equal(linear.weight, weight.to(BF16))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("case", LAYERS)
def test_an_unknown_part_is_a_key_error(case, name):
    layer, _ = LAYERS[case]
    linear = layer(bias=True, parallel=Parallel(), dtype=FP32, device=CPU)
    with pytest.raises(KeyError, match="o_proj"):
        linear.load(name, "o_proj", torch.ones(linear.out_features, 32))


# -- Packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "kind", ["packed", shared_param, onednn_param, "int8-packed", "int8-bf16-packed"]
)
def test_packing_leaves_one_copy_of_the_weight(kind, bias):
    dtype, form, packer = KINDS[kind]
    linear, weight, vector = make("fp32" if dtype == FP32 else "bf16", 96, 273, bias)
    if form is not None:
        linear.quantize(form)
    plain = StorageWeakRef(linear.weight.untyped_storage())
    x = integers(3, 96, dtype=dtype)
    before = linear(x)
    packed = linear.pack(linear_cpu(packer).pack)
    assert packed is not None
    assert linear.pack(pack_never) is packed, "once"
    assert plain.expired()
    assert linear.weight.numel() == 0
    assert linear.weight.untyped_storage().nbytes() == 0
    assert linear.weight.dtype == (form or BF16)
    if form is None:
        assert torch.equal(linear(x), (x.double() @ weight.T + vector).to(dtype))
    else:  # a bias may be added in the same rounding
        unit = 2 * UNITS[dtype] if bias else 0.0
        torch.testing.assert_close(linear(x), before, rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", [torch.int8, FP8], ids=str)
def test_quantising_leaves_one_copy_of_the_weight(dtype):
    linear, *_ = make("bf16", 96, 273)
    plain = StorageWeakRef(linear.weight.untyped_storage())
    linear.quantize(dtype)
    assert plain.expired()


@pytest.mark.parametrize(
    ("kind", "K", "packer"),
    [
        *[(kind, 64, packer) for kind in ("fp32", "fp8-bf16") for packer in ("native", "onednn")],
        *[(kind, 64, "onednn") for kind in ("int8", "int8-bf16")],
        *[("int8", K, "native") for K in (1, 33, 34, 63)],  # four values of a row are a step
    ],
)
def test_what_no_kernel_reads_faster_stays_plain(kind, K, packer):
    linear, *_ = make(kind, K, 33)
    x = integers(3, K, dtype=KINDS[kind][0])
    before = linear(x)
    assert linear.pack(linear_cpu(packer).pack) is None
    assert linear.weight.shape == (33, K)
    assert torch.equal(linear(x), before)


def test_without_onednn_our_own_kernel_packs(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    pack = LinearCpu(kernel_library("native"), 2).pack
    weight, x = integers(100, 66, dtype=BF16), integers(600, 66, dtype=BF16)
    assert LinearCpu(None, 1).pack(weight, None) is None
    assert pack(weight[:, 1:], None) is None, "no whole pairs"
    packed = pack(weight, None)
    assert packed is not None
    assert torch.equal(packed.plain(), weight)
    assert torch.equal(packed.multiply(x, None, False), reference(x, weight, None, None))
    weight = integers(100, 64, dtype=BF16)
    values, scales = quantize_rows_int8(weight)
    packed = pack(values, scales)
    assert packed is not None
    x = random(9, 64, dtype=BF16)
    assert torch.equal(packed.multiply(x, None, False), reference(x, values, scales, None))


@pytest.mark.parametrize(
    ("has_pairs", "has_amx", "machine", "is_supported", "expected"),
    [
        (True, False, "x86_64", True, True),
        (False, True, "x86_64", True, True),
        (False, False, "x86_64", True, False),  # no instructions, or slow ones
        (False, False, "aarch64", True, True),
        (True, True, "x86_64", False, False),  # torch was built without
    ],
)
def test_onednn_multiplies_many_rows_where_it_is_fast(
    monkeypatch, has_pairs, has_amx, machine, is_supported, expected
):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: is_supported)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_supported)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    names = ("linear_bf16", "linear_int8", "has_pairs")
    library = SimpleNamespace(
        **{f"nanoinfer_{name}": Mock(return_value=has_pairs) for name in names}
    )
    assert LinearCpu(library, 1).uses_onednn == expected
    assert LinearCpu(None, 1).uses_onednn == is_supported


COUNTS = (1, 16, 64, 512)  # rows of x
MULTIPLY = f"""
import sys
import torch
from nanoinfer.kernels.build import load_library
from nanoinfer.kernels.linear import LinearCpu, empty_rows
from nanoinfer.layers.linear import Linear

packer = LinearCpu(None if sys.argv[1] == "onednn" else load_library(), 1)
packer.uses_onednn = sys.argv[1] != "own"
torch.ops.mkldnn._reorder_linear_weight(torch.ones(40, 40).bfloat16(), 1)  # told, if anything is
for K, N in [(96, 272), (80, 273)]:
    linear = Linear(K, N, bias=True, dtype=torch.bfloat16, device="cpu")
    linear.weight.data.fill_(1), linear.bias.data.fill_(1)
    linear.pack(packer.pack)
    for M in {COUNTS}:
        x, out = torch.ones(M, K).bfloat16(), empty_rows((M, N), torch.bfloat16, "cpu").fill_(1)
        linear(x), linear(x, out=out), linear(x, out_acc=out)
"""


@needs_packing
@pytest.mark.parametrize("packer", ["own", "shared", "onednn"])
def test_one_packing_serves_every_number_of_rows(packer):
    """oneDNN tells what it runs: the weight is re-ordered once, by `pack`, and never again.

    Up to 64 rows, and where it adds to a buffer, our kernel reads the same bytes. Where it cannot,
    what is added is rounded once only if the product is not oneDNN's: there, out_acc unpacks. Where
    our kernel multiplies any number of rows, oneDNN has nothing to do.
    """
    linear_cpu(packer)
    path = os.pathsep.join([str(Path(nanoinfer.__file__).parents[1]), *sys.path])
    env = {**os.environ, "ONEDNN_VERBOSE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", MULTIPLY, packer]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ",exec,cpu," in line]
    if not lines:
        pytest.skip("this build of oneDNN does not tell what it runs")
    reorders = [line for line in lines if ",reorder," in line]
    if packer == "own":
        assert len(lines) == 1, "\n".join(lines)
        return
    for K, N in [(96, 272), (80, 273)]:
        is_ours = packer == "shared" and K % 32 == 0
        dims = (f",{N}x{K},", f",{K}x{N},")
        found = [line for line in reorders if any(d in line for d in dims)]
        plain, blocked = re.findall(r"(?:src|dst):([^ ,]+)", found[0])  # by pack
        assert blocked != plain
        assert len(found) == (1 if is_ours else 1 + len(COUNTS)), "\n".join(found)
        assert all(re.findall(r"(?:src|dst):([^ ,]+)", r) == [blocked, plain] for r in found[1:])
        for M in COUNTS:
            # Products of M rows with that weight: of forward and out.
            products = [line for line in lines if f",mb{M}ic{K}oc{N}," in line]
            assert len(products) == (0 if is_ours and M <= 64 else 2), "\n".join(lines)
            assert all(f"wei:{blocked} " in line for line in products)


# -- Blocks ---------------------------------------------------------------------------------------

MACHINES = ["native", *MULTIPLYING]
SIZES_OF_BLOCKS = [(5, 4), (64, 32), (100, 96), (128, 1056), (192, 36), (273, 64), (33, 2080)]
ROWS = [*range(1, 14), 63, 64, 65, 70, 511, 600]


def reference(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    out = torch.full((len(x), len(weight)), math.nan, dtype=x.dtype)
    linear_ref(x, weight, scales, bias, out)
    return out


def apart(x: Tensor) -> Tensor:
    """The same rows as a part of a wider matrix, which is NaN elsewhere."""
    wider = torch.full((len(x), x.size(1) + 13), math.nan, dtype=x.dtype)
    wider[:, 5:-8] = x
    return wider[:, 5:-8]


def packed_int8(N: int, K: int, machine: str, threads: int = 2) -> tuple[PackedWeight, tuple]:
    weight = random(N, K, seed=1) * 2.0 ** (torch.arange(N) % 7)[:, None]
    values, scales = quantize_rows_int8(weight)
    packed = linear_cpu(machine, threads).pack(values, scales)
    assert packed is not None
    return packed, (values, scales)


def packed_bf16(weight: Tensor, machine: str = "native", threads: int = 2) -> PackedWeight:
    packed = linear_cpu(machine, threads).pack(weight, None)
    assert packed is not None
    assert packed.blocks is not None
    return packed


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("N", "K"), SIZES_OF_BLOCKS)
def test_int8_blocks_give_the_references_bits(N, K, dtype, machine, poisoned):
    """Integers, and the same two factors in the same order. With a bias one rounding is less."""
    packed, weight = packed_int8(N, K, machine)
    bias = random(N, seed=2)
    for M in ROWS:
        x = (random(M, K, seed=M) * 2.0 ** (torch.arange(M) % 9)[:, None]).to(dtype)
        x[M // 2] = 0
        x[0, :2] = torch.tensor([127.5, -127.5])  # rounded, its range is 257 wide
        expected = reference(x, *weight, None)
        for rows in (x, apart(x), x.T.contiguous().T):
            assert torch.equal(packed.multiply(rows, None, False), expected)
        assert torch.equal(packed.multiply(x, None, True).to(dtype), expected)
        found, size = packed.multiply(x, bias, True), expected.abs().max() + 4
        exact = reference(x.float(), *weight, bias)
        torch.testing.assert_close(found, exact, rtol=0, atol=float(4 * FP32_UNIT * size))
        assert torch.equal(packed.multiply(x, bias, False), found.to(dtype))


@pytest.mark.parametrize("kind", ["int8", "int8-bf16", "int8-packed", "int8-bf16-packed"])
def test_nan_makes_its_row_nan_and_no_other(kind):
    linear, *_ = make(kind, 64, 33, bias=True)
    x = random(3, 64, dtype=KINDS[kind][0])
    before = linear(x)
    x[1, 7] = math.nan
    found = linear(x)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], before[::2])


@needs_packing
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("N", "K"), [s for s in SIZES_OF_BLOCKS if s[1] % 32 == 0])
def test_bf16_blocks_give_the_exact_sum_rounded_once(N, K, machine, poisoned):
    weight, bias = integers(N, K, dtype=BF16, seed=1), (integers(N, seed=2) / 4).to(BF16)
    packed = packed_bf16(weight, machine)
    for M in ROWS:
        x = integers(M, K, dtype=BF16, seed=M)
        for vector in (None, bias):
            exact = x.double() @ weight.double().T + (0 if vector is None else vector.double())
            for rows in (x, apart(x), x.T.contiguous().T):
                assert torch.equal(packed.multiply(rows, vector, False), exact.to(BF16))
            assert torch.equal(packed.multiply(x, vector, True), exact.float())


@needs_packing
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("is_int8", [False, True])
def test_bits_of_a_row_depend_on_neither_neighbours_nor_threads(is_int8, machine):
    N, K, many = 200, 1056, 200
    x, results = random(many, K, dtype=BF16), []
    for threads in (1, 2, 3):
        if is_int8:
            packed, _ = packed_int8(N, K, machine, threads)
        else:
            packed = packed_bf16(random(N, K, dtype=BF16, seed=1), machine, threads)
        results.append(packed.multiply(x, None, True))
        for M in (*range(1, 71), 191, 192):
            assert torch.equal(packed.multiply(x[many - M :], None, True), results[0][many - M :])
        few = packed.multiply(x[:64], None, False)
        assert torch.equal(few, results[0][:64].to(BF16))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_packing
def test_our_kernel_and_onednns_agree_where_they_meet():
    """64 rows are ours, 65 are oneDNN's: nearly all bits are the same, and no sum is far off."""
    weight, x = random(192, 1024, dtype=BF16, seed=1), random(65, 1024, dtype=BF16)
    packed = packed_bf16(weight, "shared")
    plain = linear_cpu("onednn").pack(weight, None)
    ours, theirs = packed.multiply(x[:64], None, False), packed.multiply(x, None, False)
    assert torch.equal(ours, packed.multiply(x, None, True)[:64].to(BF16))
    assert torch.equal(theirs, plain.multiply(x, None, False))
    assert (ours != theirs[:64]).double().mean() < 0.01
    torch.testing.assert_close(ours, theirs[:64], rtol=2**-7, atol=1e-4)
    whole_numbers = integers(65, 1024, dtype=BF16)
    few, many = (packed.multiply(whole_numbers[:M], None, False) for M in (64, 65))
    assert torch.equal(few, many[:64])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ALL)
def test_wide_is_the_sum_before_it_is_rounded(kind, bias):
    """Where the body hands it out; else it is y in fp32."""
    dtype = KINDS[kind][0]
    linear, weight, vector = make(kind, 64, 273, bias)
    for M in (1, 5, 64, 65, 70):
        x = integers(M, 64, dtype=dtype, seed=M)
        found = linear.wide(x)
        assert found.dtype == FP32
        assert found.shape == (M, 273)
        assert torch.equal(found.to(dtype), linear(x))
        if has_own_kernel(kind, 64) and KINDS[kind][1] is None:
            assert torch.equal(found.double(), x.double() @ weight.T + vector)
            assert not torch.equal(found, found.to(dtype).float())


@pytest.mark.parametrize("form", [None, torch.int8])
def test_rows_of_a_packed_weight_are_what_was_packed(form):
    weight, scales = random(273, 64, dtype=BF16), None
    if form is not None:
        weight, scales = quantize_rows_int8(weight)
    packed = linear_cpu("native").pack(weight, scales)
    assert torch.equal(packed.plain(), weight)
    assert packed.blocks.shape == (5, 64 * weight.itemsize // 4, 64, 4 // weight.itemsize)
    for ids in ([0], [272, 0, 63, 64, 64, 127, 128], []):
        rows = rows_of_blocks(packed.blocks, torch.tensor(ids, dtype=torch.int64))
        assert torch.equal(rows, weight[ids])


def exchanged(blocks: Tensor, order: list[int], dim: int) -> Tensor:
    return blocks.index_select(dim, torch.tensor(order))


@needs_packing
@pytest.mark.parametrize(
    "change",
    [
        lambda b: exchanged(b, [*range(len(b) - 1, -1, -1)], 0),  # blocks
        lambda b: exchanged(b, [i ^ 1 for i in range(b.size(1))], 1),  # steps
        lambda b: exchanged(b, [63 - i for i in range(64)], 2),  # rows in a block
        lambda b: exchanged(b, [0, *range(63, 0, -1)], 2),  # but for the first
        lambda b: exchanged(b, [i ^ (2 * (i & 1)) for i in range(64)], 2),  # every other one
        lambda b: exchanged(b, [1, 0], 3),  # values in a pair
        lambda b: b.view(-1, 2, *b.shape[1:2], 32, 2).transpose(1, 2),  # blocks of 32
    ],
)
@pytest.mark.parametrize("N", [256, 273, 1024])
def test_blocks_that_lie_in_another_order_are_not_used(N, change, monkeypatch):
    """oneDNN's order is its own matter: another release may choose another one."""
    frombuffer = torch.frombuffer

    def in_another_order(*arguments, **others):
        flat = frombuffer(*arguments, **others)
        return change(flat.view(-1, 32, 64, 2)).reshape(-1)

    weight, x = random(N, 64, dtype=BF16), integers(5, 64, dtype=BF16)
    pack = linear_cpu("shared").pack
    expected = pack(weight, None).multiply(x, None, False)
    monkeypatch.setattr(torch, "frombuffer", in_another_order)
    packed = pack(weight, None)
    assert packed.blocks is None
    torch.testing.assert_close(packed.multiply(x, None, False), expected, rtol=2**-7, atol=1e-4)
    assert torch.equal(packed.plain(), weight)


@needs_packing
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 64), r"x: got torch.float32 \(3, 64\), need torch.bfloat16 \[M, 64\]"),
        (torch.zeros(3, 64).half(), "x: got torch.float16"),
        (torch.zeros(3, 63).bfloat16(), r"x: got torch.bfloat16 \(3, 63\)"),
    ],
)
def test_bf16_kernel_refuses_what_it_would_misread(x, message):
    packed = packed_bf16(random(100, 64, dtype=BF16))
    for is_wide in (False, True):
        with pytest.raises(ValueError, match=message):
            packed.multiply(x, None, is_wide)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 64).half(), r"x: got torch.float16 \(3, 64\), need .*\[M, 64\]"),
        (torch.zeros(3, 64).double(), "x: got torch.float64"),
        (torch.zeros(3, 68), r"x: got torch.float32 \(3, 68\)"),
    ],
)
def test_int8_kernel_refuses_what_it_would_misread(x, message):
    packed, _ = packed_int8(100, 64, "native")
    for is_wide in (False, True):
        with pytest.raises(ValueError, match=message):
            packed.multiply(x, None, is_wide)


# -- The engine -----------------------------------------------------------------------------------


def model_of(llm: LLM):
    return llm.engine._pipeline.runner._model


def linears_of(llm: LLM) -> list[Linear]:
    return [module for module in model_of(llm).modules() if isinstance(module, Linear)]


@needs_packing
def test_engine_packs_every_linear_once(tiny_qwen3):
    linear_cpu("native")
    with LLM(tiny_qwen3, num_kv_blocks=4, dtype="bfloat16", device="cpu") as llm:
        linears = linears_of(llm)
        assert len(linears) == 2 * 4 + 1  # the head is one, too
        assert all(linear._packed.blocks is not None for linear in linears), "sizes of the model"
        assert sum(linear.weight.numel() for linear in linears) == 0
        assert model_of(llm).model.embed_tokens.weight.numel() == 273 * 64


@needs_packing
def test_tied_head_is_packed_once_and_the_embedding_reads_its_blocks(tiny):
    linear_cpu("native")
    folder = tiny("tiny-qwen3-tied")
    how = {"num_kv_blocks": 4, "dtype": "bfloat16", "device": "cpu"}
    with LLM(folder, **how) as llm, LLM(folder, kernels="ref", **how) as plain:
        model, weight = model_of(llm), model_of(plain).model.embed_tokens.weight
        head, embedding = model.lm_head, model.model.embed_tokens
        assert all(linear._packed.blocks is not None for linear in linears_of(llm))
        assert head._packed.blocks.data_ptr() == embedding._blocks.data_ptr()
        for layer in (head, embedding):
            assert layer.weight.numel() == 0
            assert layer.weight.untyped_storage().nbytes() == 0
        assert embedding.weight.dtype == BF16
        assert weight.shape == (273, 64)
        assert torch.equal(embedding(torch.arange(273)), weight)
        ids = torch.tensor([272, 5, 5, 0, 64, 63])
        assert torch.equal(embedding(ids), weight[ids])
        assert embedding(ids[:0]).shape == (0, 64)
        hidden = integers(3, 64, dtype=BF16)
        logits = model.logits(hidden)
        exact = (hidden.double() @ weight.double().T).float()
        torch.testing.assert_close(logits, exact, rtol=1e-5, atol=1e-5)
        assert not torch.equal(logits, logits.to(BF16).float()), "never rounded on the way"


@needs_packing
@pytest.mark.parametrize("kernels", ["ref", "auto"])
def test_tied_head_stays_the_embeddings_matrix_where_no_blocks_are_known(
    tiny, kernels, monkeypatch
):
    """To pack it would keep it twice. The others are packed, by oneDNN alone."""

    def no_compiler():
        raise KernelBuildError("no compiler")

    monkeypatch.setattr("nanoinfer.kernels.load_library", no_compiler)
    how = {"num_kv_blocks": 4, "dtype": "bfloat16", "device": "cpu"}
    with LLM(tiny("tiny-qwen3-tied"), kernels=kernels, **how) as llm:
        head, embedding = model_of(llm).lm_head, model_of(llm).model.embed_tokens
        plain = linears_of(llm) if kernels == "ref" else [head]
        assert [linear for linear in linears_of(llm) if linear._packed is None] == plain
        assert head.weight.data_ptr() == embedding.weight.data_ptr()
        assert head.weight.shape == embedding.weight.shape == (273, 64)


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [list(b"Blue sky"), list(b"A green tree stands"), list(range(70)), [5]]


def generate(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen2"])
def test_int8_generates_the_same_with_reference_and_kernels(tiny, name):
    """qwen2 has biases."""
    linear_cpu("native")
    how = {"num_kv_blocks": 64, "dtype": "float32", "device": "cpu", "quantization": "int8"}
    with LLM(tiny(name), **how) as llm, LLM(tiny(name), kernels="ref", **how) as ref:
        assert all(linear._packed.blocks.dtype == torch.int8 for linear in linears_of(llm))
        assert all(linear._packed is None for linear in linears_of(ref))
        assert all(linear.weight.dtype == torch.int8 for linear in linears_of(ref))
        for engine in (llm, ref):  # a tied head is a matrix of its own, the embedding stays
            assert model_of(engine).model.embed_tokens.weight.shape == (273, 64)
            assert model_of(engine).model.embed_tokens.weight.dtype == FP32
        assert generate(llm) == generate(ref)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-tied"])
def test_int8_is_near_what_it_was_made_from(tiny, name, dtype):
    """The whole model's logits, off by a few steps of 1/127: every scale is in its place."""
    how = {"num_kv_blocks": 64, "dtype": dtype, "device": "cpu"}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    found = []
    for quantization in (None, "int8"):
        with LLM(tiny(name), quantization=quantization, **how) as llm:
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[2]}, params, use_tqdm=False)
        rows = [[row[i].logprob for i in range(273)] for row in output.prompt_logprobs[1:]]
        found.append(torch.tensor(rows).double())
    exact, other = found
    kl = (exact.exp() * (exact - other)).sum(-1).mean()
    assert 0 < kl < 0.1


# -- Embedding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_embedding_is_the_rows_of_its_weight(dtype):
    embedding = Embedding(11, 16, dtype=dtype, device=CPU)
    embedding.weight.data.fill_(math.nan)
    weight = random(11, 16)
    embedding.load("weight", "", weight)
    ids = torch.tensor([0, 10, 3, 3])
    assert torch.equal(embedding(ids), weight[ids].to(dtype))
    assert embedding(ids[:0]).shape == (0, 16)
    assert not embedding.weight.requires_grad
    for shape in [(10, 16), (1, 16), (11, 1), (16,)]:
        with pytest.raises(ValueError, match="need float"):
            embedding.load("weight", "", torch.ones(shape))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_head_reads_the_embedding_the_other_way_round(dtype):
    embedding = Embedding(273, 16, dtype=dtype, device=CPU)
    weight = integers(273, 16)
    embedding.load("weight", "", weight)
    head = Linear(16, 273, dtype=dtype, device=CPU)
    head.weight = embedding.weight
    hidden = integers(4, 16, dtype=dtype)
    assert torch.equal(head(hidden), (hidden.double() @ weight.double().T).to(dtype))
    assert has_aligned_rows(head(hidden))


def test_fp8_blocks_at_the_edge_hold_what_is_there():
    """Neither padding nor a neighbour decides the scale of a block that is cut off."""
    weight = torch.zeros(129, 130)
    weight[128, 129], weight[0, 0] = 3.0, 448.0
    values, scales = quantize_blocks_fp8(weight)
    assert values.shape == (129, 130)
    expected = torch.tensor([[448.0, 1e-4], [1e-4, 3.0]]) / 448
    torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
    assert values[0, 0].item() == values[128, 129].item() == 448
    assert values.float().count_nonzero() == 2
