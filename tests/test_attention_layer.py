"""nanoinfer/layers/attention.py against transformers' modules, on whole sequences without a cache.

Each step is a part of a plan; whatever the plan, a token gets the row that it gets in one piece.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from nanoinfer.batch import Batch
from nanoinfer.graphs import worst_batch
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.norm_rope_store import HeadNorms, norm_rope_ref, norm_rope_store_ref
from nanoinfer.kernels.rms_norm import rms_norm_ref
from nanoinfer.kernels.rotary import Rope, rotary_ref
from nanoinfer.kernels.store_kv import store_kv_ref
from nanoinfer.layers.attention import Attention, KVCache
from nanoinfer.layers.rotary_embedding import get_rope
from nanoinfer.model_config import RopeConfig

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
H, KV, D = 4, 2, 16
EPS = 1e-6
BLOCK = 4
LENGTHS = [9, 5, 6]
TABLES = [[7, 2, 5], [1, 8, 0], [6, 3, 0]]  # the third entry of the short ones is padding
NUM_BLOCKS = 9

# Steps of (sequence, first token, one past the last); each token is in exactly one.
PLANS: dict[str, list[list[tuple[int, int, int]]]] = {
    "prompts": [[(0, 0, 9), (1, 0, 5), (2, 0, 6)]],
    "chunks": [[(0, 0, 3), (1, 0, 2)], [(0, 3, 8), (2, 0, 5)], [(0, 8, 9), (1, 2, 5), (2, 5, 6)]],
    "decoding": [[(s, t, t + 1) for s in range(3) if t < LENGTHS[s]] for t in range(9)],
    "mixed": [[(1, 0, 4)], [(1, 4, 5), (0, 0, 6)], [(0, 6, 7), (2, 0, 6)], [(0, 7, 9)]],
}


class Family(NamedTuple):
    """What transformers does with q and k before it attends."""

    rope: RopeConfig
    angles: nn.Module
    turn: Callable[..., tuple[Tensor, Tensor]]
    norms: nn.ModuleList  # of q and k; empty where the model has none
    is_one_plus: bool = False

    def head_norms(self, dtype: torch.dtype) -> HeadNorms | None:
        if not self.norms:
            return None
        if self.is_one_plus:  # in fp32 beside bf16 rows, as the loader leaves it
            return HeadNorms(*(1 + norm.weight.float() for norm in self.norms), eps=EPS)
        return HeadNorms(*(norm.weight.to(dtype) for norm in self.norms), eps=EPS)


def make_norms(kind: type[nn.Module], mean: float) -> nn.ModuleList:
    norms = nn.ModuleList(kind(D, EPS) for _ in range(2)).requires_grad_(False)
    for norm in norms:  # numbers that bf16 holds: both dtypes have the same model
        norm.weight.copy_((mean + 0.3 * torch.randn(D)).bfloat16())
    return norms


def make_family(name: str) -> Family:
    if name == "qwen3.5":  # half of a head is turned, by three axes
        hf = Qwen3_5TextConfig(head_dim=D)
        hf.rope_parameters |= {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
        hf.rope_parameters["mrope_interleaved"] = True
        hf.rope_parameters["rope_theta"] = 10.0  # else positions as small as these turn too little
        angles = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(hf)
        norms = make_norms(modeling_qwen3_5.Qwen3_5RMSNorm, 0.0)
        turn = modeling_qwen3_5.apply_rotary_pos_emb
        return Family(RopeConfig.from_hf(hf, D), angles, turn, norms, is_one_plus=True)
    hf = LlamaConfig(head_dim=D, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    norms = make_norms(Qwen3RMSNorm, 1.0) if name == "qwen3" else nn.ModuleList()
    angles = modeling_llama.LlamaRotaryEmbedding(hf)
    return Family(RopeConfig.from_hf(hf, D), angles, modeling_llama.apply_rotary_pos_emb, norms)


def turned(family: Family, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Normed and turned by transformers' modules, in q's dtype: [1, heads, L, D] each."""
    if family.norms:
        q, k = (norm.to(x.dtype)(x) for norm, x in zip(family.norms, (q, k), strict=True))
    cos_sin = family.angles(q, positions.unsqueeze(-2))
    return family.turn(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *cos_sin)


