"""Logits to tokens, and to log probabilities.

In: logits [R, V] in fp32, how each row is drawn (`SamplingBatch`).
Out: one token id per row; raw log probabilities where asked for.

A draw is the argmax of a score and of noise that is a hash of (seed, position, id)
(kernels/draw.py). There is no generator and no state, so a row draws the same token whatever its
neighbours, chunking, preemption or device.

R rows, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.batch import Entries, SamplingBatch
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.gumbel import row_keys
from nanoinfer.outputs import Logprob


class Drawn(NamedTuple):
    """What the device has drawn, or will have."""

    token_ids: Tensor  # [R] int64
    num_logprobs: list[int | None]  # [R]
    logprobs: Tensor | None  # [W, V], of the W rows that asked for some


def sample(logits: Tensor, sampling: SamplingBatch, kernels: Kernels) -> Drawn:
    """Draw one id per row of logits [R, V] (fp32; changed in place)."""
    wanted = [row for row, k in enumerate(sampling.num_logprobs) if k is not None]
    raw = logits[wanted].log_softmax(-1) if wanted else None
    _adjust(logits, sampling)
    keys = row_keys(sampling.seeds, sampling.positions)
    filters = (sampling.top_k, sampling.top_p, sampling.min_p)
    token_ids = kernels.draw(logits, sampling.temperatures, *filters, keys)
    return Drawn(token_ids, sampling.num_logprobs, raw)


def top_logprobs(
    logprobs: Tensor, token_ids: list[int], counts: list[int]
) -> list[dict[int, Logprob]]:
    """The `counts[r]` most likely ids of each row (-1: all) and `token_ids[r]`, with ranks."""
    vocab_size = logprobs.size(-1)
    counts = [vocab_size if k < 0 else min(k, vocab_size) for k in counts]
    values, ids = logprobs.topk(max(counts), dim=-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(-1))
    ranks = (logprobs > chosen).sum(-1) + 1
    rows = zip(token_ids, counts, values.tolist(), ids.tolist(), chosen.tolist(), ranks.tolist(),
               strict=True)  # fmt: skip
    return [
        {token_id: Logprob(own[0], own_rank)}
        | {
            i: Logprob(v, rank)
            for rank, (i, v) in enumerate(zip(i_row[:k], v_row[:k], strict=True), 1)
        }
        for token_id, k, v_row, i_row, own, own_rank in rows
    ]


def _adjust(logits: Tensor, sampling: SamplingBatch) -> None:
    """Biases, forbidden ids and penalties, in place; vLLM's order and formulas."""

    def add(entries: Entries | None) -> None:
        if entries is not None:
            where = (entries.rows, entries.token_ids)
            logits.index_put_(where, entries.values, accumulate=True)

    add(sampling.added)
    if sampling.repetition is not None:
        rows, ids, factors = sampling.repetition
        seen = logits[rows, ids]
        logits[rows, ids] = torch.where(seen > 0, seen / factors, seen * factors)
    add(sampling.penalties)
