"""Linear layers: y = x W^T + b, and how fused ones are filled from a checkpoint.

In: x [..., K]; W [N, K] as the checkpoint has it. Out: y [..., N].

q, k and v (or gate and up) read the same input, so their weights are stacked into one matrix: one
GEMM instead of three. A fused layer knows where each part goes (`shards`); the loader asks it.

On a CPU with bf16 instructions `pack` re-orders the weight once into oneDNN's blocked layout, which
reads at 1.6 times the rate of the plain one for few rows. The plain copy is dropped: no weight is
held twice. M rows of x, K inputs, N outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """One weight; `out_features` may name the checkpoint's parts stacked in it, with their sizes.

    `factory` is the dtype and device of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        bias: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.shards = out_features if isinstance(out_features, dict) else {"": out_features}
        self.in_features = in_features
        self.out_features = sum(self.shards.values())
        shape = (self.out_features, in_features)
        self.weight = _parameter(torch.empty(shape, **factory))
        self.bias = _parameter(torch.empty(shape[:1], **factory)) if bias else None
        self._packed: Tensor | None = None

    def part(self, name: str, shard: str) -> Tensor:
        """Rows of parameter `name` ("weight" or "bias") that checkpoint part `shard` fills."""
        start = 0
        for other, size in self.shards.items():
            if other == shard:
                return getattr(self, name).data[start : start + size]
            start += size
        raise KeyError(shard)

    def pack(self) -> None:
        """Re-order the weight for oneDNN; afterwards `weight` is empty."""
        if self.weight.dtype == torch.bfloat16:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, 16)
            self.weight.data = torch.empty(0, dtype=self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