def dense(family: Family, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """[L, H * D] of one whole sequence."""
    q, k = turned(family, q, k, positions)
    v = v.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(-2)


def split_heads(fused: Tensor) -> list[Tensor]:
    """q, k, v as views of the projection's rows."""
    return [x.unflatten(-1, (-1, D)) for x in fused.split((H * D, KV * D, KV * D), dim=-1)]


class Case:
    """Three sequences, their cache, and the layer."""

    def __init__(self, name: str, dtype: torch.dtype, kernels: Kernels) -> None:
        torch.manual_seed(0)
        self.family = make_family(name)
        self.fused = [torch.randn(L, (H + 2 * KV) * D).to(dtype) for L in LENGTHS]
        self.positions = [torch.arange(L) for L in LENGTHS]
        if self.family.rope.mrope_section is not None:  # two of text, then rows of three patches
            cells = [torch.arange(L - 2) for L in LENGTHS]
            grids = [torch.stack((i * 0, i // 3, i % 3)) + 2 for i in cells]
            text = torch.arange(2).expand(3, -1)
            self.positions = [torch.cat((text, grid), dim=-1) for grid in grids]
        shape = (NUM_BLOCKS, BLOCK, KV, D)
        self.cache = KVCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
        self.tables = torch.tensor(TABLES, dtype=torch.int32)
        norms, rope = self.family.head_norms(dtype), get_rope(self.family.rope, 16, CPU)
        self.attention = Attention(D, rope, norms, kernels)

    def slots(self, seq: int, start: int = 0, stop: int | None = None) -> Tensor:
        where = torch.arange(start, LENGTHS[seq] if stop is None else stop)
        return self.tables[seq, where // BLOCK].long() * BLOCK + where % BLOCK

    def batch(self, step: list[tuple[int, int, int]]) -> Batch:
        q_lens = torch.tensor([0, *(stop - start for _, start, stop in step)])
        return dataclasses.replace(
            worst_batch(1, 1, BLOCK, CPU),
            positions=torch.cat([self.positions[s][..., a:b] for s, a, b in step], dim=-1),
            slot_mapping=torch.cat([self.slots(*entry) for entry in step]),
            cu_seqlens_q=q_lens.cumsum(0).int(),
            seq_lens=torch.tensor([stop for _, _, stop in step], dtype=torch.int32),
            block_tables=self.tables[[s for s, _, _ in step]],
        )

    def step(self, step: list[tuple[int, int, int]]) -> Tensor:
        q, k, v = split_heads(torch.cat([self.fused[s][a:b] for s, a, b in step]))
        return self.attention(q, k, v, self.cache, self.batch(step))

    def run(self, plan: list[list[tuple[int, int, int]]]) -> list[Tensor]:
        """Each sequence's rows, in the order of its tokens."""
        rows: list[list[Tensor]] = [[] for _ in LENGTHS]
        for step in plan:
            parts = self.step(step).split([stop - start for _, start, stop in step])
            for (seq, _, _), part in zip(step, parts, strict=True):
                rows[seq].append(part)
        return [torch.cat(parts) for parts in rows]

    def dense(self, dtype: torch.dtype) -> list[Tensor]:
        return [
            dense(self.family, *split_heads(fused.to(dtype)), positions)
            for fused, positions in zip(self.fused, self.positions, strict=True)
        ]


@pytest.fixture(params=["ref", "auto"])
def kernels(request) -> Kernels:
    return select_kernels(CPU, request.param, use_compile=False)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """torch.empty gives NaN, so that an element that a kernel leaves out shows."""

    def poisoned(*size, dtype=torch.float32):
        return torch.full(*size, torch.nan if dtype.is_floating_point else -1, dtype=dtype)

    monkeypatch.setattr(torch, "empty", poisoned)


FAMILIES = ["llama", "qwen3", "qwen3.5"]


def assert_plan_is_dense(plan: str, name: str, kernels: Kernels) -> None:
    """Slots that no token has been written to are NaN."""
    case = Case(name, torch.float32, kernels)
    for ours, expected in zip(case.run(PLANS[plan]), case.dense(torch.float32), strict=True):
        assert ours.shape == expected.shape
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_are_dense_causal_attention(kernels, name):
    assert_plan_is_dense("prompts", name, kernels)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", ["chunks", "decoding"])
def test_chunks_and_decoding_are_the_whole(kernels, plan, name):
    assert_plan_is_dense(plan, name, kernels)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_entry_serves_a_mixed_batch(kernels, name):
    assert_plan_is_dense("mixed", name, kernels)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_token_changes_nothing(kernels, dtype):
    """Nor does another sequence; the rows from the changed token on do change."""
    case, other = (Case("qwen3", dtype, kernels) for _ in range(2))
    other.fused[0][5:] += 1
    (ours, *neighbours), (changed, *same) = (one.run(PLANS["prompts"]) for one in (case, other))
    assert torch.equal(ours[:5], changed[:5])
    assert (ours[5:] != changed[5:]).any(dim=-1).all()
    assert all(map(torch.equal, neighbours, same))


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_rotation_with_three_axes(kernels, dtype):
    """What the axes are matters, and dimensions beyond the rotated half do not turn."""
    case, swapped = (Case("qwen3.5", dtype, kernels) for _ in range(2))
    assert case.family.rope.rotary_dim == D // 2
    swapped.positions = [positions[[0, 2, 1]] for positions in swapped.positions]
    ours, other = (torch.cat(one.run(PLANS["mixed"])) for one in (case, swapped))
    assert (ours - other).abs().max() > 0.2
    tails = [one.cache.k.view(-1, KV, D)[one.slots(0)][..., D // 2 :] for one in (case, swapped)]
    assert torch.equal(*tails)
    found, expected = ours.float(), torch.cat(case.dense(torch.float32))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("plan", ["prompts", "mixed"])
def test_bf16_error_is_at_most_twice_transformers(kernels, plan, name):
    case = Case(name, torch.bfloat16, kernels)
    found, theirs, exact = (
        torch.cat(rows).double()
        for rows in (
            case.run(PLANS[plan]),
            case.dense(torch.bfloat16),
            case.dense(torch.float64),
        )
    )
    assert (found - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
    assert (found - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_families_differ():
    """Else that they equal transformers' would show little: norms, pairs and axes all matter."""
    rows = [torch.cat(Case(name, torch.float32, Kernels()).dense(torch.float32))
            for name in FAMILIES]  # fmt: skip
    for i in range(3):
        assert (rows[i] - rows[i - 1]).abs().mean() > 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_keys_and_values_land_in_their_slots_and_nowhere_else(kernels, name, dtype):
    """Keys are stored normed and turned, values as they came."""
    case = Case(name, dtype, kernels)
    case.run(PLANS["mixed"])
    k_cache, v_cache = (cache.view(-1, KV, D) for cache in case.cache)
    is_free = torch.ones(len(k_cache), dtype=torch.bool)
    # Ours turns in fp32 what theirs turns in bf16: compared with theirs in fp32.
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (2**-6, 2**-6)
    for seq in range(3):
        slots = case.slots(seq)
        q, k, v = split_heads(case.fused[seq])
        assert torch.equal(v_cache[slots], v)
        _, keys = turned(case.family, q.float(), k.float(), case.positions[seq])
        found = k_cache[slots].float().transpose(0, 1)[None]
        torch.testing.assert_close(found, keys, rtol=rtol, atol=atol)
        is_free[slots] = False
    assert k_cache[is_free].isnan().all()
    assert v_cache[is_free].isnan().all()


def test_padding_touches_the_null_block_only(kernels):
    """Rows of no sequence are written to block 0 and come out as 0; real ones keep their bits."""
    case, padded = (Case("qwen3", torch.float32, kernels) for _ in range(2))
    step = PLANS["prompts"][0]
    batch, T, num_pads = padded.batch(step), sum(LENGTHS), 3
    batch = dataclasses.replace(
        batch,
        positions=F.pad(batch.positions, (0, num_pads)),
        slot_mapping=F.pad(batch.slot_mapping, (0, num_pads), value=0),
        cu_seqlens_q=F.pad(batch.cu_seqlens_q, (0, 1), value=T),  # and a sequence of length 0
        seq_lens=F.pad(batch.seq_lens, (0, 1)),
        block_tables=F.pad(batch.block_tables, (0, 0, 0, 1)),
    )
    rows = torch.cat((*padded.fused, torch.ones(num_pads, (H + 2 * KV) * D)))
    found = padded.attention(*split_heads(rows), padded.cache, batch)
    assert torch.equal(found[:T], case.step(step))
    assert not found[T:].any()
    for ours, other in zip(padded.cache, case.cache, strict=True):
        assert torch.equal(ours[1:].nan_to_num(99), other[1:].nan_to_num(99))
        assert ours[0, 0].isfinite().all()
        assert ours[0, 1:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_the_blocks_lie_changes_no_bit(kernels, dtype):
    case, moved = (Case("qwen3", dtype, kernels) for _ in range(2))
    order = torch.tensor([0, 5, 7, 1, 2, 8, 4, 6, 3])  # block 0 stays: it pads the tables
    moved.tables = order[case.tables.long()].int()
    for ours, other in zip(case.run(PLANS["mixed"]), moved.run(PLANS["mixed"]), strict=True):
        assert torch.equal(ours, other)
    assert not torch.equal(case.tables, moved.tables)


def test_a_token_sees_what_was_stored_before_this_step(kernels):
    """A change of the cached value of token 2 reaches all later rows of its sequence, no other."""
    case, other = (Case("llama", torch.float32, kernels) for _ in range(2))
    first, rest = [(0, 0, 3), (1, 0, 5)], [(0, 3, 9), (2, 0, 6)]
    rows = []
    for one in (case, other):
        one.step(first)
        if one is other:
            one.cache.v.view(-1, KV, D)[one.slots(0, 2, 3)] += 1
        rows.append(one.step(rest))
    assert (rows[0][:6] != rows[1][:6]).any(dim=-1).all()
    assert torch.equal(rows[0][6:], rows[1][6:])


# -- The reference of the fused store -------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [None, "rows", "float32"])
@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("T", [0, 1, 7])
def test_reference_is_its_parts_one_after_the_other(T, num_axes, weights, dtype):
    torch.manual_seed(0)
    q, k, v = split_heads(torch.randn(T, (H + 2 * KV) * D).to(dtype))
    rope = Rope(torch.randn(32, 8), axes=torch.tensor([0, 1, 2, 0] * 2), offset=4)
    positions = torch.randint(0, 32, (3, T) if num_axes == 3 else (T,))
    slots = torch.randperm(NUM_BLOCKS * BLOCK)[:T]
    norms, normed = None, (q, k)
    if weights is not None:
        weight_dtype = dtype if weights == "rows" else torch.float32
        norms = HeadNorms(*torch.randn(2, D).to(weight_dtype).unbind(), eps=EPS)
        normed = (rms_norm_ref(q, norms.q_weight, EPS), rms_norm_ref(k, norms.k_weight, EPS))
    expected_q, expected_k = rotary_ref(positions, *normed, rope)
    caches = [torch.zeros(NUM_BLOCKS, BLOCK, KV, D, dtype=dtype) for _ in range(4)]
    store_kv_ref(expected_k, v, *caches[:2], slots)
    out = norm_rope_store_ref(q, k, v, norms, positions, rope, *caches[2:], slots)
    assert torch.equal(out, expected_q)
    assert torch.equal(caches[2], caches[0])
    assert torch.equal(caches[3], caches[1])
    halves = norm_rope_ref(q, k, norms, positions, rope)
    assert all(map(torch.equal, halves, (expected_q, expected_k)))
