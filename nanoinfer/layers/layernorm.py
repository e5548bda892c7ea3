"""RMSNorm: one class, two calls.

    norm(x)            -> y                  the first norm of the model, q and k norms
    norm(x, residual)  -> (y, new_residual)  every other one: adds to the residual stream on the way

The second call is why a decoder layer hands `residual` on instead of adding it itself: the sum and
its norm read and write the stream once together, where two steps would each do so.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.kernels import Kernels


class RMSNorm(nn.Module):
    """`factory` is the dtype and device of the weight."""

    def __init__(self, hidden_size: int, eps: float, kernels: Kernels, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self._kernels = kernels
        self.weight = nn.Parameter(torch.empty(hidden_size, **factory), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x, residual [..., N]; statistics in fp32 of the sum rounded to x's dtype."""
        if residual is None:
            return self._kernels.rms_norm(x, self.weight, self.eps)
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps)
