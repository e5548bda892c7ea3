"""What a decoding step may do on a GPU, shown without one: nothing waits for the device, nothing
depends on what lengths, tables and slots hold, and memory is counted before caches are made.

The Triton kernels are stood in for by functions of their shapes.
"""

import dataclasses
from functools import partial

import pytest
import torch
from test_cuda_graphs import MAX_BLOCKS, StandIn, filled_caches, load, make_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer import EngineConfig
from nanoinfer.batch import Entries, SamplingBatch
from nanoinfer.cuda_graphs import CudaGraphs
from nanoinfer.graphs import free_memory, make_graphs, worst_sampling
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.moe import route
from nanoinfer.model_config import ModelConfig
from nanoinfer.models.qwen3 import CausalLM
from nanoinfer.sampler import sample

CPU = torch.device("cpu")
MODELS = ["tiny-qwen3", "tiny-llama", "tiny-qwen3-moe", "tiny-qwen3_5", "tiny-qwen3_5-moe"]


def stand_in(x: torch.Tensor, *others) -> torch.Tensor:
    return torch.empty_like(x)


def moe_stand_in(x, logits, experts, routing):
    weights, chosen = route(logits, routing)
    chosen.flatten().argsort(stable=True)
    return (x * weights.sum(-1, keepdim=True)).to(x.dtype)


STAND_INS = Kernels(
    paged_attention=stand_in,
    norm_rope_store=stand_in,
    causal_conv=stand_in,
    gated_delta=lambda q, k, v, *others: torch.empty_like(v),
    moe=moe_stand_in,
    draw=lambda logits, *others: logits.argmax(-1),
)


def adjusted_sampling(num_rows: int) -> SamplingBatch:
    """Rows with biases and penalties; log probabilities are waited for."""
    ids = torch.arange(num_rows)
    entries = Entries(ids, ids, ids.float())
    adjustments = {"added": entries, "repetition": entries, "penalties": entries}
    sampling = worst_sampling(num_rows, CPU)
    return dataclasses.replace(sampling, **adjustments, num_logprobs=[None] * num_rows)


def make_model(folder) -> CausalLM:
    return CausalLM(ModelConfig.from_hf(folder), 64, STAND_INS, dtype=torch.bfloat16, device=CPU)


class Trace(TorchDispatchMode):
    """Every operator with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = tuple(tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor))
        self.calls.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_step_never_waits_for_the_device(tiny, name):
    """A fake tensor has no values: asking for one (item, tolist, a mask as index) is an error."""
    folder = tiny(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make_model(folder)
        caches = [spec.allocate(2, 4, CPU) for spec in model.cache_specs()]
        batch = make_batch(5)
        logits = model.logits(model(batch, caches)[batch.logits_indices])
        launched = sample(logits, adjusted_sampling(5), STAND_INS)
        batch.input_ids[torch.arange(3)] = launched.token_ids[torch.arange(3)]  # the next step's
        with pytest.raises(RuntimeError):
            batch.seq_lens.max().item()


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_operators_do_not_depend_on_what_a_batch_holds(tiny, name):
    model = make_model(tiny(name))
    caches = [spec.allocate(1, 4, CPU) for spec in model.cache_specs()]
    batch = make_batch(5)
    names = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables", "states")
    other = dataclasses.replace(batch, **{n: torch.zeros_like(getattr(batch, n)) for n in names})
    traces = []
    for content in (batch, other):
        with Trace() as trace:
            model(content, caches)
        traces.append(trace.calls)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 20


GIB = 1 << 30


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_gpus_memory_is_counted_with_its_graphs(tiny, monkeypatch, enforce_eager):
    """80 GiB, of which 60 are free; the worst step takes 3 more, the graphs 2."""
    captured = []

    class Counted(CudaGraphs):
        def __init__(self, model, caches, max_num_seqs, max_blocks, device):
            captured.append((max_num_seqs, max_blocks))
            monkeypatch.setitem(memory, "free", memory["free"] - 2 * GIB)

    memory = {"free": 60 * GIB, "peak": 13 * GIB}
    monkeypatch.setattr("nanoinfer.graphs.CudaGraphs", Counted)
    monkeypatch.setattr(EngineConfig, "torch_device", torch.device("cuda"))
    monkeypatch.setattr("nanoinfer.graphs.worst_batch", lambda n, longest, size, device: n)
    drawn, on_cpu = [], partial(worst_sampling, device=CPU)
    monkeypatch.setattr("nanoinfer.graphs.worst_sampling", lambda n, device: on_cpu(n))
    table = Kernels(name="triton", draw=lambda logits, *given: drawn.append(len(logits)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory["peak"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory["free"], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = FakeModel()
    config = EngineConfig(model="m", enforce_eager=enforce_eager, max_num_seqs=32)
    left = free_memory(model, [], config, 5000, table)
    taken = 3 * GIB + (0 if enforce_eager else 2 * GIB)
    assert left == pytest.approx(60 * GIB - 8 * GIB - taken, abs=8)
    assert captured == ([] if enforce_eager else [(32, 313)])
    assert model.ran == [2048]
    assert drawn == [32]


class FakeModel:
    def __init__(self) -> None:
        self.ran: list[int] = []

    def __call__(self, batch, caches):
        self.ran.append(batch)
        return torch.zeros(batch, 1)

    def logits(self, hidden):
        assert len(hidden) == 32, "rows of as many sequences as may run"
        return hidden.expand(-1, 100).clone()


def test_references_are_not_captured():
    """They read lengths and tables on the host, which a capture refuses."""
    assert make_graphs(None, [], 4, 4, torch.device("cuda"), Kernels()) is None


def test_positions_of_three_axes_are_not_for_graphs(tiny):
    """A chunk of one token, a part of an image, looks like decoding."""
    batch = make_batch(2)
    assert batch.is_decoding
    assert not dataclasses.replace(batch, positions=batch.positions.expand(3, -1)).is_decoding


def test_graphs_hold_on_to_no_batch(tiny):
    """What is captured reads the static inputs only: a batch may change after its run."""
    model = load(tiny("tiny-qwen3"))
    caches = filled_caches(model)
    graphs = CudaGraphs(model, caches, 4, MAX_BLOCKS, CPU, StandIn)
    batch = make_batch(3)
    with torch.inference_mode():
        found = graphs.run(batch).clone()
        batch.input_ids.zero_()
        assert not torch.equal(graphs.run(batch), found)
