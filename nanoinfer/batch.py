"""A step as flat arrays: everything that a forward pass needs, in one object handed down.

In: the scheduler's list of (sequence, start, number of tokens).
Out: a `Batch` of tensors. The tokens of all sequences lie one behind the other, no padding:

    A decodes token 20, B's prompt tokens 0..4:
    input_ids       a20 | b0 b1 b2 b3 b4        [T]
    cu_seqlens_q    0     1              6      [S + 1]
    seq_lens        21    5                     [S]   keys to attend to, this chunk included
    logits_indices  0     5                     [R]   rows whose logits are sampled

Invariants: host arrays are numpy, uploaded once; the runner and the model see only this, never a
Sequence; ids and slots are int64, tables and lengths int32.

T tokens in the step, S sequences, R sampled rows, M blocks in the longest table.
"""

import functools
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoinfer.positions import join
from nanoinfer.scheduler import ScheduledSequence


class Entries(NamedTuple):
    """Sparse values to apply to single logits: value[i] at [row[i], token_id[i]]."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """How each sampled row is drawn; see `sampler.py`."""

    temperatures: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    seeds: Tensor  # [R] int64
    positions: Tensor  # [R] int64, index of the token that is drawn
    added: Entries | None  # logit_bias, and -inf for what min_tokens forbids
    repetition: Entries | None  # factors over prompt and output
    penalties: Entries | None  # presence and frequency, over the output
    num_logprobs: list[int | None]


class PromptLogprobs(NamedTuple):
    """Rows of a prompt chunk whose next tokens' logprobs are wanted."""

    entry: int  # which scheduled sequence
    rows: slice  # of hidden states, in the step
    targets: list[int]
    num_logprobs: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's inputs on the device."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, or [3, T] where some token's axes differ
    slot_mapping: Tensor  # [T] int64
    cu_seqlens_q: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, M] int32
    states: Tensor  # [2, S] int32: slots of states, to start from (0: nothing) and to leave in
    logits_indices: Tensor  # [R] int64
    sampled_entries: list[int]  # [R] which scheduled sequence a sampled row belongs to
    num_entries: int
    sampling: SamplingBatch | None
    pending: Tensor | None = None  # [2, P]: input_ids[i] is what the step before samples in row j
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        """Every sequence has one token, of text."""
        return len(self.input_ids) == self.num_entries and self.positions.dim() == 1

    @staticmethod
    def build(step: list[ScheduledSequence], block_size: int, device: torch.device) -> "Batch":
        """Flatten a step and upload it."""
        seqs, first_tokens, nums_tokens, samples = zip(*step, strict=True)
        starts, q_lens = np.array(first_tokens), np.array(nums_tokens)
        cu_seqlens_q = np.concatenate(([0], np.cumsum(q_lens)))
        tables = _stack([seq.block_table for seq in seqs])
        states = [[seq.state.source for seq in seqs], [seq.state.slot for seq in seqs]]
        images = [seq.image_positions for seq in seqs]
        input_ids: list[int] = []
        pending = []
        for seq, start, num_tokens, _ in step:
            input_ids += seq.token_ids[start : start + num_tokens]
            if start + num_tokens > len(seq.token_ids):
                pending.append((len(input_ids), seq.pending_row))
                input_ids.append(0)
        rows = np.repeat(np.arange(len(step)), q_lens)
        places = np.arange(len(rows)) + (starts - cu_seqlens_q[:-1])[rows]  # in its sequence
        slots = tables[rows, places // block_size] * np.int64(block_size) + places % block_size
        sampled = [i for i, is_sampling in enumerate(samples) if is_sampling]
        upload = functools.partial(_upload, device=device)
        return Batch(
            input_ids=upload(input_ids, np.int64),
            positions=upload(join(images, places, starts, q_lens), np.int64),
            slot_mapping=upload(slots, np.int64),
            cu_seqlens_q=upload(cu_seqlens_q, np.int32),
            seq_lens=upload(starts + q_lens, np.int32),
            block_tables=upload(tables, np.int32),
            states=upload(states, np.int32),
            logits_indices=upload(cu_seqlens_q[1:][sampled] - 1, np.int64),
            sampled_entries=sampled,
            num_entries=len(step),
            sampling=_build_sampling([step[i] for i in sampled], device) if sampled else None,
            pending=upload(np.transpose(pending), np.int64) if pending else None,
            prompt_logprobs=_find_prompt_logprobs(step, cu_seqlens_q),
        )


def _stack(tables: list[list[int]]) -> np.ndarray:
    """Lists of any lengths as the rows of [S, M], filled up with the null block."""
    lengths = np.array([len(table) for table in tables])
    stacked = np.zeros((len(tables), lengths.max()), np.int32)
    everything = itertools.chain.from_iterable(tables)
    is_used = np.arange(stacked.shape[1]) < lengths[:, None]
    stacked[is_used] = np.fromiter(everything, np.int32, lengths.sum())
    return stacked


def _upload(values: np.ndarray | list, dtype: type, device: torch.device) -> Tensor:
    host = torch.from_numpy(np.asarray(values, dtype))
    # Pinned, or it would wait for the step before.
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _build_sampling(step: list[ScheduledSequence], device: torch.device) -> SamplingBatch:
    seqs, params = [entry.seq for entry in step], [entry.seq.params for entry in step]
    positions = [entry.start + entry.num_tokens for entry in step]
    upload = functools.partial(_upload, device=device)

    def entries(parts: list[tuple[int, np.ndarray, np.ndarray]]) -> Entries | None:
        if not parts:
            return None
        rows, ids, values = zip(*parts, strict=True)
        rows = np.repeat(rows, [len(part) for part in ids])
        ids, values = np.concatenate(ids), np.concatenate(values)
        return Entries(upload(rows, np.int64), upload(ids, np.int64), upload(values, np.float32))

    added, repetition, penalties = [], [], []
    for row, seq in enumerate(seqs):
        p = seq.params
        if p.logit_bias:
            added.append((row, np.array(list(p.logit_bias)), np.array(list(p.logit_bias.values()))))
        if positions[row] - seq.num_prompt_tokens < p.min_tokens:
            eos = () if p.ignore_eos else seq.request.eos_token_ids
            stops = np.array(sorted({*eos, *p.stop_token_ids}), np.int64)
            added.append((row, stops, np.full(len(stops), -np.inf)))
        if p.repetition_penalty != 1.0:
            seen = np.unique(seq.token_ids)
            repetition.append((row, seen, np.full(len(seen), p.repetition_penalty)))
        if p.presence_penalty or p.frequency_penalty:
            ids, counts = np.unique(np.array(seq.output_token_ids, np.int64), return_counts=True)
            penalties.append((row, ids, -p.presence_penalty - p.frequency_penalty * counts))
    return SamplingBatch(
        temperatures=upload(np.minimum([p.temperature for p in params], 1e30), np.float32),
        top_k=upload(np.clip([p.top_k for p in params], 0, 2**31), np.int64),
        top_p=upload([p.top_p for p in params], np.float32),
        min_p=upload([p.min_p for p in params], np.float32),
        seeds=upload([seq.seed for seq in seqs], np.int64),
        positions=upload(positions, np.int64),
        added=entries(added),
        repetition=entries(repetition),
        penalties=entries(penalties),
        num_logprobs=[p.logprobs for p in params],
    )


def _find_prompt_logprobs(
    step: list[ScheduledSequence], cu_seqlens_q: np.ndarray
) -> list[PromptLogprobs]:
    found = []
    for i, (seq, start, num_tokens, _) in enumerate(step):
        num_logprobs = seq.params.prompt_logprobs
        if num_logprobs is None or not seq.wants_prompt_logprobs:
            continue
        # Row p predicts token p + 1. Rows reported before a preemption are not reported again.
        done = len(seq.request.prompt_logprobs) - 1
        first, last = max(start, done), min(start + num_tokens, seq.num_prompt_tokens - 1)
        if first < last:
            offset = int(cu_seqlens_q[i]) - start
            targets = seq.token_ids[first + 1 : last + 1]
            rows = slice(first + offset, last + offset)
            found.append(PromptLogprobs(i, rows, targets, num_logprobs))
    return found
