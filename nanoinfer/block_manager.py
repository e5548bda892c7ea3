"""Who owns which KV block, and which blocks can be found again by their content.

In: sequences that need room for more tokens, or are done. Out: their `block_table`s.

    block            0      1      2      3      4      5
                 [ null ][ used ][ used ][cached][ free ][ free ]
    sequence A's table: [1, 2]     tokens 0..15 in block 1, 16..31 in block 2 (block_size 16)

Invariants: used + free (cached ones included) = total; a block's reference count is the number of
tables that hold it; block 0 belongs to nobody: padding writes there. A block is registered only
when it is full and computed. Its key is a hash over (id of the parent's chain, its token ids), so
equal blocks behind different prefixes differ; ids and parent are compared on a hit, and a chain id
is never used twice, so a hash collision costs time, never a wrong answer. A freed block keeps its
content until it is reused: least recently used first, a chain's tail before its head.

A production engine adds: several block sizes, offloading to host memory, eviction policies.
Paged KV: vLLM (Kwon et al., 2023); hashed prefix blocks: vLLM's automatic prefix caching.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from nanoinfer.sequence import Sequence

ROOT = 0  # chain id of "no tokens yet"
NULL_BLOCK = 0


class BlockContent(NamedTuple):
    """What a registered block holds: these ids, behind the chain `parent`."""

    parent: int
    token_ids: tuple[int, ...]
    positions: bytes = b""  # of tokens whose ids do not tell them


class BlockManager:
    """Allocates, shares, finds and frees KV blocks 1..num_blocks."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_block: Callable[[BlockContent], int] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._hash = hash_block or _hash_block
        self._ref_counts = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._contents: dict[int, BlockContent] = {}  # block id -> what it is registered for
        self._chain_ids: dict[int, int] = {}  # block id -> id of the chain that ends in it
        self._by_hash: dict[int, int] = {}  # hash of a content -> block id
        self._twins: dict[int, int] = {}  # duplicate block -> the one that is registered
        self._duplicates: dict[int, list[int]] = {}  # the inverse
        self._next_chain_id = ROOT + 1
        self.when_forgotten: Callable[[int], None] = lambda chain_id: None

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Blocks that already hold the start of `seq`, at most up to its last token but one.

        At least one token must be computed, since its logits are what is sampled from.
        """
        blocks: list[int] = []
        parent = ROOT
        if not self._enable_prefix_caching or seq.wants_prompt_logprobs:
            return blocks
        for i in range((len(seq) - 1) // self.block_size):
            block = self._lookup(self._content(seq, i, parent))
            if block is None:
                break
            blocks.append(block)
            parent = self._chain_ids[block]
        return blocks

    def chain_ids(self, blocks: list[int]) -> list[int]:
        """Of the chains that end in these registered blocks."""
        return [self._chain_ids[block] for block in blocks]

    def deepest(self, chain_ids: list[int]) -> int:
        """Keys and values are there for every token: one may resume behind any block."""
        return len(chain_ids)

    def chunk_end(self, seq: Sequence, end: int) -> int:
        """A chunk may end anywhere."""
        return end

    def next_content(self, seq: Sequence, blocks: list[int]) -> BlockContent | None:
        """What the block behind `blocks` will hold; None while its tokens are not all known."""
        if not self._enable_prefix_caching or seq.wants_prompt_logprobs:
            return None
        if len(seq) < (len(blocks) + 1) * self.block_size:
            return None
        parent = self._chain_ids[blocks[-1]] if blocks else ROOT
        return self._content(seq, len(blocks), parent)

    def next_unregistered(self, seq: Sequence) -> BlockContent | None:
        """What the first block of a running sequence that is not registered yet will hold."""
        if not self._enable_prefix_caching:
            return None
        if len(seq) < (seq.num_registered_blocks + 1) * self.block_size:
            return None
        return self._content(seq, seq.num_registered_blocks, seq.chain_id)

    def can_allocate(self, num_tokens: int, prefix: list[int]) -> bool:
        """Is there room for a new sequence of `num_tokens` that starts with `prefix`?"""
        revived = sum(self._ref_counts[block] == 0 for block in prefix)
        needed = self.num_blocks_for(num_tokens) - len(prefix) + revived
        return needed <= len(self._free)

    def allocate_prefix(self, seq: Sequence, prefix: list[int]) -> None:
        """Share the blocks found by `find_prefix`."""
        assert not seq.block_table, f"{seq.request.request_id} already holds blocks"
        for block in prefix:
            self._free.pop(block, None)
            self._ref_counts[block] += 1
        seq.block_table = list(prefix)
        seq.num_registered_blocks = len(prefix)
        seq.chain_id = self._chain_ids[prefix[-1]] if prefix else ROOT
        seq.num_computed = len(prefix) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the table of `seq` to hold `num_tokens`; False, and nothing done, if short."""
        missing = self.num_blocks_for(num_tokens) - len(seq.block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            seq.block_table.append(block)
        return True

    def register(self, seq: Sequence) -> None:
        """Make the full, computed blocks of `seq` findable. A duplicate stays unregistered."""
        if not self._enable_prefix_caching:
            return
        num_known = min(seq.num_computed, len(seq.token_ids))  # a pending one has no content yet
        for i in range(seq.num_registered_blocks, num_known // self.block_size):
            content = self._content(seq, i, seq.chain_id)
            own, twin = seq.block_table[i], self._lookup(content)
            if twin is not None:
                self._twins[own] = twin
                self._duplicates.setdefault(twin, []).append(own)
            else:
                twin = own
                self._chain_ids[twin] = self._next_chain_id
                self._next_chain_id += 1
                self._contents[twin] = content
                self._by_hash.setdefault(self._hash(content), twin)
            seq.chain_id = self._chain_ids[twin]
            seq.num_registered_blocks += 1

    def free(self, seq: Sequence) -> None:
        """Give the blocks of `seq` back, its tail first."""
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if (twin := self._twins.pop(block, NULL_BLOCK)) != NULL_BLOCK:
                    self._duplicates[twin].remove(block)
                if twin in self._free:  # later blocks hang behind the twin: it was used just now
                    self._free.move_to_end(twin)
                if block not in self._contents:  # holds nothing that can be found: reuse it first
                    self._free.move_to_end(block, last=False)
        seq.block_table = []
        seq.chain_id = ROOT
        seq.num_registered_blocks = seq.num_computed = 0

    def _content(self, seq: Sequence, index: int, parent: int) -> BlockContent:
        start, stop = index * self.block_size, (index + 1) * self.block_size
        ids, images = tuple(seq.token_ids[start:stop]), seq.image_positions
        return BlockContent(parent, ids, b"" if images is None else images.key(start, stop))

    def _lookup(self, content: BlockContent) -> int | None:
        block = self._by_hash.get(self._hash(content))
        return block if block is not None and self._contents[block] == content else None

    def _forget(self, block: int) -> None:
        """The block is about to be overwritten: a duplicate takes its place, if there is one.

        Else nothing may find its content any more.
        """
        content = self._contents.pop(block, None)
        if content is None:
            return
        chain_id, key = self._chain_ids.pop(block), self._hash(content)
        is_found = self._by_hash.get(key) == block  # not so for the later of two that collide
        duplicates = self._duplicates.pop(block, [])
        if not duplicates:
            self.when_forgotten(chain_id)
            if is_found:
                del self._by_hash[key]
            return
        heir, *others = duplicates
        del self._twins[heir]
        self._contents[heir], self._chain_ids[heir] = content, chain_id
        if is_found:
            self._by_hash[key] = heir
        for other in others:
            self._twins[other] = heir
        self._duplicates[heir] = others


def _hash_block(content: BlockContent) -> int:
    """xxh3 over fixed-width integers: (1, 23) and (12, 3) must not look alike."""
    ids = np.array((content.parent, *content.token_ids), dtype=np.int64)
    return xxhash.xxh3_64_intdigest(ids.tobytes() + content.positions)
