"""SwiGLU: gate and up come from one GEMM, are combined in one pass, and go down again."""

from typing import Any

from torch import Tensor, nn

from nanoinfer.kernels import Kernels
from nanoinfer.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); `factory` is the dtype and device of the weights."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, kernels: Kernels, **factory: Any
    ) -> None:
        super().__init__()
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, sizes, **factory)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, **factory)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self._kernels.silu_mul(self.gate_up_proj(x)))
