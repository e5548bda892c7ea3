"""Which body runs behind attention: ours, or a library's that was asked for by name.

In: the table of kernels, what was chosen, and what the model's heads are. Out: the table.
"""

import logging

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.library_attention import load_attention

logger = logging.getLogger("nanoinfer")


def choose_attention(
    config: EngineConfig, kernels: Kernels, dtype: torch.dtype, head_dim: int
) -> Kernels:
    """ValueError where the library is missing, or cannot do what else was chosen."""
    name, kv_dtype = config.attention_backend, config.kv_cache_dtype
    if name == "auto":
        return kernels
    if kv_dtype != "auto":
        raise ValueError(
            f"attention_backend: {name} reads no caches in 8 bits, got {kv_dtype}; leave it at auto"
        )
    body = load_attention(name, config.torch_device, dtype, config.block_size, head_dim)
    logger.info("attention: %s", name)
    return kernels._replace(paged_attention=body)
