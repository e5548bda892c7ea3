"""The gated delta rule: attention whose past is one matrix, written and read at every token.

A value head keeps a state S [DK, DV]: what it answers when it is asked for a key. A token lets all
of it fade, then corrects what its own key is answered by, then asks:

    S = e^g S                       g = -e^A softplus(a + dt_bias) <= 0
    S = S + k (beta (v - k S))      beta = sigmoid(b): how much of the error is corrected
    o = q S                         q, k of length 1; q / sqrt(DK)

Three forms of it give the same numbers:

`gated_delta_ref`     token by token, as it stands above: the definition.
`gated_delta_chunks`  64 tokens at a time: what the tokens of a chunk do to one another is a
                      triangular system, the rest are products of matrices. It takes more operations
                      and far fewer steps, which is what a machine with matrix units wants.
gated_delta.cpp       token by token again, with a part of the state in the CPU's first cache: a
                      CPU has no use for the products (docs/11_gated_delta_net.md has the figures).

Every key head serves HV / HK value heads, neighbours of each other. A sequence starts from the
state in the slot `sources[s]` and leaves it in `slots[s]`; source 0, the null slot, is zeros.

Source: Yang et al., Gated Delta Networks (2024). T tokens of S sequences.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.build import pointers
from nanoinfer.kernels.causal_conv import NULL_SLOT, bad_state, check_states

CHUNK = 64
_EPS = 1e-6  # inside the root of a length


class Decay(NamedTuple):
    """What turns `a` into a head's decay: -e^A_log softplus(a + dt_bias)."""

    A_log: Tensor  # [HV] fp32
    dt_bias: Tensor  # [HV] fp32


GatedDelta = Callable[..., Tensor]
Recurrence = Callable[..., tuple[Tensor, Tensor]]


def make_gated_delta(recurrence: Recurrence) -> GatedDelta:
    """The op around one form of the rule: prepare q, k, g, beta; walk over the sequences."""

    def gated_delta(
        q: Tensor,  # [T, HK, DK], rows may be strided
        k: Tensor,  # [T, HK, DK]
        v: Tensor,  # [T, HV, DV]
        a: Tensor,  # [T, HV]
        b: Tensor,  # [T, HV]
        decay: Decay,
        state: Tensor,  # [num_slots, HV, DK, DV] fp32, changed
        cu_seqlens_q: Tensor,  # [S + 1] int32
        sources: Tensor,  # [S] int32
        slots: Tensor,  # [S] int32
    ) -> Tensor:  # [T, HV, DV]
        per_key = v.shape[1] // k.shape[1]
        q, k = _normalise(q), _normalise(k)
        q = q.repeat_interleave(per_key, 1) * q.shape[-1] ** -0.5
        k = k.repeat_interleave(per_key, 1)
        g = -decay.A_log.exp() * F.softplus(a.float() + decay.dt_bias)
        out, bounds = torch.empty(v.shape, dtype=v.dtype, device=v.device), cu_seqlens_q.tolist()
        for s, (source, slot) in enumerate(zip(sources.tolist(), slots.tolist(), strict=True)):
            rows = slice(bounds[s], bounds[s + 1])
            before = state[source] if source != NULL_SLOT else torch.zeros_like(state[source])
            tokens = (q[rows], k[rows], v[rows].float(), g[rows], b[rows].float().sigmoid())
            o, after = recurrence(*(x.transpose(0, 1) for x in tokens), before)
            out[rows] = o.transpose(0, 1).to(out.dtype)
            state[slot] = after
        return out

    return gated_delta


