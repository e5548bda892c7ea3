"""Decoding on a GPU without a launch for each kernel: one captured graph for each bucket of sizes.

In: a model, its caches, a batch in which every sequence has one token. Out: hidden states [S, E].

    3 sequences, buckets 1, 2, 4     static inputs  | s0 | s1 | s2 | padding |   replay graph 4
                                     hidden         | h0 | h1 | h2 |    .    |   return the first 3

A graph replays launches with the addresses that it was captured with, so its inputs are static
buffers, filled before each replay, and all buckets are views of the largest one's. A row of padding
is a sequence of no keys: it reads nothing, writes to block 0 and state slot 0, which nobody owns,
and its result is not looked at. It is written anew at each replay: what a larger batch left there
belongs to somebody else by now.

Invariants: a replay is bit-equal to running the model on the same padded batch; live blocks and
state slots stay as they are; nothing that a graph depends on is a number on the host.

The captures share one pool of memory, the largest first, so that the others fit into what it took.
What captures is an argument: with a stand-in that runs the function again, all of this is tested on
a machine without a GPU. S sequences, E hidden.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoinfer.batch import Batch
from nanoinfer.models.qwen3 import Cache, CausalLM

_STEP = 8  # between buckets, from here on
_WARM_UP_RUNS = 2  # before a capture: nothing may compile inside it


class Graph(Protocol):
    """A function's work on static tensors, to be done again."""

    output: Tensor

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], Tensor]], Graph]


class CudaGraph:
    """What `torch.cuda` captured of a function; all of them in the memory of the first."""

    def __init__(self, function: Callable[[], Tensor], pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.output = function()

    @property
    def pool(self) -> Any:
        return self._graph.pool()

    def replay(self) -> None:
        self._graph.replay()


def make_capture() -> Capture:
    """Captures that share one pool."""
    pool = None

    def capture(function: Callable[[], Tensor]) -> Graph:
        nonlocal pool
        torch.cuda.synchronize()
        graph = CudaGraph(function, pool)
        pool = pool or graph.pool
        return graph

    return capture


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every eighth, and the largest itself: whatever runs has a bucket."""
    sizes = {1, 2, 4, *range(_STEP, max_num_seqs + 1, _STEP), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class CudaGraphs:
    def __init__(
        self,
        model: CausalLM,
        caches: list[Cache],
        max_num_seqs: int,
        max_blocks: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._sizes = bucket_sizes(max_num_seqs)
        self._static = _empty_batch(max_num_seqs, max_blocks, device)
        self._graphs: dict[int, Graph] = {}
        capture = capture or make_capture()
        with torch.inference_mode():
            for size in reversed(self._sizes):
                batch = _first(self._static, size)
                for _ in range(_WARM_UP_RUNS):
                    model(batch, caches)
                self._graphs[size] = capture(partial(model, batch, caches))

    def can_run(self, batch: Batch) -> bool:
        return batch.is_decoding and batch.num_entries <= self._sizes[-1]

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """The same as the model itself; the result is overwritten by the next run."""
        size = self._sizes[bisect_left(self._sizes, batch.num_entries)]
        fill(_first(self._static, size), batch)
        self._graphs[size].replay()
        return self._graphs[size].output[: batch.num_entries]


def fill(static: Batch, batch: Batch) -> None:
    """Copy a batch into the first rows of `static`, and make padding of the others."""
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "states"):
        target, values = getattr(static, name), getattr(batch, name)
        target[..., : values.shape[-1]].copy_(values)
        target[..., values.shape[-1] :].zero_()
    num_rows, num_blocks = batch.block_tables.shape
    static.block_tables[:num_rows, :num_blocks].copy_(batch.block_tables)
    static.block_tables[num_rows:].zero_()


def _empty_batch(num_seqs: int, max_blocks: int, device: torch.device) -> Batch:
    """Padding only: one token a sequence."""
    zeros = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    numbers = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    return Batch(
        input_ids=zeros,
        positions=zeros.clone(),
        slot_mapping=zeros.clone(),
        cu_seqlens_q=numbers,
        seq_lens=torch.zeros_like(numbers[1:]),
        block_tables=numbers.new_zeros(num_seqs, max_blocks),
        states=numbers.new_zeros(2, num_seqs),
        logits_indices=zeros[:0],
        sampled_entries=[],
        num_entries=num_seqs,
        sampling=None,
    )


def _first(static: Batch, size: int) -> Batch:
    """Views of the first `size` sequences."""
    return dataclasses.replace(
        static,
        input_ids=static.input_ids[:size],
        positions=static.positions[:size],
        slot_mapping=static.slot_mapping[:size],
        cu_seqlens_q=static.cu_seqlens_q[: size + 1],
        seq_lens=static.seq_lens[:size],
        block_tables=static.block_tables[:size],
        states=static.states[:, :size],
        num_entries=size,
    )
