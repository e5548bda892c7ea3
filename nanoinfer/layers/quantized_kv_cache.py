"""Which caches keep keys and values in 8 bits, and how such a cache is laid out.

In: the specs of a model's layers, and what was asked for. Out: the same specs, or those of keys and
values exchanged for `QuantizedKVCacheSpec`s. An attention layer hands its cache on as it is: the
scales are one more argument of the two kernels (kernels/quantized_kv.py says what they are).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoinfer.config import KV_CACHE_DTYPES, EngineConfig
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.quantized_kv import KVScales
from nanoinfer.layers.attention import KVCacheSpec, zeros


class QuantizedKVCache(NamedTuple):
    """Keys and values of one layer, each [num_blocks, block_size, KV, D], and their scales."""

    k: Tensor
    v: Tensor
    scales: KVScales


@dataclass(frozen=True)
class QuantizedKVCacheSpec(KVCacheSpec):
    is_rotated: bool

    def bytes_per_unit(self, block_size: int) -> int:
        scales = 2 * block_size * self.num_kv_heads * torch.float32.itemsize
        return super().bytes_per_unit(block_size) + scales

    def allocate(self, num_units: int, block_size: int, device: torch.device) -> QuantizedKVCache:  # type: ignore[override]
        k, v = super().allocate(num_units, block_size, device)
        k_scales, v_scales = (zeros(k.shape[:3], torch.float32, device) for _ in range(2))
        return QuantizedKVCache(k, v, KVScales(k_scales, v_scales, self.is_rotated))


def choose_specs(config: EngineConfig, specs: list[Any], kernels: Kernels) -> list[Any]:
    """As the model has them, or in 8 bits. ValueError where the device cannot read these."""
    dtype = KV_CACHE_DTYPES[config.kv_cache_dtype]
    if dtype is None:
        return specs
    if dtype == torch.float8_e4m3fn and kernels.name == "triton" and not kernels.keeps_fp8:
        raise ValueError(
            "kv_cache_dtype: got fp8_e4m3, need a GPU of compute capability 8.9; try int8"
        )
    return [
        QuantizedKVCacheSpec(spec.num_kv_heads, spec.head_dim, dtype, config.kv_cache_rotation)
        if isinstance(spec, KVCacheSpec)
        else spec
        for spec in specs
    ]