def _normalise(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def by_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [H, n, DK], v [H, n, DV], g, beta [H, n], state [H, DK, DV] -> o [H, n, DV], state."""
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None].exp()
        error = v[:, t] - torch.einsum("hk,hkv->hv", k[:, t], state)
        state = state + torch.einsum("hk,hv->hkv", k[:, t], error * beta[:, t, None])
        out.append(torch.einsum("hk,hkv->hv", q[:, t], state))
    return torch.stack(out, 1) if out else v, state


def by_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, a chunk of tokens at a time.

    Token i of a chunk writes k_i u_i, where u_i = beta_i (v_i - what k_i is answered by). That
    answer is the old state's, faded, and those of the tokens before it:

        u_i + beta_i sum over j < i of e^(G_i - G_j) (k_i k_j) u_j  =  beta_i (v_i - e^G_i k_i S)

    G being the sum of g within the chunk: a triangular system for all u at once.
    """
    out = []
    for start in range(0, q.shape[1], CHUNK):
        qc, kc, vc, gc, bc = (x[:, start : start + CHUNK] for x in (q, k, v, g, beta))
        G = gc.cumsum(1)  # [H, c]
        fade = (G[:, :, None] - G[:, None, :]).tril().exp().tril()  # [H, c, c], of j until i
        system = bc[:, :, None] * fade * (kc @ kc.mT)  # its diagonal counts as 1
        known = bc[..., None] * (vc - G.exp()[..., None] * (kc @ state))
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        out.append(G.exp()[..., None] * (qc @ state) + (fade * (qc @ kc.mT)) @ u)
        left = (G[:, -1:] - G).exp()[..., None] * kc  # what of each key is left at the end
        state = state * G[:, -1, None, None].exp() + left.mT @ u
    return torch.cat(out, 1) if out else v, state


gated_delta_ref = make_gated_delta(by_token)
gated_delta_chunks = make_gated_delta(by_chunk)


def make_gated_delta_cpu(library: ctypes.CDLL, threads: int) -> GatedDelta:
    """Bind the C++ twin: bf16 or fp32 rows, strided; heads side by side.

    The function raises ValueError for tensors that the kernel cannot take, and for slots outside
    the state.
    """
    kernel = library.nanoinfer_gated_delta
    tensors, sizes = [ctypes.c_void_p] * 12, [ctypes.c_int64] * 12
    kernel.argtypes = [ctypes.c_int, *tensors, *sizes, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def gated_delta_cpu(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        decay: Decay,
        state: Tensor,
        cu_seqlens_q: Tensor,
        sources: Tensor,
        slots: Tensor,
    ) -> Tensor:
        _check(q, k, v, a, b, decay, state)
        check_states(state, cu_seqlens_q, sources, slots)
        out = torch.empty(v.shape, dtype=v.dtype)
        addresses = pointers(out, state, q, k, v, a, b, *decay, cu_seqlens_q, sources, slots)
        (T, HK, DK), (_, HV, DV) = q.shape, v.shape
        strides = (q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0))
        sizes = (len(slots), T, HK, HV, DK, DV, len(state), *strides)
        invalid = kernel(v.dtype == torch.bfloat16, *addresses, *sizes, threads)
        if invalid >= 0:
            raise bad_state(invalid, sources, slots, len(state))
        return out

    return gated_delta_cpu


def _check(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, decay: Decay, state: Tensor
) -> None:
    (T, HK, DK), (HV, DV) = q.shape, v.shape[1:]
    rows = {"q": (q, (HK, DK)), "k": (k, (HK, DK)), "v": (v, (HV, DV)), "a": (a, (HV,))}
    for name, (x, shape) in {**rows, "b": (b, (HV,))}.items():
        is_dense = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
        if x.shape != (T, *shape) or not is_dense or x.dtype != v.dtype or not x.is_cpu:
            raise ValueError(
                f"{name}: got {x.dtype} {tuple(x.shape)} of strides {x.stride()} on {x.device}, "
                f"need {v.dtype} {(T, *shape)}, heads side by side, on cpu; try gated_delta_chunks"
            )
    is_known = v.dtype in (torch.bfloat16, torch.float32) and HV % HK == 0
    is_known = is_known and all(x.dtype == torch.float32 and x.is_contiguous() for x in decay)
    if not is_known or state.dtype != torch.float32 or state.shape[1:] != (HV, DK, DV):
        raise ValueError(
            f"v, decay, state: got {v.dtype}, {decay[0].dtype}, {state.dtype} "
            f"{tuple(state.shape)}, need bfloat16 or float32, float32, float32 "
            f"[slots, {HV}, {DK}, {DV}], and value heads a multiple of key heads"
        )
