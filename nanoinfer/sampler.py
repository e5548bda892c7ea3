"""Logits to tokens, and to log probabilities.

In: logits [R, V] in fp32, how each row is drawn (`SamplingBatch`).
Out: one token id per row; raw log probabilities where asked for.

A draw has one definition: of the ids that top_k, top_p and min_p leave, the one with the largest

    logit / temperature + g(seed, position, id),    g = -log(-log u)

where u in (0, 1) comes from an integer hash of (seed, position, id). By the Gumbel-max trick this
is a sample from the softmax. There is no generator and no state, so a row draws the same token
whatever its neighbours, chunking, preemption or device; the filters only need a threshold per row.

Noise is bounded (24-bit u: g <= 17.4), so it is computed only where it can still decide: first for
the largest few logits; then, if the rest could still win, for ids whose hash alone is large enough.
The vocabulary is never sorted as a whole.

R rows, V vocabulary, C candidates.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanoinfer.batch import Entries, SamplingBatch
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.gumbel import MAX_NOISE, gumbel, hash_ids, row_keys
from nanoinfer.outputs import Logprob

_NUM_CANDIDATES = 64
_SORTED_AT_ONCE = 1024


class SamplerOutput(NamedTuple):
    token_ids: list[int]  # [R]
    logprobs: list[dict[int, Logprob] | None]  # [R]


def sample(logits: Tensor, sampling: SamplingBatch, kernels: Kernels) -> SamplerOutput:
    """Draw one id per row of logits [R, V] (fp32; changed in place)."""
    wanted = [row for row, k in enumerate(sampling.num_logprobs) if k is not None]
    raw = logits[wanted].log_softmax(-1) if wanted else None
    _adjust(logits, sampling)
    rows = sampling.temperatures.nonzero().flatten()
    if len(rows) == len(logits):
        token_ids = _draw(logits, sampling, rows, kernels)
    else:
        token_ids = logits.argmax(-1)  # the lowest id among equals
        if len(rows) > 0:
            token_ids[rows] = _draw(logits[rows], sampling, rows, kernels)
    ids = token_ids.tolist()
    logprobs: list[dict[int, Logprob] | None] = [None] * len(ids)
    if raw is not None:
        counts = [k for k in sampling.num_logprobs if k is not None]
        found = top_logprobs(raw, [ids[row] for row in wanted], counts)
        for row, value in zip(wanted, found, strict=True):
            logprobs[row] = value
    return SamplerOutput(ids, logprobs)


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


def _draw(logits: Tensor, sampling: SamplingBatch, rows: Tensor, kernels: Kernels) -> Tensor:
    """The definition in the module's docstring, for rows with a temperature. [R, V] -> [R]."""
    # The largest score becomes 0, so that a tiny temperature gives -inf elsewhere and never NaN.
    scores = logits.sub_(logits.amax(-1, keepdim=True))
    scores.div_(sampling.temperatures[rows].unsqueeze(-1))
    keys = row_keys(sampling.seeds[rows], sampling.positions[rows])
    num_candidates = min(_NUM_CANDIDATES, scores.size(-1))
    values, ids = scores.topk(num_candidates, dim=-1)  # [R, C]
    thresholds = torch.full_like(values[:, 0], -math.inf)  # an id is kept if its score is >= this
    if sampling.has_filters:
        thresholds = _thresholds(scores, values, sampling, rows)
    noisy = values + gumbel(hash_ids(keys.unsqueeze(-1), ids.to(torch.int32)))
    noisy.masked_fill_(values < thresholds.unsqueeze(-1), -math.inf)
    best, at = noisy.max(-1)
    token_ids = ids.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    last = values[:, -1]  # as large as any score that is no candidate
    is_open = (last >= thresholds) & (last + MAX_NOISE > best) & (last > -math.inf)
    if num_candidates < scores.size(-1):
        for row in is_open.nonzero().flatten().tolist():
            row_best = float(best[row])
            token_ids[row] = kernels.draw_wide(scores[row], keys[row], thresholds[row], row_best)
    return token_ids


def _thresholds(scores: Tensor, values: Tensor, sampling: SamplingBatch, rows: Tensor) -> Tensor:
    """Smallest score that min_p, then top_k, then top_p leave; ties with it stay. [R]"""
    threshold = sampling.min_p[rows].log()  # of a probability relative to the largest: score >= it
    top_k = sampling.top_k[rows]
    kth = values.gather(-1, (top_k.clamp(1, values.size(-1)) - 1).unsqueeze(-1)).squeeze(-1)
    for row in (top_k > values.size(-1)).nonzero().flatten().tolist():
        kth[row] = scores[row].topk(min(int(top_k[row]), scores.size(-1))).values[-1]
    threshold = torch.where(top_k > 0, torch.maximum(threshold, kth), threshold)
    for row in (sampling.top_p[rows] < 1).nonzero().flatten().tolist():
        top_p = float(sampling.top_p[rows[row]])
        threshold[row] = _top_p_threshold(scores[row], values[row], threshold[row], top_p)
    return threshold


def _top_p_threshold(scores: Tensor, values: Tensor, threshold: Tensor, top_p: float) -> Tensor:
    """The score at which the mass of the scores from the top down first reaches `top_p`.

    The few largest, `values`, mostly hold it. Else it is searched as in quickselect: split what is
    left in the middle of its range and go on with the part where the mass is reached.
    """
    pool = scores if values[-1] >= threshold else values  # all that are kept are in it
    pool = pool[(pool >= threshold) & (pool > -math.inf)]
    target = top_p * pool.exp().sum(dtype=torch.float64)
    found = _reach(values[values >= threshold], target)
    if found is not None:
        return found
    while pool.numel() > _SORTED_AT_ONCE:
        low, high = pool.aminmax()
        if low == high:
            return low
        middle = (low + high) / 2
        is_upper = pool >= torch.where(middle > low, middle, high)  # neighbours round to `low`
        mass = pool[is_upper].exp().sum(dtype=torch.float64)
        if mass >= target:
            pool = pool[is_upper]
        else:
            pool, target = pool[~is_upper], target - mass
    pool = pool.sort(descending=True).values
    found = _reach(pool, target)
    return pool[-1] if found is None else found  # None: top_p within rounding of 1


def _reach(descending: Tensor, target: Tensor) -> Tensor | None:
    """The first score at which the mass so far is `target`, if it gets there."""
    reached = (descending.exp().cumsum(-1, dtype=torch.float64) >= target).nonzero()
    return descending[reached[0, 0]] if len(reached) else None
