"""RMSNorm: one class, two calls.

    norm(x)            -> y                  the first norm of the model, q and k norms
    norm(x, residual)  -> (y, new_residual)  every other one: adds to the residual stream on the way

The second call is why a decoder layer hands `residual` on instead of adding it itself: the sum and
its norm read and write the stream once together, where two steps would each do so.

What differs between models is data:

    form "plain"      y = x^ * w               Qwen3, Llama: x^ is rounded first
    form "one_plus"   y = x^ * (1 + w)         Gemma, Qwen3.5: kept as 1 + w in fp32, rounded last
    form "log"        y = x^ * e^w             kept as e^w
    out_scale         y times a constant
    quantized         y is `Quantized`: FP8 values and scales, for a GEMM that wants them (with a
                      copy of the row before the cast, for a router that does not)

`norm(x, gate=g)` is the norm behind a gated delta net: times silu(g).
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanoinfer.kernels import Kernels
from nanoinfer.kernels.quantize import Quantized, ScaleLayout
from nanoinfer.layers.parameter import empty_parameter, load_whole

Form = Literal["plain", "one_plus", "log"]


class RMSNorm(nn.Module):
    """`factory` is the dtype and device of the weight; of "one_plus" the dtype is fp32."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        kernels: Kernels,
        form: Form = "plain",
        out_scale: float = 1.0,
        quantized: ScaleLayout | None = None,
        keep_copy: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._kernels = kernels
        self._form = form
        self._out_scale = out_scale
        self._quantized = quantized
        self._keep_copy = keep_copy
        if form == "one_plus":
            factory["dtype"] = torch.float32
        self.weight = empty_parameter(hidden_size, **factory)

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        """Fill the weight with what the rows are multiplied by."""
        if self._form == "one_plus":
            tensor = 1 + tensor.float()  # in bf16 the sum would lose bits of w
        elif self._form == "log":
            tensor = tensor.float().exp()
        load_whole(self.weight.data, tensor)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> Any:  # Tensor or Quantized; with a residual (that, Tensor)
        """x, residual, gate [..., N]; statistics in fp32 of the sum rounded to x's dtype.

        Raises ValueError for a residual of another shape, and for a gate beside a residual or a
        quantised output: no model has them.
        """
        if residual is not None and residual.shape != x.shape:
            shapes = f"{tuple(residual.shape)}, need x's {tuple(x.shape)}"
            raise ValueError(f"residual: got {shapes}; try residual.expand_as(x)")
        if gate is not None:
            if residual is not None or self._quantized is not None:
                raise ValueError("gate: got one beside a residual or FP8 output, need it alone")
            return self._kernels.rms_norm_gated(x, gate, self.weight, self.eps, self._out_scale)
        if self._quantized is not None:
            return self._quantize(x, residual, self._quantized)
        if residual is None:
            return self._kernels.rms_norm(x, self.weight, self.eps, self._out_scale)
        return self._kernels.add_rms_norm(x, residual, self.weight, self.eps, self._out_scale)

    def _quantize(
        self, x: Tensor, residual: Tensor | None, layout: ScaleLayout
    ) -> Quantized | tuple[Quantized, Tensor | None]:
        weight, keep_copy = self.weight, self._keep_copy
        y, new_residual = self._kernels.rms_norm_quantized(
            x, residual, weight, self.eps, layout, keep_copy, self._out_scale
        )
        return y if residual is None else (y, new_residual)
