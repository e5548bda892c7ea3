"""SwiGLU's activation: silu(gate) * up, from one tensor that holds both halves."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul_ref(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2N] -> [..., N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
