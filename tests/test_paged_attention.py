"""Paged attention and the store of keys and values, against one softmax a token in fp64."""

import functools

import pytest
import torch
from conftest import MULTIPLYING, kernel_library

from nanoinfer.kernels.build import num_threads
from nanoinfer.kernels.paged_attention import make_paged_attention_cpu, paged_attention_ref
from nanoinfer.kernels.store_kv import store_kv_ref


@functools.cache
def cpu_kernel(threads=None, machine="native"):
    library = kernel_library(machine)
    return make_paged_attention_cpu(library, threads or num_threads(library))


@pytest.fixture(params=["ref", "native", *MULTIPLYING])
def attention(request):
    return paged_attention_ref if request.param == "ref" else cpu_kernel(machine=request.param)


@pytest.fixture(params=["native", *MULTIPLYING])
def machine(request):
    kernel_library(request.param)
    return request.param


def make_case(
    chunks, heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.float32, pad=0, seed=0
):
    """Random inputs for [(q_len, seq_len)]; every slot that no sequence owns is NaN."""
    torch.manual_seed(seed)
    q_lens, seq_lens = zip(*chunks, strict=True) if chunks else ((), ())
    blocks = [-(-seq_len // block_size) for seq_len in seq_lens]
    free = iter((1 + torch.randperm(sum(blocks))).tolist())
    tables = torch.zeros(len(chunks), max(blocks, default=0) + 1, dtype=torch.int32)
    shape = (sum(blocks) + 1, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for i, seq_len in enumerate(seq_lens):
        for j in range(blocks[i]):
            tables[i, j] = block = next(free)
            used = min(block_size, seq_len - j * block_size)
            k_cache[block, :used] = torch.randn(used, kv_heads, head_dim)
            v_cache[block, :used] = torch.randn(used, kv_heads, head_dim)
    fused = torch.randn(sum(q_lens) + pad, (heads + 2 * kv_heads) * head_dim).to(dtype)
    q = fused[:, : heads * head_dim].unflatten(1, (heads, head_dim))  # a view with strided rows
    bounds = torch.tensor([0, *q_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return [q, k_cache.to(dtype), v_cache.to(dtype), tables, lens, bounds, head_dim**-0.5]


def naive_attention(q, k_cache, v_cache, tables, seq_lens, bounds, scale):
    """One token, one head, one softmax at a time, in fp64."""
    q, k_cache, v_cache = q.double(), k_cache.double(), v_cache.double()
    group = q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[i : i + 2].tolist()
        if seq_len == 0:
            continue
        k_all = k_cache[tables[i].long()].flatten(0, 1)
        v_all = v_cache[tables[i].long()].flatten(0, 1)
        for t in range(start, end):
            seen = seq_len - (end - start) + (t - start) + 1
            for h in range(q.shape[1]):
                k, v = k_all[:seen, h // group], v_all[:seen, h // group]
                out[t, h] = torch.softmax(k @ q[t, h] * scale, 0) @ v
    return out


def assert_close(attention, case):
    expected = naive_attention(*case)
    got = attention(*case)
    assert got.dtype == case[0].dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, atol=3e-6, rtol=3e-6)


MIXED = [(1, 40), (5, 5), (7, 33), (1, 1), (0, 20), (70, 90)]


@pytest.mark.parametrize("head_dim", [32, 64, 128, 80, 20])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (6, 2), (8, 1)])
def test_heads_and_head_dims(attention, heads, kv_heads, head_dim):
    assert_close(attention, make_case(MIXED, heads, kv_heads, head_dim))


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("head_dim", [32, 20])
def test_block_sizes(attention, block_size, head_dim):
    assert_close(attention, make_case(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("head_dim", [1, 7, 256, 272])
def test_unusual_head_dims(attention, head_dim):
    assert_close(attention, make_case([(1, 3), (9, 12)], head_dim=head_dim))


@pytest.mark.parametrize("q_len", range(1, 18))
def test_every_small_number_of_queries(attention, q_len):
    for heads in (1, 3):
        assert_close(attention, make_case([(q_len, q_len + 61)], heads, 1, block_size=4))


@pytest.mark.parametrize("start", [0, 1, 15, 16, 63, 64, 65, 100])
def test_chunk_anywhere_in_a_sequence(attention, start):
    assert_close(attention, make_case([(40, start + 40)]))


@pytest.mark.parametrize("seq_len", [255, 256, 257, 512, 2100])
def test_long_decode(attention, seq_len):
    assert_close(attention, make_case([(1, seq_len), (3, seq_len), (1, 9)]))


def test_several_queries_on_either_side_of_a_split_of_the_keys(attention):
    # A split may hold no key that the first of these rows can see.
    for seq_len in range(256, 264):
        assert_close(attention, make_case([(6, seq_len)], 2, 1))


def test_big_chunk(attention):
    assert_close(attention, make_case([(300, 500)], block_size=3, head_dim=64))


def test_a_row_whose_scores_are_huge(attention):
    case = make_case(MIXED)
    case[0] = case[0] * 300
    expected, got = naive_attention(*case), attention(*case)
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=1e-3)


def test_nothing_to_do(attention):
    for chunks in ([], [(0, 0)], [(0, 5)]):
        assert attention(*make_case(chunks)).shape == (0, 4, 32)


def test_padding_rows_are_zero(attention):
    chunks = [(3, 8), (1, 0), (2, 0), (1, 4)]
    out = attention(*make_case(chunks, pad=5))
    assert out[3:6].eq(0).all()
    assert out[7:].eq(0).all()
    assert out[[0, 1, 2, 6]].ne(0).all()
    assert attention(*make_case([], pad=2)).eq(0).all()
    assert_close(attention, make_case(chunks, pad=5))


def test_contiguous_and_strided_queries_agree(attention):
    case = make_case(MIXED)
    assert not case[0].is_contiguous()
    assert attention(*case).equal(attention(case[0].contiguous(), *case[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 20])
def test_same_bits_alone_and_in_a_batch(machine, dtype, head_dim):
    attention = cpu_kernel(2, machine)
    case = make_case([(1, 700), *MIXED, (1, 300)], head_dim=head_dim, dtype=dtype)
    q, k_cache, v_cache, tables, seq_lens, bounds, scale = case
    together = attention(*case)
    assert cpu_kernel(1, machine)(*case).equal(together)
    for i in range(len(seq_lens)):
        start, end = bounds[i : i + 2].tolist()
        one = torch.tensor([0, end - start], dtype=torch.int32)
        alone = attention(
            q[start:end], k_cache, v_cache, tables[i : i + 1], seq_lens[i : i + 1], one, scale
        )
        assert alone.equal(together[start:end]), f"sequence {i}"


@pytest.mark.parametrize("head_dim", [128, 80, 20])
@pytest.mark.parametrize("chunks", [MIXED, [(1, 2100)], [(150, 200)]])
def test_bf16_error_is_at_most_twice_the_reference_error(machine, chunks, head_dim):
    case = make_case(chunks, head_dim=head_dim, dtype=torch.bfloat16)
    expected = naive_attention(*case)
    error = (cpu_kernel(machine=machine)(*case).double() - expected).abs()
    error_ref = (paged_attention_ref(*case).double() - expected).abs()
    assert error.max() <= 2 * error_ref.max() + 1e-4
    assert error.mean() <= 2 * error_ref.mean() + 1e-5


def test_rounding_to_bf16_is_to_nearest_even_and_keeps_nan(machine):
    attention = cpu_kernel(machine=machine)
    # One key: the output is its value, rounded to bf16 exactly once.
    q, k_cache, v_cache, *rest = make_case([(1, 1)], 1, 1, dtype=torch.bfloat16)
    page = rest[0][0, 0].item()
    v_cache[page, 0, 0, 5] = torch.nan
    v_cache[page, 0, 0, 6] = torch.inf
    out = attention(q, k_cache, v_cache, *rest)
    torch.testing.assert_close(out[0, 0], v_cache[page, 0, 0], equal_nan=True, atol=0, rtol=0)
    # Two equally likely keys: the mean of two neighbours is a tie, which goes to the even one.
    q, k_cache, v_cache, *rest = make_case([(1, 2)], 1, 1, dtype=torch.bfloat16)
    page = rest[0][0, 0].item()
    k_cache[page, 1] = k_cache[page, 0]
    for low, high, even in ((1.0, 1.0 + 2**-7, 1.0), (1.0 + 2**-7, 1.0 + 2**-6, 1.0 + 2**-6)):
        v_cache[page, 0], v_cache[page, 1] = low, high
        assert attention(q, k_cache, v_cache, *rest).eq(even).all()


def test_nan_in_a_query_reaches_its_own_row_only(attention):
    case = make_case([(20, 30)])
    clean = attention(*case)
    case[0] = case[0].clone()
    case[0][7, 1] = torch.nan
    out = attention(*case)
    assert out[7, 1].isnan().all()
    out[7, 1] = clean[7, 1]
    assert out.equal(clean)


@pytest.mark.parametrize(
    ("index", "change", "name"),
    [
        (0, lambda q: q.flatten(1), "q, k_cache: got"),
        (0, lambda q: q[:, :, :16], "q, k_cache: got"),
        (0, lambda q: q[:, :3], "num_heads: got 3, need a multiple of 2"),
        (0, lambda q: q.bfloat16(), "for heads of torch.bfloat16"),
        (2, lambda v: v[:-1], "v_cache: got"),
        (3, lambda tables: tables[0], "block_tables"),
        (4, lambda lens: lens[:-1], "seq_lens"),
        (5, lambda bounds: bounds[:-1], "cu_seqlens_q"),
    ],
)
def test_refusals_by_name(attention, index, change, name):
    case = make_case(MIXED)
    case[index] = change(case[index])
    with pytest.raises(ValueError, match=name):
        attention(*case)


@pytest.mark.parametrize(
    ("index", "change", "name"),
    [
        (0, lambda q: q.mT.contiguous().mT, "q: got strides"),
        (1, lambda k: k.mT.contiguous().mT, "cache or scales: got strided"),
        (3, lambda tables: tables.long(), "block_tables, .* torch.int64"),
        (3, lambda tables: tables + 99, "sequence 0: .*blocks"),
        (3, lambda tables: tables - 99, "sequence 0: .*blocks"),
        (3, lambda tables: tables[:, :2].contiguous(), "sequence 0: got seq_len 40"),
        (4, lambda lens: lens - 3, "sequence 1: got seq_len 2"),
        (5, lambda bounds: bounds + 2, "sequence 0: got"),
        (5, lambda bounds: bounds.flip(0).contiguous(), "sequence 0: got"),
    ],
)
def test_refusals_by_the_kernel(index, change, name):
    case = make_case(MIXED)
    case[index] = change(case[index])
    with pytest.raises(ValueError, match=name):
        cpu_kernel()(*case)


def test_refusal_of_half_precision():
    with pytest.raises(ValueError, match=r"torch.float16, need bfloat16 or float32"):
        cpu_kernel()(*make_case(MIXED, dtype=torch.float16))


def test_store_kv_writes_its_slots_and_no_others():
    torch.manual_seed(0)
    num_blocks, block_size, kv_heads, head_dim = 5, 4, 2, 8
    qkv = torch.randn(6, 4 * kv_heads * head_dim)
    k = qkv[:, 2 * kv_heads * head_dim :][:, : kv_heads * head_dim].unflatten(1, (kv_heads, -1))
    v = qkv[:, 3 * kv_heads * head_dim :].unflatten(1, (kv_heads, -1))
    k_cache = torch.zeros(num_blocks, block_size, kv_heads, head_dim)
    v_cache = torch.zeros_like(k_cache)
    slots = torch.tensor([19, 4, 5, 10, 0, 0])  # the last two rows are padding
    store_kv_ref(k, v, k_cache, v_cache, slots)
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for row, slot in zip(rows[:4], slots[:4].tolist(), strict=True):
            assert cache[slot // block_size, slot % block_size].equal(row)
        written = cache.flatten(0, 1).ne(0).flatten(1).any(1).nonzero().flatten()
        assert written.tolist() == [0, 4, 5, 10, 19]


def test_store_kv_of_no_rows_and_refusals():
    cache, empty = torch.ones(3, 4, 2, 8), torch.zeros(0, 2, 8)
    store_kv_ref(empty, empty, cache, cache, torch.zeros(0, dtype=torch.int64))
    assert cache.eq(1).all()
    rows, slots = torch.zeros(2, 2, 8), torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"slot_mapping: got torch\.int32"):
        store_kv_ref(rows, rows, cache, cache, slots.int())
    with pytest.raises(ValueError, match="k: got"):
        store_kv_ref(rows.flatten(1), rows, cache, cache, slots)
    with pytest.raises(ValueError, match=r"v: got .*bfloat16"):
        store_kv_ref(rows, rows.bfloat16(), cache, cache, slots)


def test_stored_keys_are_what_attention_reads(attention):
    torch.manual_seed(0)
    k, v, q = torch.randn(10, 2, 32), torch.randn(10, 2, 32), torch.randn(10, 4, 32)
    k_cache, v_cache = torch.zeros(2, 4, 4, 2, 32)
    tables = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    slots = (tables[0].long()[:, None] * 4 + torch.arange(4)).flatten()[:10]
    for start, end in ((0, 7), (7, 10)):
        store_kv_ref(k[start:end], v[start:end], k_cache, v_cache, slots[start:end])
        case = [q[start:end], k_cache, v_cache, tables]
        lens = [torch.tensor([end]).int(), torch.tensor([0, end - start]).int(), 0.2]
        assert_close(attention, [*case, *lens])
