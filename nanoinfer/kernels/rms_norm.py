"""RMSNorm, alone and fused with the residual addition before it.

    y = x / sqrt(mean(x^2) + eps) * weight

Statistics are fp32, whatever x is: a sum of a thousand squares overflows fp16 and loses bf16's few
bits. The residual stream is added first and rounded to x's dtype; the norm is of the rounded sum,
so that what the next layer adds to is exactly what was normalised.
"""

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> y [..., N] in x's dtype."""
    hidden = x.float()
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)).to(x.dtype) * weight


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., N] -> (norm(x + residual), x + residual), both in x's dtype."""
    residual = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_ref(residual, weight, eps), residual
