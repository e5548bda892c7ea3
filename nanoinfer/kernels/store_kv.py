"""Write a step's keys and values into the paged cache.

    cache[slot // block_size, slot % block_size] = row,   slot = slot_mapping[token]

In: k, v of all tokens of the step, one slot for each. Out: nothing; both caches change in place.

Invariant: no slot is written twice in a step, save those of block 0, the null block, which takes
the rows of padding and is never read. So padding needs no branch and no mask.

The model calls it fused with the norm of q and k and their rotation (norm_rope_store.py).

Shapes: T tokens in the step, K kv heads, D head dim.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from nanoinfer.kernels.quantized_kv import KVScales, check_cache

StoreKV = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def store_kv_ref(
    k: Tensor,  # [T, K, D], rows may be strided
    v: Tensor,  # [T, K, D]
    k_cache: Tensor,  # [num_blocks, block_size, K, D]
    v_cache: Tensor,  # [num_blocks, block_size, K, D]
    slot_mapping: Tensor,  # [T] int64
) -> None:
    """Copy row t of k and v to slot slot_mapping[t] of their caches."""
    _check_shapes(k, v, k_cache, v_cache, slot_mapping)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, k)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, v)


def make_store_kv_cpu(library: ctypes.CDLL, threads: int) -> StoreKV:
    """Bind the C++ twin: the reference's signature; it copies bytes, whatever the dtype.

    The function raises ValueError for tensors that the kernel cannot take, and for slots outside
    the cache, before anything is written.
    """
    kernel = library.nanoinfer_store_kv
    kernel.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 5, ctypes.c_int]
    kernel.restype = ctypes.c_int64

    def store_kv_cpu(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        check_store(k, v, k_cache, v_cache, slot_mapping)
        (num_blocks, block_size, *_), size = k_cache.shape, k.itemsize
        T, K, D = k.shape
        tensors = (k_cache, v_cache, k, v, slot_mapping)
        strides = (k.stride(0) * size, v.stride(0) * size)
        sizes = (T, num_blocks * block_size, K * D * size, *strides)
        invalid = kernel(*[tensor.data_ptr() for tensor in tensors], *sizes, threads)
        if invalid >= 0:
            raise bad_slot(slot_mapping, invalid, num_blocks * block_size)

    return store_kv_cpu


def bad_slot(slot_mapping: Tensor, token: int, num_slots: int) -> ValueError:
    return ValueError(
        f"slot_mapping: got {slot_mapping[token].item()} at token {token}, need 0 to "
        f"{num_slots - 1}, a slot of the cache; try a slot of block 0 for padding"
    )


def check_store(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: KVScales | None = None,
) -> None:
    """Raise ValueError for what a C++ kernel that stores cannot take."""
    _check_shapes(k, v, k_cache, v_cache, slots, is_plain=scales is None)
    _check_memory(k, v, k_cache, v_cache, slots)
    if scales is not None:
        check_cache(k.dtype, k_cache, v_cache, scales)
        if not all(x.is_contiguous() and x.is_cpu for x in scales[:2]):
            raise ValueError("scales: got strided, or not on cpu; try KVCacheSpec.allocate")


def _check_shapes(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, is_plain: bool = True
) -> None:
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        is_good = rows.shape == (len(slots), *cache.shape[2:])
        if not is_good or (is_plain and rows.dtype != cache.dtype):
            raise ValueError(
                f"{name}: got {tuple(rows.shape)} {rows.dtype}, need "
                f"{(len(slots), *cache.shape[2:])} {cache.dtype}, one row for each slot "
                "of its cache; try .view(-1, num_kv_heads, head_dim)"
            )
    if slots.dtype != torch.int64:
        raise ValueError(f"slot_mapping: got {slots.dtype}, need torch.int64; try .to(torch.int64)")


def _check_memory(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    if k_cache.shape != v_cache.shape or k.dtype != v.dtype or k.dim() != 3:
        raise ValueError(
            f"k_cache, v_cache: got {tuple(k_cache.shape)} {k.dtype}, {tuple(v_cache.shape)} "
            f"{v.dtype}, need [num_blocks, block_size, K, D] twice; try allocating both alike"
        )
    for name, rows in (("k", k), ("v", v)):
        _, head, dim = rows.stride()
        if dim != 1 or (head != rows.shape[2] and rows.shape[1] > 1):
            raise ValueError(
                f"{name}: got strides {rows.stride()}, need rows of contiguous heads; "
                "try .contiguous()"
            )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and slots.is_contiguous()):
        raise ValueError(
            "k_cache, v_cache, slot_mapping: got strided, need contiguous; try .contiguous()"
        )
    for tensor in (k, v, k_cache, v_cache, slots):
        if not tensor.is_cpu:
            raise ValueError(f"device: got {tensor.device}, need cpu; try store_kv_ref")
