"""One token id for each row of logits.

A draw has one definition: of the ids that min_p, top_k and top_p leave, the one with the largest

    logit / temperature + g(key, id),    g = -log(-log u), u in (0, 1) from a hash (gumbel.py)

By the Gumbel-max trick this is a sample from the softmax. A row with temperature 0 takes the
largest logit. The filters only need a threshold per row, and the vocabulary is never sorted.

Noise is bounded (24-bit u: g <= 17.4), so the reference computes it only where it can still decide:
first for the largest few logits; then, if the rest could still win, for ids whose hash alone is
large enough. The C++ twin goes over each row while it is in the cache.

R rows, V vocabulary, C candidates.
"""

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.gumbel import MAX_NOISE, draw_wide, gumbel, hash_ids

_NUM_CANDIDATES = 64
_SORTED_AT_ONCE = 1024

Draw = Callable[..., Tensor]


def draw_ref(
    logits: Tensor,  # [R, V] fp32, changed in place
    temperatures: Tensor,  # [R] fp32, 0: the largest
    top_k: Tensor,  # [R] int64, 0: off
    top_p: Tensor,  # [R] fp32, 1: off
    min_p: Tensor,  # [R] fp32, 0: off
    keys: Tensor,  # [R] int32, gumbel.row_keys
) -> Tensor:
    """-> token ids [R], int64; the lowest id among equals."""
    rows = temperatures.nonzero().flatten()
    filters = (top_k, top_p, min_p)
    if len(rows) == len(logits):
        return _draw(logits, temperatures, filters, keys)
    token_ids = logits.argmax(-1)
    if len(rows) > 0:
        chosen = tuple(values[rows] for values in filters)
        token_ids[rows] = _draw(logits[rows], temperatures[rows], chosen, keys[rows])
    return token_ids


def make_draw_cpu(library: ctypes.CDLL, threads: int) -> Draw:
    """Bind the C++ twin: logits fp32, their rows may be strided.

    The function raises ValueError for tensors that the kernel cannot take.
    """
    kernel = library.nanoinfer_draw
    kernel.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 6, ctypes.c_int]
    kernel.restype = None

    def draw_cpu(
        logits: Tensor,
        temperatures: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        keys: Tensor,
    ) -> Tensor:
        if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
            raise ValueError(
                f"logits: got {logits.dtype} {tuple(logits.shape)}, strides {logits.stride()}, "
                "need [R, V] of float32, rows contiguous; try logits.float().contiguous()"
            )
        R, V = logits.shape
        given = (temperatures, top_k, top_p, min_p, keys)
        for tensor, dtype in zip(given, _DTYPES, strict=True):
            if tensor.shape != (R,) or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(
                    f"parameters of rows: got {tensor.dtype} {tuple(tensor.shape)}, need {dtype} "
                    f"[{R}], contiguous; try SamplingBatch"
                )
        token_ids = torch.empty(R, dtype=torch.int64)
        addresses = pointers(*given, token_ids)
        kernel(logits.data_ptr(), R, V, logits.stride(0), *addresses, threads)
        return token_ids

    return draw_cpu


_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32, torch.int32)


def _draw(
    logits: Tensor, temperatures: Tensor, filters: tuple[Tensor, ...], keys: Tensor
) -> Tensor:
    """The definition in the module's docstring, for rows with a temperature. [R, V] -> [R]."""
    # The largest score becomes 0, so that a tiny temperature gives -inf elsewhere and never NaN.
    scores = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures.unsqueeze(-1))
    num_candidates = min(_NUM_CANDIDATES, scores.size(-1))
    values, ids = scores.topk(num_candidates, dim=-1)  # [R, C]
    thresholds = _thresholds(scores, values, *filters)  # an id is kept if its score is >= this
    noisy = values + gumbel(hash_ids(keys.unsqueeze(-1), ids.to(torch.int32)))
    noisy.masked_fill_(values < thresholds.unsqueeze(-1), -math.inf)
    best, at = noisy.max(-1)
    token_ids = ids.gather(-1, at.unsqueeze(-1)).squeeze(-1)
    last = values[:, -1]  # as large as any score that is no candidate
    is_open = (last >= thresholds) & (last + MAX_NOISE > best) & (last > -math.inf)
    if num_candidates < scores.size(-1):
        for row in is_open.nonzero().flatten().tolist():
            token_ids[row] = draw_wide(scores[row], keys[row], thresholds[row], float(best[row]))
    return token_ids


def _thresholds(
    scores: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Smallest score that min_p, then top_k, then top_p leave; ties with it stay. [R]"""
    threshold = min_p.log()  # of a probability relative to the largest: score >= it
    kth = values.gather(-1, (top_k.clamp(1, values.size(-1)) - 1).unsqueeze(-1)).squeeze(-1)
    for row in (top_k > values.size(-1)).nonzero().flatten().tolist():
        kth[row] = scores[row].topk(min(int(top_k[row]), scores.size(-1))).values[-1]
    threshold = torch.where(top_k > 0, torch.maximum(threshold, kth), threshold)
    for row in (top_p < 1).nonzero().flatten().tolist():
        kept = scores[row], values[row], threshold[row]
        threshold[row] = _top_p_threshold(*kept, float(top_p[row]))
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
    if found is not None:
        return found
    return pool[-1] if len(pool) else threshold  # top_p within rounding of 1; a row of NaN


def _reach(descending: Tensor, target: Tensor) -> Tensor | None:
    """The first score at which the mass so far is `target`, if it gets there."""
    reached = (descending.exp().cumsum(-1, dtype=torch.float64) >= target).nonzero()
    return descending[reached[0, 0]] if len(reached) else None
