"""Short causal convolution over the tokens of each sequence, channel by channel, then silu.

    y[t] = silu( sum over j < K of weight[j] * x[t - K + 1 + j] )

In front of a sequence's first token stand zeros; in front of a chunk the last K - 1 rows of the
chunk before, which are kept in a slot of the state: what a chunk leaves is read by the next.

    K = 4, a chunk of 2:    kept  x5 x6 x7  |  x8 x9      left:  x7 x8 x9
                            y8 = silu(w0 x5 + w1 x6 + w2 x7 + w3 x8)

A sequence reads its rows from the slot `sources[s]` and leaves them in `slots[s]`, which may be the
same. Source 0, the null slot, stands for zeros whatever it holds: nothing is ever cleared.

T tokens of S sequences, C channels, K taps.
"""

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.build import pointers

NULL_SLOT = 0

CausalConv = Callable[..., Tensor]


def causal_conv_ref(
    x: Tensor,  # [T, C]
    weight: Tensor,  # [K, C]
    state: Tensor,  # [num_slots, K - 1, C], changed
    cu_seqlens_q: Tensor,  # [S + 1] int32
    sources: Tensor,  # [S] int32
    slots: Tensor,  # [S] int32
) -> Tensor:
    """-> [T, C] in x's dtype; sums in fp32 of x's dtype, as F.conv1d has them."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bounds = cu_seqlens_q.tolist()
    for s, (source, slot) in enumerate(zip(sources.tolist(), slots.tolist(), strict=True)):
        first, last = bounds[s], bounds[s + 1]
        kept = state[source] if source != NULL_SLOT else torch.zeros_like(state[source])
        rows = torch.cat((kept.to(x.dtype), x[first:last]))  # [K - 1 + n, C]
        taps = weight.T.unsqueeze(1).to(x.dtype)  # [C, 1, K]
        mixed = F.conv1d(rows.T.unsqueeze(0), taps, groups=x.shape[1])  # [1, C, n]
        y[first:last] = F.silu(mixed[0].T)
        state[slot] = rows[len(rows) - len(kept) :].to(state.dtype)
    return y


def make_causal_conv_cpu(library: ctypes.CDLL, threads: int) -> CausalConv:
    """Bind the C++ twin. x may have strided rows; bf16 or fp32, the state of x's dtype.

    The function raises ValueError for tensors that the kernel cannot take, and for slots outside
    the state.
    """
    kernel = library.nanoinfer_causal_conv
    tensors, sizes = [ctypes.c_void_p] * 7, [ctypes.c_int64] * 6
    kernel.argtypes = [ctypes.c_int, *tensors, *sizes, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def causal_conv_cpu(
        x: Tensor,
        weight: Tensor,
        state: Tensor,
        cu_seqlens_q: Tensor,
        sources: Tensor,
        slots: Tensor,
    ) -> Tensor:
        (T, C), K = x.shape, len(weight)
        is_known = x.dtype in (torch.bfloat16, torch.float32) and state.dtype == x.dtype
        is_known = is_known and weight.dtype == torch.float32 and weight.shape == (K, C)
        if not is_known or state.shape[1:] != (K - 1, C) or x.stride(1) != 1:
            raise ValueError(
                f"x, weight, state: got {x.dtype} {tuple(x.shape)} of strides {x.stride()}, "
                f"{weight.dtype} {tuple(weight.shape)}, {state.dtype} {tuple(state.shape)}; need "
                "bfloat16 or float32 [T, C], float32 [K, C], x's dtype [slots, K - 1, C]; try "
                "causal_conv_ref"
            )
        check_states(state, cu_seqlens_q, sources, slots)
        y = torch.empty((T, C), dtype=x.dtype)
        addresses = pointers(y, state, x, weight, cu_seqlens_q, sources, slots)
        sizes = (len(slots), T, C, K, len(state), x.stride(0))
        invalid = kernel(x.dtype == torch.bfloat16, *addresses, *sizes, threads)
        if invalid >= 0:
            raise bad_state(invalid, sources, slots, len(state))
        return y

    return causal_conv_cpu


def check_states(state: Tensor, cu_seqlens_q: Tensor, sources: Tensor, slots: Tensor) -> None:
    """Raise ValueError for a state or indices that a kernel cannot walk over."""
    indices = (cu_seqlens_q, sources, slots)
    is_good = len(slots) == len(sources) == len(cu_seqlens_q) - 1
    is_good = is_good and all(i.dtype == torch.int32 and i.is_contiguous() for i in indices)
    if not is_good or not state.is_contiguous() or not all(t.is_cpu for t in (state, *indices)):
        found = ", ".join(f"{i.dtype} {tuple(i.shape)}" for i in indices)
        raise ValueError(
            f"cu_seqlens_q, sources, slots: got {found}, state strides {state.stride()}; need "
            "int32 [S + 1], [S], [S] and a state, all of them contiguous on cpu"
        )


def bad_state(sequence: int, sources: Tensor, slots: Tensor, num_slots: int) -> ValueError:
    found = f"source {sources[sequence].item()}, slot {slots[sequence].item()}"
    return ValueError(
        f"sequence {sequence}: got {found} or its tokens out of bounds, need slots of 0 to "
        f"{num_slots - 1}"
    )
