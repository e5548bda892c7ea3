"""Write a step's keys and values into the paged cache.

    cache[slot // block_size, slot % block_size] = row,   slot = slot_mapping[token]

In: k, v of all tokens of the step, one slot for each. Out: nothing; both caches change in place.

Invariant: no slot is written twice in a step, save those of block 0, the null block, which takes
the rows of padding and is never read. So padding needs no branch and no mask.

A production engine fuses this with the rotary embedding and the norm of q and k.

Shapes: T tokens in the step, K kv heads, D head dim.
"""

import torch
from torch import Tensor


def store_kv_ref(
    k: Tensor,  # [T, K, D], rows may be strided
    v: Tensor,  # [T, K, D]
    k_cache: Tensor,  # [num_blocks, block_size, K, D]
    v_cache: Tensor,  # [num_blocks, block_size, K, D]
    slot_mapping: Tensor,  # [T] int64
) -> None:
    """Copy row t of k and v to slot slot_mapping[t] of their caches."""
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.shape != (len(slot_mapping), *cache.shape[2:]) or rows.dtype != cache.dtype:
            raise ValueError(
                f"{name}: got {tuple(rows.shape)} {rows.dtype}, need "
                f"{(len(slot_mapping), *cache.shape[2:])} {cache.dtype}, one row for each slot "
                "of its cache; try .view(-1, num_kv_heads, head_dim)"
            )
    if slot_mapping.dtype != torch.int64:
        raise ValueError(
            f"slot_mapping: got {slot_mapping.dtype}, need torch.int64; try .to(torch.int64)"
        )
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v)
