"""Decoding without Python between the kernels: one recording for each number of sequences.

In: a model, its caches, a batch in which every sequence has one token. Out: hidden states [S, E].

    very first step                run the layers on padding, to see if they can be recorded
    first step with S sequences    run the layers on static inputs, record the kernels' calls
    every other one                copy positions, slots, lengths and tables; replay the calls

It is worth its while where layers take little time: a step of a small model with one sequence is
half Python. Invariants: a replay is bit-equal to running the layers; recordings hold no weights,
and the least recently used ones are dropped.

What cannot be recorded (kernels/record.py says when) is run as it was. S sequences, E hidden.
"""

import dataclasses
import logging
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.batch import Batch
from nanoinfer.kernels.record import Recorder, Tape
from nanoinfer.models.qwen3 import Cache, CausalLM

logger = logging.getLogger("nanoinfer")

_MAX_SEQUENCES = 64  # a step of more is hardly any Python, and their linears are oneDNN's
_MAX_RECORDINGS = 32


class _Recording(NamedTuple):
    tape: Tape
    batch: Batch  # static inputs
    embedded: Tensor  # [S, E]
    hidden: Tensor  # [S, E]


class CpuGraphs:
    def __init__(
        self, model: CausalLM, caches: list[Cache], recorder: Recorder, max_blocks: int
    ) -> None:
        self._model = model
        self._caches = caches
        self._recorder = recorder
        self._max_blocks = max_blocks  # of one sequence
        self._recordings: OrderedDict[int, _Recording] = OrderedDict()
        self._is_possible = True

    def can_run(self, batch: Batch) -> bool:
        return self._is_possible and batch.is_decoding and batch.num_entries <= _MAX_SEQUENCES

    def run(self, batch: Batch) -> Tensor:
        """The same as the model itself; the result is overwritten by the next run."""
        embedded = self._model.embed(batch.input_ids)  # [S, E]
        recording = self._recordings.get(batch.num_entries)
        if recording is not None:
            self._recordings.move_to_end(batch.num_entries)
            recording.embedded.copy_(embedded)
            _refill(recording.batch, batch)
            recording.tape.replay()
            return recording.hidden
        if not self._recordings and not self._try_padding(embedded, batch):
            return self._model.run_layers(embedded, batch, self._caches)
        return self._record(embedded, batch)

    def _try_padding(self, embedded: Tensor, batch: Batch) -> bool:
        """Find out whether the layers can be recorded, without touching anybody's cache.

        What is recorded is done, too. If a batch were recorded until it turns out to be impossible,
        and then run, a recurrent state would have been changed twice.
        """
        static, inputs = self._make_static(batch), torch.zeros_like(embedded)
        try:
            with self._recorder.record() as tape:
                self._model.run_layers(inputs, static, self._caches, tape.start_layer)
        except RuntimeError as error:
            logger.debug("decoding runs layer by layer: %s", error)
            self._is_possible = False
        return self._is_possible

    def _record(self, embedded: Tensor, batch: Batch) -> Tensor:
        static = self._make_static(batch)
        _refill(static, batch)
        with self._recorder.record() as tape:
            hidden = self._model.run_layers(embedded, static, self._caches, tape.start_layer)
        self._recordings[batch.num_entries] = _Recording(tape, static, embedded, hidden)
        if len(self._recordings) > _MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        return hidden

    def _make_static(self, batch: Batch) -> Batch:
        """Padding: sequences of no keys in the null block and the null slot."""
        tables = batch.block_tables.new_zeros(batch.num_entries, self._max_blocks)
        return dataclasses.replace(
            batch,
            positions=torch.zeros_like(batch.positions),
            slot_mapping=torch.zeros_like(batch.slot_mapping),
            seq_lens=torch.zeros_like(batch.seq_lens),
            states=torch.zeros_like(batch.states),
            block_tables=tables,
        )


def _refill(static: Batch, batch: Batch) -> None:
    """Blocks behind a sequence's last one are never read, and stay what they were."""
    static.positions.copy_(batch.positions)
    static.slot_mapping.copy_(batch.slot_mapping)
    static.seq_lens.copy_(batch.seq_lens)
    static.states.copy_(batch.states)
    static.block_tables[:, : batch.block_tables.shape[1]].copy_(batch.block_tables)
