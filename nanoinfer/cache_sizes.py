"""How many blocks and slots the memory that is left holds.

In: what each layer caches of a block of tokens, or of a sequence; the budget in bytes.
Out: the number of KV blocks, of running sequences, and of states that are kept to resume from.

    budget    [ snapshots: a quarter ][ states, up to half of the rest ][ keys and values ........ ]

A model without recurrent layers has the last part only. Invariant: what is promised fits; too
little is an error that says how much is needed and what to change. On a CPU memory is taken when it
is first written, so that what is never used costs nothing.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from nanoinfer.config import EngineConfig

logger = logging.getLogger("nanoinfer")

_GIB = 1 << 30
_MIN_CACHED_BLOCKS = 1 << 14
_MAX_SNAPSHOTS = 1 << 10


class CacheSizes(NamedTuple):
    """Null blocks and null slots not counted."""

    num_blocks: int
    max_num_seqs: int
    max_snapshots: int
    bytes_per_slot: int = 0  # of all layers' states of one sequence

    def num_units(self, unit: str) -> int:
        return self.num_blocks if unit == "block" else self.max_num_seqs + self.max_snapshots


class Spec(Protocol):
    @property
    def unit(self) -> str: ...

    def bytes_per_unit(self, block_size: int) -> int: ...


def plan_caches(
    config: EngineConfig, specs: Iterable[Spec], longest: int, free_memory: Callable[[], int]
) -> CacheSizes:
    """Sizes as told by `config`, or what its budget, or else the free memory, holds.

    Raises ValueError where not even one block and one state fit.
    """
    costs = {"block": 0, "slot": 0}
    for spec in specs:
        costs[spec.unit] += spec.bytes_per_unit(config.block_size)
    if not costs["slot"]:
        num_blocks = config.num_kv_blocks
        if num_blocks is None:
            budget = config.kv_cache_memory or free_memory()
            num_blocks = _count_blocks(config, budget, costs["block"], longest)
        return CacheSizes(num_blocks, config.max_num_seqs, 0)
    budget = config.kv_cache_memory or free_memory()
    max_snapshots = 0
    if config.enable_prefix_caching:
        memory = config.state_snapshot_memory
        memory = budget // 4 if memory is None else memory
        max_snapshots = min(memory // costs["slot"], _MAX_SNAPSHOTS)
    rest = budget - max_snapshots * costs["slot"] - sum(costs.values())  # less the null ones
    if config.num_kv_blocks is None:
        share = rest // 2
    else:
        share = rest - config.num_kv_blocks * costs["block"]
    max_num_seqs = min(config.max_num_seqs, share // costs["slot"])
    if max_num_seqs < 1:
        raise ValueError(
            f"states: {share:,} bytes left, but one sequence takes {costs['slot']:,}; raise "
            "kv_cache_memory, lower state_snapshot_memory or num_kv_blocks, or free some memory"
        )
    if max_num_seqs < config.max_num_seqs:
        logger.info("max_num_seqs: %d, for the memory of their states", max_num_seqs)
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        rest -= max_num_seqs * costs["slot"]
        num_blocks = _count_blocks(config, rest, costs["block"], longest)
    return CacheSizes(num_blocks, max_num_seqs, max_snapshots, costs["slot"])


def choose_max_model_len(config: EngineConfig, num_blocks: int, longest: int) -> int:
    """The most tokens that one sequence can have: it must fit the pool alone."""
    capacity = num_blocks * config.block_size
    if capacity >= longest:
        return longest
    if config.max_model_len is None:
        logger.info("max_model_len: %d instead of %d, for the KV pool", capacity, longest)
        return capacity
    raise ValueError(
        f"max_model_len: {longest} tokens need {-(-longest // config.block_size)} KV blocks of "
        f"{config.block_size}, the pool has {num_blocks}; lower max_model_len, or raise "
        "kv_cache_memory or num_kv_blocks"
    )


def memory_for_caches() -> int:
    """Bytes that caches may take on a CPU by default."""
    return min(4 * _GIB, int(0.3 * available_memory()))


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or its container's if less."""
    limits = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
        fields = dict(line.split(":", 1) for line in meminfo.splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        limits.append(int((group / "memory.max").read_text()) - used)
    except (OSError, KeyError, ValueError):  # not Linux, no cgroup v2, or "max"
        pass
    return min(limits, default=8 * _GIB)


def _count_blocks(config: EngineConfig, budget: int, bytes_per_block: int, longest: int) -> int:
    if bytes_per_block == 0:  # every layer is recurrent: blocks are only what prefixes are found by
        return config.max_num_seqs * -(-longest // config.block_size)
    # More than every sequence at full length holds, and some to find again, is only overhead.
    useful = config.max_num_seqs * -(-longest // config.block_size)
    if config.enable_prefix_caching:
        useful = max(useful, _MIN_CACHED_BLOCKS)
    num_blocks = min(budget // bytes_per_block - 1, useful)
    if num_blocks < 1:
        raise ValueError(
            f"KV cache: {budget:,} bytes left, but one block of {config.block_size} tokens "
            f"takes {bytes_per_block:,}; raise kv_cache_memory or free some memory"
        )
    return num_blocks
