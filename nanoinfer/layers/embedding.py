"""Token ids to vectors.

A tied head (layers/linear.py) is the same matrix read the other way round: its `weight` [V, E]
serves both, and where the head is packed, its blocks do.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.kernels.linear import rows_of_blocks
from nanoinfer.layers.parameter import empty_parameter, load_whole


class Embedding(nn.Module):
    """ids [T] -> [T, E]; `factory` is the dtype and device of the weight."""

    def __init__(self, vocab_size: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, **factory)
        self._blocks: Tensor | None = None

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        load_whole(self.weight.data, tensor)

    def read_from(self, blocks: Tensor) -> None:
        """Drop the weight: it is in these blocks, which the tied head owns."""
        self._blocks = blocks
        self.weight.data = self.weight.data[:0].clone()

    def forward(self, input_ids: Tensor) -> Tensor:
        if self._blocks is not None:
            return rows_of_blocks(self._blocks, input_ids)
        return F.embedding(input_ids, self.weight)
