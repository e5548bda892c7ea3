"""Token ids to vectors.

A tied head (layers/linear.py) is the same matrix read the other way round: its `weight` [V, E]
serves both.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.layers.parameter import empty_parameter, load_whole


class Embedding(nn.Module):
    """ids [T] -> [T, E]; `factory` is the dtype and device of the weight."""

    def __init__(self, vocab_size: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, hidden_size, **factory)

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        load_whole(self.weight.data, tensor)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)
