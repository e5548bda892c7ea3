"""Paged attention and the store of keys and values on a GPU: the Triton twins.

In, out and what must hold: paged_attention.py and store_kv.py say it.

One kernel serves prompts, chunks and decoding. A program takes a tile of rows of one kv head, a row
being a (token, query head) pair, so that a key is read once for all query heads that share it. The
grid is known from shapes alone (a CUDA graph replays it for any lengths): for T tokens of S
sequences there are at most T // tokens-in-a-tile + S tiles, and a program finds its sequence by
bisection:

    tile 0 1 2 3 4        sequence of 5 tokens, tiles of 2: tiles 0 1 2; the next one begins at
    seq  0 0 0 1 1        5 // 2 + 1 = 3; a tile that is behind its sequence's last row has no work

With one token a sequence (decoding) there are few tiles, so each sequence's keys are split over
`NUM_SPLITS` programs, whose results are joined by their sums of exponentials.

Triton may not be installed, and this file is imported only on a machine with a GPU (or to test).
Source: FlashAttention-2, FlashDecoding, vLLM's unified Triton attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.quantized_kv import KVScales, piece_of
from nanoinfer.kernels.triton_norm_rope import hadamard

_TILE = 64  # rows of a tile, with many tokens
_DECODE_TILE = 16  # the least that a tensor core multiplies
_KEYS = 64
_MAX_SPLITS = 16
_MANY_PROGRAMS = 256  # fill a GPU: more splits only cost their join


@triton.jit
def _store(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, SIZE: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    i = tl.arange(0, PADDED)
    is_in = i < SIZE
    tl.store(k_cache + slot * SIZE + i, tl.load(k + token * k_stride + i, is_in), is_in)
    tl.store(v_cache + slot * SIZE + i, tl.load(v + token * v_stride + i, is_in), is_in)


def store_kv_triton(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    size = k.shape[1] * k.shape[2]
    if len(k) > 0:
        strides = (k.stride(0), v.stride(0))
        padded = triton.next_power_of_2(size)
        _store[(len(k),)](k, v, k_cache, v_cache, slot_mapping, *strides, size, padded)


@triton.jit
def find_group(bounds, tile, count, SIZE: tl.constexpr):
    """The group (sequence, expert) whose tiles of SIZE tile `tile` is among, by bisection."""
    low, high = 0, count
    while low < high:  # the first group that begins behind this tile
        middle = (low + high) // 2
        is_at_or_before = tl.load(bounds + middle) // SIZE + middle <= tile
        low = tl.where(is_at_or_before, middle + 1, low)
        high = tl.where(is_at_or_before, high, middle)
    return low - 1


@triton.jit
def _meet(
    queries, k, v, k_scales, v_scales, position, key, d, head, is_key, is_dim, scale,
    top, total, acc, D: tl.constexpr, IS_8BIT: tl.constexpr,
):  # fmt: skip
    """One tile of keys: the online softmax of FlashAttention. In 8 bits, scales meet scores."""
    slot = head.to(tl.int64) * D
    is_dk, is_kd = is_dim[:, None] & is_key[None, :], is_key[:, None] & is_dim[None, :]
    keys = tl.load(k + slot[None, :] + d[:, None], is_dk, 0.0).to(queries.dtype)
    scores = tl.dot(queries, keys, input_precision="ieee") * (scale * 1.44269504)  # log2
    if IS_8BIT:
        scores *= tl.load(k_scales + head, is_key, 0.0)[None, :]
    sees = is_key[None, :] & (key[None, :] <= position[:, None])
    scores = tl.where(sees, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    decay = tl.math.exp2(top - new_top)
    p = tl.math.exp2(scores - new_top[:, None])
    total = total * decay + tl.sum(p, 1)
    IS_FP16: tl.constexpr = queries.dtype == tl.float16  # p times a scale would be too small for it
    if IS_8BIT and not IS_FP16:
        p *= tl.load(v_scales + head, is_key, 0.0)[None, :]
    values = tl.load(v + slot[:, None] + d[None, :], is_kd, 0.0)
    if IS_8BIT and IS_FP16:
        values = values.to(tl.float32) * tl.load(v_scales + head, is_key, 0.0)[:, None]
    values = values.to(queries.dtype)
    acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _attend(
    q, k_cache, v_cache, k_scales, v_scales, out, sums, tables, seq_lens, bounds,
    scale, S, q_stride, table_stride, split_stride, sums_stride,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr, IS_8BIT: tl.constexpr,
):  # fmt: skip
    G: tl.constexpr = H // KV
    TOKENS: tl.constexpr = ROWS // G  # of a tile
    tile, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = find_group(bounds, tile, S, TOKENS)
    begin, seq_len = tl.load(bounds + s), tl.load(seq_lens + s)
    q_len = tl.load(bounds + s + 1) - begin
    first = (tile - (begin // TOKENS + s)) * TOKENS
    if (first < q_len) & (seq_len > 0):
        row, d = tl.arange(0, ROWS), tl.arange(0, DP)
        token, head = first + row // G, kv * G + row % G
        is_row, is_dim = (row < TOKENS * G) & (token < q_len), d < D
        place = (begin + token).to(tl.int64)
        mask = is_row[:, None] & is_dim[None, :]
        queries = tl.load(q + place[:, None] * q_stride + head[:, None] * D + d[None, :], mask, 0.0)
        position = seq_len - q_len + token
        end = seq_len - q_len + tl.minimum(first + TOKENS, q_len)  # no row of the tile sees beyond
        size = tl.cdiv(tl.cdiv(end, NUM_SPLITS), KEYS) * KEYS  # of a split
        top = tl.full([ROWS], -1e30, tl.float32)  # finite, for -inf - -inf is NaN
        total, acc = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DP], tl.float32)
        for start in range(split * size, tl.minimum((split + 1) * size, end), KEYS):
            key = start + tl.arange(0, KEYS)
            page = tl.load(tables + s.to(tl.int64) * table_stride + key // PAGE, key < end, 0)
            place_of_head = (page * PAGE + key % PAGE) * KV + kv  # fits 32 bits, bytes do not
            top, total, acc = _meet(
                queries, k_cache, v_cache, k_scales, v_scales, position, key, d, place_of_head,
                key < end, is_dim, scale, top, total, acc, D, IS_8BIT,
            )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = out + split * split_stride + (place[:, None] * H + head[:, None]) * D + d[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask)
        if NUM_SPLITS > 1:  # log2 of the sum of exponentials
            found = top + tl.math.log2(tl.where(total == 0.0, 1.0, total))
            tl.store(sums + split * sums_stride + place * H + head, found, is_row)


@triton.jit
def _turn_back(x, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    d = tl.arange(0, DP)
    to = x + tl.program_id(0).to(tl.int64) * D + d
    turned = hadamard(tl.load(to, d < D, 0.0).to(tl.float32), DP, SIZE, STAGES)
    tl.store(to, turned.to(x.dtype.element_ty), d < D)


@triton.jit
def _join(
    parts, sums, out, seq_lens, split_stride, sums_stride,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """One row of each sequence: the parts, each worth 2^(its sum - the largest)."""
    s, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(seq_lens + s) > 0:
        split, d = tl.arange(0, NUM_SPLITS), tl.arange(0, DP)
        row = s * H + head
        found = tl.load(sums + split * sums_stride + row)
        worth = tl.math.exp2(found - tl.max(found, 0))
        is_dim = (d < D)[None, :]
        values = tl.load(parts + split[:, None] * split_stride + row * D + d[None, :], is_dim, 0.0)
        joined = tl.sum(values * worth[:, None], 0) / tl.sum(worth, 0)
        tl.store(out + row * D + d, joined.to(out.dtype.element_ty), d < D)


def paged_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    scales: KVScales | None = None,
) -> Tensor:
    """Everything that the grid depends on is a shape."""
    (T, H, D), (_, page, KV, _), S = q.shape, k_cache.shape, len(seq_lens)
    out = torch.zeros((T, H, D), dtype=q.dtype, device=q.device)  # rows that nobody owns stay 0
    if S == 0 or T == 0:
        return out
    group, padded = H // KV, triton.next_power_of_2(D)
    is_decoding = T == S
    is_small = is_decoding or q.dtype == torch.float32  # which takes the room of two
    rows = max(_DECODE_TILE if is_small else _TILE, triton.next_power_of_2(group))
    splits = _num_splits(S * KV) if is_decoding else 1
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((splits, T, H, D), dtype=torch.float32, device=q.device)
        sums = torch.empty((splits, T, H), dtype=torch.float32, device=q.device)
    strides = (q.stride(0), block_tables.stride(0), T * H * D, T * H)
    k_scales, v_scales, is_rotated = scales or (out, out, False)
    _attend[(T // (rows // group) + S, KV, splits)](
        q, k_cache, v_cache, k_scales, v_scales, parts, sums, block_tables, seq_lens, cu_seqlens_q,
        scale, S, *strides, H=H, KV=KV, D=D, DP=padded, PAGE=page, ROWS=rows, NUM_SPLITS=splits,
        IS_8BIT=scales is not None, **_launch_options(rows, padded, q.dtype, scales is not None),
    )  # fmt: skip
    if splits > 1:
        sizes = {"H": H, "D": D, "DP": padded, "NUM_SPLITS": splits}
        _join[(T, H)](parts, sums, out, seq_lens, T * H * D, T * H, **sizes)
    if is_rotated:
        size = piece_of(D)
        _turn_back[(T * H,)](out, D, padded, size, size.bit_length() - 1, num_warps=1)
    return out


def _launch_options(rows: int, padded: int, dtype: torch.dtype, is_8bit: bool) -> dict[str, int]:
    """What keeps all of it in registers (scripts/compile_kernels.py counts what is spilled)."""
    if dtype == torch.float32:
        return {"KEYS": 16, "num_warps": 4, "num_stages": 1}
    is_decoding = rows == _DECODE_TILE
    is_small = padded < 128 or (padded > 128 and is_decoding)
    if is_8bit:
        is_small = padded < 128 and is_decoding
    keys = _KEYS if padded == 128 else _KEYS // 2
    return {"KEYS": keys, "num_warps": 4 if is_small else 8, "num_stages": 2}


def _num_splits(num_programs: int) -> int:
    """A power of two that brings the grid near _MANY_PROGRAMS; of shapes only, as graphs need."""
    wanted = max(1, _MANY_PROGRAMS // num_programs)
    return min(_MAX_SPLITS, triton.next_power_of_2(wanted))
