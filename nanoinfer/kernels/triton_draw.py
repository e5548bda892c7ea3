"""One token id for each row of logits on a GPU: the Triton twin.

In, out and the definition: draw.py. A program takes a row and goes over it a few times, in tiles,
and the host waits for nothing, whatever the filters.

Scores are at most 0, so that the bits of -score, as an integer, are in the order of -score: the
k-th largest, or the one at which the mass is reached, is searched four bits at a time:

    ends of 16 ranges     | . | . | . | x | . | ...    how much lies at or before each?
    the first with enough             ^ is cut into 16 in the next pass

Noise is computed in fp32 first; where it comes near the best it is computed again in fp64, as the
reference does, so that the winner is the reference's.

Imported only on a machine with a GPU (or to test).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_NEAR = tl.constexpr(1e-3)  # more than fp32's noise is off by


@triton.jit
def _distances(x, top, temperature, start, V, TILE: tl.constexpr):
    """-score of a tile, and which of its ids there are."""
    ids = start + tl.arange(0, TILE)
    logits = tl.load(x + ids, ids < V, -float("inf"))
    return tl.div_rn(top - logits, temperature), ids, ids < V  # rounded as the reference rounds


@triton.jit
def _search(
    x, top, temperature, V, share, limit, IS_MASS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The least bits of -score at or before which `share` lies: of the mass, or so many ids."""
    base, target = limit * 0, share
    part = tl.arange(0, 16).to(tl.uint32)
    for i in range(9):  # the first pass only finds out how much there is
        shift = tl.where(i == 0, 28, 32 - 4 * i).to(tl.uint32)
        ends = base + ((part + 1) << shift) - 1
        found = tl.zeros([16], tl.float32)
        for start in range(0, V, TILE):
            distance, _, is_in = _distances(x, top, temperature, start, V, TILE)
            bits = distance.to(tl.uint32, bitcast=True)
            weight = tl.exp(-distance) if IS_MASS else tl.full([TILE], 1.0, tl.float32)
            weight = tl.where(is_in & (bits <= limit), weight, 0.0)
            found += tl.sum(tl.where(bits[:, None] <= ends[None, :], weight[:, None], 0.0), 0)
        passed = tl.minimum(tl.sum((found < target).to(tl.int32), 0), 15).to(tl.uint32)
        base += tl.where(i == 0, 0, passed << shift)
        if IS_MASS:
            target = tl.where(i == 0, share * tl.max(found, 0), target)
    return tl.minimum(base, limit)


@triton.jit
def _mix(x):
    """murmur3's finaliser; x is uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_of(hashes):
    """gumbel.py's formula in fp32: near 1, log u is a series in 1 - u."""
    rest = ((16777215.0 - hashes.to(tl.float32)) + 0.5) * (1.0 / 16777216.0)  # 1 - u
    series = rest * (1.0 + rest * (0.5 + rest * (1.0 / 3.0 + rest * 0.25)))
    u = (hashes.to(tl.float32) + 0.5) * (1.0 / 16777216.0)
    return -tl.log(tl.where(rest < 0.01, series, -tl.log(u)))


@triton.jit
def _noisy(x, top, temperature, start, V, limit, key, is_greedy, TILE: tl.constexpr):
    """Score + noise of a tile in fp32, -inf for what is left out; scores, hashes and ids."""
    distance, ids, is_in = _distances(x, top, temperature, start, V, TILE)
    hashes = (_mix(key ^ _mix(ids.to(tl.uint32))) & 0xFFFFFF).to(tl.int32)
    noise = tl.where(is_greedy, 0.0, noise_of(hashes))
    is_kept = is_in & (distance.to(tl.uint32, bitcast=True) <= limit)
    return tl.where(is_kept, noise - distance, -float("inf")), distance, hashes, ids


@triton.jit
def _draw(
    logits, temperatures, top_k, top_p, min_p, keys, out, V, stride, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * stride
    highest = tl.full([TILE], -float("inf"), tl.float32)
    for start in range(0, V, TILE):
        ids = start + tl.arange(0, TILE)
        highest = tl.maximum(highest, tl.load(x + ids, ids < V, -float("inf")))
    top, temperature = tl.max(highest, 0), tl.load(temperatures + row)
    is_greedy = temperature == 0.0
    temperature = tl.where(is_greedy, 1.0, temperature)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    limit = tl.abs(tl.log(tl.load(min_p + row))).to(tl.uint32, bitcast=True)  # no -0.0
    if (k > 0) & (k < V):
        limit = _search(x, top, temperature, V, k.to(tl.float32), limit, False, TILE)
    if p < 1.0:
        limit = _search(x, top, temperature, V, p, limit, True, TILE)
    key = tl.load(keys + row).to(tl.uint32, bitcast=True)
    best = -float("inf")
    for start in range(0, V, TILE):
        noisy, _, _, _ = _noisy(x, top, temperature, start, V, limit, key, is_greedy, TILE)
        best = tl.maximum(best, tl.max(noisy, 0))
    found, winner = tl.full([], -float("inf"), tl.float64), V * 0
    for start in range(0, V, TILE):
        noisy, distance, hashes, ids = _noisy(
            x, top, temperature, start, V, limit, key, is_greedy, TILE
        )
        if tl.max(noisy, 0) >= best - _NEAR:
            u = (hashes.to(tl.float64) + 0.5) * (1.0 / 16777216.0)
            exact = tl.where(is_greedy, 0.0, -tl.log(-tl.log(u))) - distance
            exact = tl.where(noisy >= best - _NEAR, exact, -float("inf"))
            highest_here = tl.max(exact, 0)
            if highest_here > found:
                found = highest_here
                winner = tl.min(tl.where(exact == highest_here, ids, V), 0)
    tl.store(out + row, winner.to(tl.int64))


def draw_triton(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    keys: Tensor,
) -> Tensor:
    R, V = logits.shape
    out = torch.empty(R, dtype=torch.int64, device=logits.device)
    if R > 0:
        given = (temperatures, top_k, top_p, min_p, keys)
        _draw[(R,)](logits, *given, out, V, logits.stride(0), TILE=_TILE, num_warps=8)
    return out
