"""Gated delta net: the layer whose past has one size, however long the sequence.

In: hidden [T, E]; the layer's state; the batch. Out: [T, E].

    hidden -> in_proj -> q k v -> conv, silu -> gated delta rule -> norm * silu(z) -> out_proj
                      -> z b a                  ^ state [HV, DK, DV] of the sequence's slot

The four projections read the same input and are one matrix. A sequence has a slot in the state: a
step starts from what its source slot holds (slot 0: nothing yet) and leaves the new state in its
own. Mostly they are one and the same; they differ where the old state is kept to start from again
(state_pool.py).

T tokens, HK key heads of DK, HV value heads of DV, C = 2 HK DK + HV DV channels, K taps.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from nanoinfer.batch import Batch
from nanoinfer.hybrid_config import DeltaConfig
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.gated_delta import Decay
from nanoinfer.layers.attention import zeros
from nanoinfer.layers.layernorm import RMSNorm
from nanoinfer.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanoinfer.layers.parameter import empty_parameter, load_whole
from nanoinfer.model_config import ModelConfig


class StateCache(NamedTuple):
    """One layer's states. Slot 0 is the null slot."""

    conv: Tensor  # [num_slots, K - 1, C]: the last inputs of the convolution
    state: Tensor  # [num_slots, HV, DK, DV] fp32


@dataclass(frozen=True)
class StateCacheSpec:
    """What one layer keeps of a sequence."""

    unit: ClassVar[str] = "slot"

    delta: DeltaConfig
    dtype: torch.dtype

    @property
    def num_channels(self) -> int:
        d = self.delta
        return 2 * d.num_key_heads * d.key_head_dim + d.num_value_heads * d.value_head_dim

    def bytes_per_unit(self, block_size: int) -> int:
        d = self.delta
        state = 4 * d.num_value_heads * d.key_head_dim * d.value_head_dim
        return state + self.dtype.itemsize * (d.conv_width - 1) * self.num_channels

    def allocate(self, num_units: int, block_size: int, device: torch.device) -> StateCache:
        d = self.delta
        conv = (num_units, d.conv_width - 1, self.num_channels)
        state = (num_units, d.num_value_heads, d.key_head_dim, d.value_head_dim)
        return StateCache(zeros(conv, self.dtype, device), zeros(state, torch.float32, device))


class CausalConv1d(nn.Module):
    """The taps, [K, C] in fp32: a channel's lie apart, neighbours' side by side."""

    def __init__(self, num_channels: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.weight = empty_parameter(width, num_channels, **{**factory, "dtype": torch.float32})

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        """From the checkpoint's [C, 1, K]."""
        load_whole(self.weight.data, tensor.flatten(1).T)


class GatedDeltaNet(nn.Module):
    """`factory` is the dtype and device of the weights; taps and decay are fp32."""

    def __init__(self, config: ModelConfig, kernels: Kernels, **factory: Any) -> None:
        super().__init__()
        delta, hidden_size, eps = config.delta, config.hidden_size, config.rms_norm_eps
        assert delta is not None, "layer_types has a linear_attention"
        self.cache_spec = StateCacheSpec(delta, factory["dtype"])
        num_values = delta.num_value_heads * delta.value_head_dim
        sizes = {"in_proj_qkv": self.cache_spec.num_channels, "in_proj_z": num_values}
        sizes |= {"in_proj_b": delta.num_value_heads, "in_proj_a": delta.num_value_heads}
        self._sizes = list(sizes.values())
        self.in_proj = MergedColumnParallelLinear(hidden_size, sizes, **factory)
        self.conv1d = CausalConv1d(self.cache_spec.num_channels, delta.conv_width, **factory)
        wide = {**factory, "dtype": torch.float32}
        self.A_log = empty_parameter(delta.num_value_heads, **wide)
        self.dt_bias = empty_parameter(delta.num_value_heads, **wide)
        self.norm = RMSNorm(delta.value_head_dim, eps, kernels, **factory)
        self.out_proj = RowParallelLinear(num_values, hidden_size, **factory)
        self._delta = delta
        self._kernels = kernels

    def load(self, name: str, part: str, tensor: Tensor) -> None:
        """A_log or dt_bias."""
        load_whole(getattr(self, name).data, tensor)

    def forward(
        self, hidden: Tensor, cache: StateCache, batch: Batch, rows: Tensor | None
    ) -> Tensor:
        qkv, z, b, a = self.in_proj(hidden).split(self._sizes, dim=-1)
        places = (batch.cu_seqlens_q, *batch.states)
        qkv = self._kernels.causal_conv(qkv, self.conv1d.weight, cache.conv, *places)
        q, k, v = self._heads(qkv)
        decay = Decay(self.A_log, self.dt_bias)
        out = self._kernels.gated_delta(q, k, v, a, b, decay, cache.state, *places)  # [T, HV, DV]
        z = z.unflatten(-1, out.shape[1:])
        if rows is not None:
            out, z = out[rows], z[rows]
        return self.out_proj(self.norm(out, gate=z).flatten(-2))

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, C] -> [T, HK, DK], [T, HK, DK], [T, HV, DV]."""
        d = self._delta
        num_keys = d.num_key_heads * d.key_head_dim
        q, k, v = qkv.split([num_keys, num_keys, qkv.shape[-1] - 2 * num_keys], dim=-1)
        keys, values = (-1, d.key_head_dim), (-1, d.value_head_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, values)
