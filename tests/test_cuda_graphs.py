"""Graph logic without a GPU: buckets, padding, static inputs, with a stand-in for the capture.

The stand-in runs the captured function again, on the static inputs, as a replay would.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from nanoinfer.batch import Batch
from nanoinfer.cuda_graphs import CudaGraphs, bucket_sizes, fill
from nanoinfer.graphs import worst_batch
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.loader import load_weights
from nanoinfer.model_config import ModelConfig
from nanoinfer.models.qwen3 import CausalLM

CPU = torch.device("cpu")
B, MAX_BLOCKS, MAX_SEQS = 4, 6, 70
NUM_BLOCKS = 1 + MAX_SEQS * MAX_BLOCKS
MODELS = ["tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3_5"]


class StandIn:
    def __init__(self, function) -> None:
        self._function = function
        self.output = function()

    def replay(self) -> None:
        self.output.copy_(self._function())


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@functools.cache
def load(folder, kernels="auto") -> CausalLM:
    config = ModelConfig.from_hf(folder)
    table = select_kernels(CPU, kernels, False) if kernels == "auto" else Kernels()
    model = CausalLM(config, 64, table, dtype=torch.float32, device=CPU)
    load_weights(model, folder, tie=False)
    model.finish_weights(None, table.pack_weight, table.pack_experts)
    return model


@functools.cache
def filled_caches(model) -> list:
    """Caches in which sequence i owns blocks 1 + i * MAX_BLOCKS .. and slots 1 + i."""
    torch.manual_seed(0)
    counts = {"block": NUM_BLOCKS, "slot": 1 + MAX_SEQS}
    caches = [spec.allocate(counts[spec.unit], B, CPU) for spec in model.cache_specs()]
    for tensor in tensors_of(caches):
        tensor.normal_()
    return caches


def tensors_of(caches) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(caches) if isinstance(leaf, Tensor)]


def refill(caches, originals) -> None:
    for tensor, value in zip(tensors_of(caches), tensors_of(originals), strict=True):
        tensor.copy_(value)


def copy(caches) -> list:
    return tree_map_only(Tensor, torch.clone, caches)


def make_batch(num_seqs: int) -> Batch:
    """Each sequence has another length, its own blocks, its own slot."""
    i = torch.arange(num_seqs)
    lens = 1 + i * 7 % (B * MAX_BLOCKS - 1)
    tables = (1 + i * MAX_BLOCKS)[:, None] + torch.arange(MAX_BLOCKS)
    last = lens - 1
    slots = tables.gather(1, (last // B)[:, None])[:, 0] * B + last % B
    states = torch.stack((torch.where(last > 0, i + 1, 0), i + 1)).int()
    return Batch(
        input_ids=i * 5 % 273,
        positions=last,
        slot_mapping=slots,
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=lens.int(),
        block_tables=tables.int(),
        states=states,
        logits_indices=i,
        sampled_entries=list(range(num_seqs)),
        num_entries=num_seqs,
        sampling=None,
    )


def graphs_of(model, caches, max_num_seqs) -> CudaGraphs:
    return CudaGraphs(model, caches, max_num_seqs, MAX_BLOCKS, CPU, StandIn)


def test_every_number_of_sequences_has_a_bucket():
    for most in range(1, 300):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes))
        assert (sizes[0], sizes[-1]) == (1, most)
        assert all(b - a <= 8 for a, b in itertools.pairwise(sizes))
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]


@pytest.mark.parametrize("name", MODELS)
def test_replays_leave_others_alone_and_give_the_same_tokens(tiny, name):
    """Every max_num_seqs from 1 to 70 and every batch size."""
    model = load(tiny(name))
    caches = filled_caches(model)
    batches = [make_batch(n) for n in range(1, MAX_SEQS + 1)]
    expected = []
    for batch in batches:
        alone = copy(caches)
        hidden = model(batch, alone)
        expected.append((hidden, model.logits(hidden).argmax(-1), alone))
    for most in range(1, MAX_SEQS + 1):
        shared = copy(caches)
        graphs = graphs_of(model, shared, most)
        for n in range(most, 0, -1):  # what a larger batch left must not come back as padding
            refill(shared, caches)
            batch = batches[n - 1]
            assert graphs.can_run(batch)
            hidden, tokens, after = expected[n - 1]
            found = graphs.run(batch)
            torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-4)
            assert torch.equal(model.logits(found).argmax(-1), tokens)
            check_caches(shared, after, n)
        assert not graphs.can_run(make_batch(most + 1))


def check_caches(found, expected, num_seqs: int) -> None:
    """The batch's own blocks and slots hold what it left there; all others their old bits."""
    for tensor, right in zip(tensors_of(found), tensors_of(expected), strict=True):
        own = 1 + num_seqs * (MAX_BLOCKS if len(tensor) == NUM_BLOCKS else 1)
        torch.testing.assert_close(tensor[1:own], right[1:own], rtol=1e-4, atol=1e-4)
        assert torch.equal(tensor[own:], right[own:])


@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replay_is_bit_equal_to_the_same_padded_batch(tiny, name, kernels):
    """Of 3 and 5 sequences in buckets of 4 and 8, after a larger batch has left its numbers."""
    model = load(tiny(name), kernels)
    replayed, eager = copy(filled_caches(model)), copy(filled_caches(model))
    graphs = graphs_of(model, replayed, 16)
    refill(replayed, filled_caches(model))
    for n, bucket in ((16, 16), (3, 4), (5, 8), (1, 1)):
        batch = make_batch(n)
        found = graphs.run(batch)
        padded = pad(batch, bucket)
        hidden = model(padded, eager)
        assert torch.equal(found, hidden[:n])
        pairs = zip(tensors_of(replayed), tensors_of(eager), strict=True)
        assert all(torch.equal(a[1:], b[1:]) for a, b in pairs)


def pad(batch: Batch, size: int) -> Batch:
    """By hand: sequences of no keys in block 0 and slot 0."""
    more = size - batch.num_entries

    def longer(x: Tensor) -> Tensor:
        return torch.cat((x, x.new_zeros(more, *x.shape[1:])))

    names = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables")
    fields = {name: longer(getattr(batch, name)) for name in names}
    fields["states"] = longer(batch.states.T).T.contiguous()
    fields["cu_seqlens_q"] = torch.arange(size + 1, dtype=torch.int32)
    return dataclasses.replace(batch, num_entries=size, **fields)


def test_static_inputs_keep_their_addresses_and_forget_larger_batches(tiny):
    model = load(tiny("tiny-qwen3"))
    graphs = graphs_of(model, copy(filled_caches(model)), 8)
    static = graphs._static
    names = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables", "states")
    before = [getattr(static, name).data_ptr() for name in names]
    for n in (8, 3):
        fill(static, make_batch(n))
        assert [getattr(static, name).data_ptr() for name in names] == before
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables"):
        assert getattr(static, name)[:3].any()
        assert not getattr(static, name)[3:].any()
    assert not static.states[:, 3:].any()


def test_prompts_are_not_for_graphs(tiny):
    model = load(tiny("tiny-qwen3"))
    graphs = graphs_of(model, copy(filled_caches(model)), 4)
    assert not graphs.can_run(worst_batch(5, 5, B, CPU))
