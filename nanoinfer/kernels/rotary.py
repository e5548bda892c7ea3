"""Rotary position embedding: pairs of dimensions turned by an angle that grows with position.

    [y1]   [cos  -sin] [x1]
    [y2] = [sin   cos] [x2]      x1 = x[..., : R/2],  x2 = x[..., R/2 : R]   (neox pairing)

One table row is [cos | sin] of one position, read once per token. T tokens, H heads, D head dim,
R rotated dims (R <= D; the rest passes through).
"""

import torch
from torch import Tensor


def rotary_ref(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """positions [T], query [T, H, D], key [T, KV, D], cos_sin [P, R] -> rotated query, key."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.size(-1)
    x1, x2 = x[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
