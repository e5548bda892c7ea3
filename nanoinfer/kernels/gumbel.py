"""Noise for sampling: the same number for the same (seed, position, token id), wherever it runs.

    h = 24 bits of mix(row key ^ mix(id)),   u = (h + 1/2) / 2^24,   g = -log(-log u)

and `draw_wide`, the argmax of score + g over all ids with score >= threshold, where it is known
that `best` has been reached already and that no score is above 0. Then g must be at least `best`,
which few hashes reach: only for those is a logarithm taken.

A hash instead of a generator has no state, so a draw depends on nothing but its own row. Gumbel
noise is bounded here (|g| <= 17.4, since u is at most 1 - 2^-25); draw.py builds on that.

Source: Gumbel-max trick (Gumbel, 1954; Maddison et al., 2014); the mix is murmur3's finaliser.
R rows, V vocabulary.
"""

import math

import torch
from torch import Tensor

BITS = 24
MAX_NOISE = -math.log(-math.log1p(-(2.0 ** -(BITS + 1))))


def draw_wide(scores: Tensor, key: Tensor, threshold: Tensor, best: float) -> Tensor:
    """scores [V] fp32, at most 0; key: the row's, int32; threshold: fp32 -> the id, int64."""
    hashes = hash_ids(key, torch.arange(scores.numel(), dtype=torch.int32, device=scores.device))
    ids = (hashes >= smallest_hash(best)).nonzero().flatten()
    ids = ids[scores[ids] >= threshold]
    return ids[(scores[ids] + gumbel(hashes[ids])).argmax()]


def smallest_hash(noise: float) -> int:
    """The least hash whose noise may be `noise` or more."""
    return int(math.exp(-math.exp(-noise)) * 2**BITS) - 1


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """One 32-bit key per row. seeds, positions [R] int64 -> [R] int32"""
    low, high = seeds.view(torch.int32).view(-1, 2).unbind(-1)
    return _mix(_mix(_mix(low.clone()).bitwise_xor_(high)).bitwise_xor_(positions.to(torch.int32)))


def hash_ids(keys: Tensor, ids: Tensor) -> Tensor:
    """24 random bits for each (row's key, token id). int32; `ids` is used up."""
    return _mix(keys ^ _mix(ids)).bitwise_and_(2**BITS - 1)


def gumbel(hashes: Tensor) -> Tensor:
    """-log(-log u), in fp64 so that no u rounds to 1."""
    u = (hashes.to(torch.float64) + 0.5) * 2.0**-BITS
    return -torch.log(-torch.log(u))


def _mix(x: Tensor) -> Tensor:
    """murmur3's finaliser on int32, in place: every bit of x reaches every bit of the result.

    `>>` copies the sign bit into the upper bits; the masks make it a logical shift.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x85EBCA6B - 2**32
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x
