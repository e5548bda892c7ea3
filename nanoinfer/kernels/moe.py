"""Mixture of experts: every token goes through the few MLPs that the router scores highest.

    p = softmax(logits)                     over all X experts
    y = sum over the K largest p:  p_e (or p_e / their sum)  *  down_e(silu(gate_e x) * up_e x)

Tokens are sorted by expert, so that one product serves all tokens of an expert and a weight is read
once; an expert that nobody chose is not read at all:

    token   0  1  2  3         sorted   expert 2: 0 3    expert 5: 0 1 2    expert 7: 1 2 3
    chose   25 57 57 27

Routing weights and the sum over experts are fp32, rounded once. T tokens, E hidden, X experts, I
inner size, K chosen.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.linear import to_blocks
from nanoinfer.kernels.silu_mul import silu_mul_ref


class Experts(NamedTuple):
    """Weights of all experts, plain or as a kernel wants them."""

    gate_up: Tensor  # plain: [X, 2I, E], gate above up
    down: Tensor  # plain: [X, E, I]


class Routing(NamedTuple):
    top_k: int
    is_normalised: bool


PackExperts = Callable[[Experts], Experts]
Moe = Callable[..., Tensor]


def pack_experts_never(experts: Experts) -> Experts:
    return experts


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, X] -> weights [T, K] fp32, experts [T, K]."""
    weights, chosen = logits.float().softmax(-1).topk(routing.top_k, dim=-1)
    if routing.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def moe_ref(x: Tensor, logits: Tensor, experts: Experts, routing: Routing) -> Tensor:
    """x [T, E], logits [T, X] -> [T, E] in x's dtype."""
    weights, chosen = route(logits, routing)
    order = chosen.flatten().argsort(stable=True)  # [T * K], by expert
    counts = chosen.flatten().bincount(minlength=logits.shape[1])
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, own in enumerate(order.split(counts.tolist())):
        if len(own) == 0:
            continue
        tokens = own // routing.top_k
        hidden = silu_mul_ref(F.linear(x[tokens], experts.gate_up[expert]))
        found = F.linear(hidden, experts.down[expert]).float()
        y.index_add_(0, tokens, found * weights.flatten()[own, None])
    return y.to(x.dtype)


class MoeCpu:
    """The C++ twin, and the order in which it reads weights: blocks, as a packed linear layer's."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._threads = threads
        self._kernel = library.nanoinfer_moe
        tensors, sizes = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 6
        flags = [ctypes.c_int, ctypes.c_int]
        self._kernel.argtypes = [*flags, *tensors, *sizes, ctypes.c_int64, ctypes.c_int]
        self._kernel.restype = None

    def pack(self, experts: Experts) -> Experts:
        """Plain weights in blocks: gate, up and down, each filled up to whole blocks of rows."""
        gate, up = experts.gate_up.chunk(2, dim=1)
        halves = torch.stack([_to_blocks(gate), _to_blocks(up)], 1)  # [X, 2, I/64, E/P, 64, P]
        return Experts(halves, _to_blocks(experts.down))

    def moe(self, x: Tensor, logits: Tensor, experts: Experts, routing: Routing) -> Tensor:
        """ValueError for tensors that the kernel cannot take."""
        (T, E), (num_experts, X) = x.shape, (len(experts.down), logits.shape[1])
        per_unit = 4 // x.itemsize
        I = experts.down.shape[2] * per_unit  # noqa: E741
        is_known = x.dtype in (torch.bfloat16, torch.float32) and experts.down.dtype == x.dtype
        is_known = is_known and logits.dtype == torch.float32 and x.is_cpu and logits.is_cpu
        is_whole = experts.gate_up.shape[3] * per_unit == E and num_experts == X
        if not is_known or not is_whole or logits.shape[0] != T or routing.top_k > X:
            raise ValueError(
                f"x, logits: got {x.dtype} {tuple(x.shape)}, {logits.dtype} "
                f"{tuple(logits.shape)} for experts of {experts.down.dtype} "
                f"{tuple(experts.down.shape)}; need bfloat16 or float32 [T, E], float32 [T, X] on "
                "cpu, and packed experts of x's dtype; try moe_ref"
            )
        x, logits = (t if t.stride(1) == 1 else t.contiguous() for t in (x, logits))
        y = torch.empty((T, E), dtype=x.dtype)
        addresses = pointers(y, x, logits, experts.gate_up, experts.down)
        sizes = (T, E, I, X, x.stride(0), logits.stride(0))
        flags = x.dtype == torch.bfloat16, routing.is_normalised
        self._kernel(*flags, *addresses, *sizes, routing.top_k, self._threads)
        return y


def _to_blocks(weight: Tensor) -> Tensor:
    """[X, N, K] -> [X, N/64, K/P, 64, P], with rows of zeros behind the last."""
    per_unit = 4 // weight.itemsize
    if weight.shape[2] % per_unit != 0:
        raise ValueError(
            f"experts: got rows of {weight.shape[2]} values, need a multiple of {per_unit}; try "
            'kernels="ref"'
        )
    return to_blocks(weight)
