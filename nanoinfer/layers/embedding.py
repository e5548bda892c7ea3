"""Token ids to vectors, and vectors to logits over the vocabulary.

A tied head is the same matrix read the other way round: `Embedding.weight` [V, E] serves both.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """ids [T] -> [T, E]; `factory` is the dtype and device of the weight."""

    def __init__(self, vocab_size: int, hidden_size: int, **factory: Any) -> None:
        super().__init__()
        shape = (vocab_size, hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, **factory), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> [R, V] in fp32: sampling compares small differences."""
        return F.linear(hidden, self.weight).float()
