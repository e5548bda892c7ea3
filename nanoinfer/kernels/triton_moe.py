"""Mixture of experts on a GPU: the Triton twin of moe_ref.

In, out and what must hold: moe.py says it. Visits (token, chosen expert) are sorted by expert, and
two grouped products follow. As in triton_attention.py the grid is known from shapes alone: of A
visits to X experts there are at most A // rows-in-a-tile + X tiles, and a program finds its expert
by bisection. Nothing is brought to the host.

Imported only on a machine with a GPU (or to test).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.moe import Experts, Routing, route
from nanoinfer.kernels.silu_mul import silu_mul_ref
from nanoinfer.kernels.triton_attention import find_group

_ROWS, _COLUMNS, _INNER = 16, 64, 64


@triton.jit
def _grouped_product(
    x, weights, out, visits, bounds, N, K, X, DIVISOR: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out[visit] = x[visit // DIVISOR] W^T of the visit's expert."""
    tile, n = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert = find_group(bounds, tile, X, ROWS)
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    first = begin + (tile - (begin // ROWS + expert)) * ROWS
    if first < end:
        row = first + tl.arange(0, ROWS)
        is_row, is_column = row < end, n < N
        visit = tl.load(visits + row, is_row, 0)
        from_x = x + (visit // DIVISOR)[:, None] * K
        from_w = weights + expert.to(tl.int64) * N * K + n[None, :] * K
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, K, INNER):
            k = start + tl.arange(0, INNER)
            is_k = k < K
            a = tl.load(from_x + k[None, :], is_row[:, None] & is_k[None, :], 0.0)
            b = tl.load(from_w + k[:, None], is_k[:, None] & is_column[None, :], 0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")  # of fp32 no less
        is_in = is_row[:, None] & is_column[None, :]
        tl.store(out + visit[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), is_in)


def moe_triton(x: Tensor, logits: Tensor, experts: Experts, routing: Routing) -> Tensor:
    weights, chosen = route(logits, routing)  # [T, K]
    visits = chosen.flatten().argsort(stable=True)  # [A], by expert
    num_experts = logits.shape[1]
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, chosen.flatten() + 1, torch.ones_like(visits))
    bounds = counts.cumsum(0)
    gate_up = _grouped(x.contiguous(), experts.gate_up, visits, bounds, routing.top_k)
    found = _grouped(silu_mul_ref(gate_up), experts.down, visits, bounds, 1)  # [A, E]
    found = found.view(*chosen.shape, -1).float() * weights[..., None]
    return found.sum(1).to(x.dtype)


def _grouped(x: Tensor, weights: Tensor, visits: Tensor, bounds: Tensor, divisor: int) -> Tensor:
    (X, N, K), A = weights.shape, len(visits)
    out = torch.empty((A, N), dtype=x.dtype, device=x.device)
    grid = (A // _ROWS + X, triton.cdiv(N, _COLUMNS))
    sizes = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "INNER": _INNER}
    _grouped_product[grid](x, weights, out, visits, bounds, N, K, X, divisor, **sizes)
    return out
