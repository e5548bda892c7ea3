"""What a sequence holds in all kinds of cache, as one thing to the scheduler.

In: sequences that need room, have run, or are done. Out: their block tables and state slots; how
much of a new sequence is there already.

Keys and values are kept for every token, and can be resumed at any block. A recurrent state is one
for all tokens so far, and can be resumed only where somebody kept it. So a hit goes as far as every
kind allows:

    blocks known     [ b0 ][ b1 ][ b2 ][ b3 ]
    states kept                ^             ^ none here
    resumed at       16 tokens .             b2, b3 are computed again, and a state is kept behind
                                             b3: it is a point that prompts part at

Invariant: a sequence has what it needs of all kinds, or of none. A third kind joins by being a
`CacheKind`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

from nanoinfer.block_manager import BlockContent, BlockManager
from nanoinfer.cache_sizes import CacheSizes
from nanoinfer.config import EngineConfig
from nanoinfer.sequence import Sequence
from nanoinfer.state_pool import StatePool


class Prefix(NamedTuple):
    """How a sequence begins: blocks to resume behind, and those that are known beyond."""

    blocks: list[int]
    known: list[int]


class CacheKind(Protocol):
    """What a kind of cache does for a sequence. Called in the order in which they stand here."""

    def deepest(self, chain_ids: list[int]) -> int:
        """How many of these leading blocks a sequence may resume behind."""

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Room for `num_tokens`; False, and nothing done, if short."""

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """Where a chunk must end that would end at `end`."""

    def register(self, seq: Sequence) -> None:
        """Its chunk is computed: keep what may be found again."""

    def free(self, seq: Sequence) -> None:
        """Take back all that it holds."""


class Caches:
    def __init__(self, blocks: BlockManager, states: StatePool | None = None) -> None:
        self.blocks = blocks
        self.states = states
        self._kinds: list[CacheKind] = [blocks]  # first: the others follow its chains
        if states is not None:
            self._kinds.append(states)
            blocks.when_forgotten = states.forget

    def find_prefix(self, seq: Sequence) -> Prefix:
        known = self.blocks.find_prefix(seq)
        chain_ids = self.blocks.chain_ids(known)
        depth = len(known)
        while (common := min(kind.deepest(chain_ids[:depth]) for kind in self._kinds)) < depth:
            depth = common
        return Prefix(known[:depth], known)

    def in_progress(self, seq: Sequence) -> BlockContent | None:
        """What this running sequence computes next that others could find."""
        return self.blocks.next_unregistered(seq)

    def must_wait(
        self, seq: Sequence, prefix: Prefix, in_progress: set[BlockContent | None]
    ) -> bool:
        """Would it compute what a running sequence is about to leave?"""
        if self.states is not None and self.states.max_snapshots == 0:
            return False  # it cannot start from what the other leaves
        next_block = self.blocks.next_content(seq, prefix.known)
        if next_block is not None and next_block in in_progress:
            return True
        if self.states is None or len(prefix.blocks) == len(prefix.known):
            return False
        return self.states.is_planned(self.blocks.chain_ids(prefix.known)[-1])

    def can_admit(self, seq: Sequence, prefix: Prefix) -> bool:
        """Room for all its tokens, not for one chunk: else prompts evict each other in turns."""
        return self.blocks.can_allocate(len(seq), prefix.blocks)

    def admit(self, seq: Sequence, prefix: Prefix) -> None:
        self.blocks.allocate_prefix(seq, prefix.blocks)
        if self.states is not None:
            self.states.start(seq, self.blocks.chain_ids(prefix.known), len(prefix.blocks))

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        has_room = True
        for kind in self._kinds:  # asked in every step of every sequence: all(...) takes twice this
            has_room = has_room and kind.allocate(seq, num_tokens)
        return has_room

    def chunk_end(self, seq: Sequence, end: int) -> int:
        for kind in self._kinds:
            end = kind.chunk_end(seq, end)
        return end

    def register(self, seq: Sequence) -> None:
        for kind in self._kinds:
            kind.register(seq)

    def free(self, seq: Sequence) -> None:
        for kind in self._kinds:
            kind.free(seq)


def make_pools(
    sizes: CacheSizes, config: EngineConfig
) -> tuple[Callable[[], BlockManager], Callable[[], StatePool] | None]:
    """How to make the pools of an engine, now and after an error; no states, no state pool."""
    blocks = (sizes.num_blocks, config.block_size, config.enable_prefix_caching)
    slots = (sizes.max_num_seqs, sizes.max_snapshots, config.block_size, sizes.bytes_per_slot)
    make_states = functools.partial(StatePool, *slots) if sizes.bytes_per_slot else None
    return functools.partial(BlockManager, *blocks), make_states
