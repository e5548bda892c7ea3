"""Parameters: made empty, filled later with a checkpoint's tensor or one rank's slice of it.

Invariant: a tensor of another shape is refused, never broadcast. Floats only: a quantised tensor
without its scales would be nonsense.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def empty_parameter(*shape: int, **factory: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, **factory), requires_grad=False)


class Parallel(NamedTuple):
    """Which of `size` ranks this one is."""

    rank: int = 0
    size: int = 1

    def share(self, name: str, count: int) -> int:
        """How many of `count` equal things each rank gets; ValueError if that is no integer."""
        if count % self.size != 0:
            raise ValueError(f"{name}: got {count}, need a multiple of {self.size} ranks")
        return count // self.size


ONE_RANK = Parallel()


class Cut(NamedTuple):
    """Rows (or columns) start : start + length of a checkpoint's tensor go to `target` on."""

    full: int  # how many the checkpoint's tensor has
    start: int
    length: int
    target: int = 0


def load_whole(parameter: Tensor, tensor: Tensor) -> None:
    """Raises ValueError for a wrong shape or dtype."""
    _check(tensor, [*parameter.shape])
    parameter.copy_(tensor)


def load_cut(parameter: Tensor, tensor: Tensor, cut: Cut, dim: int = 0) -> None:
    """Copy the slice of `tensor` along `dim`. Raises ValueError for a wrong shape or dtype."""
    shape = [*parameter.shape]
    shape[dim] = cut.full
    _check(tensor, shape)
    source = tensor.narrow(dim, cut.start, cut.length)
    parameter.narrow(dim, cut.target, cut.length).copy_(source)


def _check(tensor: Tensor, shape: list[int]) -> None:
    if [*tensor.shape] != shape or tensor.dtype not in _FLOATS:
        raise ValueError(
            f"is {tensor.dtype} {[*tensor.shape]}, need float {shape} as config.json says"
        )
