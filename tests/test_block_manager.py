"""Block manager: who owns a block, who finds it again, and which one is given away first."""

import itertools
import random
from collections.abc import Callable

import pytest

from nanoinfer.block_manager import ROOT, BlockContent, BlockManager, _hash_block
from nanoinfer.request import Request
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.sequence import Sequence

BLOCK_SIZE = 2


def make_manager(num_blocks: int = 8, **options: object) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, **options)


def make_sequence(*token_ids: int, index: int = 0, **params: object) -> Sequence:
    request = Request(
        "0",
        None,
        list(token_ids),
        SamplingParams(**params),
        eos_token_ids=frozenset(),
        max_model_len=1000,
    )
    return Sequence(request, index, 0, None)


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> Sequence:
    """Find a prefix on first use, then compute up to `num_tokens` (all) as steps would."""
    num_tokens = num_tokens or len(seq)
    if not seq.block_table:
        manager.allocate_prefix(seq, manager.find_prefix(seq))
    assert manager.allocate(seq, num_tokens)
    seq.num_computed = num_tokens
    manager.register(seq)
    return seq


def take_blocks(manager: BlockManager, num_blocks: int) -> list[int]:
    """Blocks in the order in which they are given away; they stay taken."""
    seq = make_sequence(*[999] * (num_blocks * BLOCK_SIZE))
    assert manager.allocate(seq, len(seq))
    return seq.block_table


def num_found(manager: BlockManager, *token_ids: int) -> int:
    """How many blocks of this prefix are found, when one more token follows it."""
    return len(manager.find_prefix(make_sequence(*token_ids, 998)))


# Allocation


def test_allocation_takes_what_is_missing_and_returns_all():
    manager = make_manager(num_blocks=4)
    seq = make_sequence(1, 2, 3, 4, 5)
    assert [manager.num_blocks_for(n) for n in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert manager.allocate(seq, 3)
    assert len(seq.block_table) == 2
    assert manager.allocate(seq, 4), "room in the last block needs no new one"
    assert len(seq.block_table) == 2
    assert manager.allocate(seq, 5)
    assert len(set(seq.block_table)) == 3
    assert manager.num_free_blocks == 1
    manager.free(seq)
    assert manager.num_free_blocks == 4
    assert (seq.block_table, seq.num_computed, seq.num_registered_blocks) == ([], 0, 0)
    assert seq.chain_id == ROOT


def test_allocation_that_does_not_fit_changes_nothing():
    manager = make_manager(num_blocks=2)
    first, second = make_sequence(1, 2), make_sequence(3, 4, 5)
    assert manager.allocate(first, 2)
    assert not manager.allocate(second, 3)
    assert second.block_table == []
    assert manager.num_free_blocks == 1
    assert manager.allocate(second, 2)


def test_null_block_is_never_given_away():
    manager = make_manager(num_blocks=5)
    assert sorted(take_blocks(manager, 5)) == [1, 2, 3, 4, 5]
    assert not manager.allocate(make_sequence(1), 1)


def test_room_for_a_prefix_counts_its_freed_blocks_as_taken():
    manager = make_manager(num_blocks=3)
    manager.free(compute(manager, make_sequence(1, 2, 3, 4, 5)))
    seq = make_sequence(1, 2, 3, 4, 6, 7, 8)  # 2 found and free, 2 new, of 3 free in all
    prefix = manager.find_prefix(seq)
    assert len(prefix) == 2
    assert not manager.can_allocate(len(seq), prefix)
    assert manager.can_allocate(6, prefix)
    manager = make_manager(num_blocks=4)
    holder = compute(manager, make_sequence(1, 2, 3, 4))
    prefix = manager.find_prefix(seq)
    assert prefix == holder.block_table
    assert manager.can_allocate(len(seq), prefix), "blocks in use cost nothing"


# Sharing


def test_prefix_is_shared_and_outlives_its_first_owner():
    manager = make_manager()
    first = compute(manager, make_sequence(1, 2, 3, 4, 5))
    second = compute(manager, make_sequence(1, 2, 3, 4, 6))
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert manager.num_free_blocks == 8 - 4
    shared = first.block_table[:2]
    manager.free(first)
    assert manager.num_free_blocks == 8 - 3
    assert not set(shared) & set(take_blocks(manager, manager.num_free_blocks))
    manager.free(second)
    assert manager.num_free_blocks == 3


def test_shared_prefix_counts_as_computed():
    manager = make_manager()
    compute(manager, make_sequence(1, 2, 3, 4, 5))
    second = make_sequence(1, 2, 3, 4, 6)
    manager.allocate_prefix(second, manager.find_prefix(second))
    assert second.num_computed == 4
    assert second.num_registered_blocks == 2
    assert second.num_remaining == 1


def test_block_is_found_only_once_full_and_computed():
    manager = make_manager()
    seq = make_sequence(1, 2, 3, 4)
    manager.allocate(seq, 4)
    manager.register(seq)
    assert num_found(manager, 1, 2, 3, 4) == 0
    for num_computed, found in ((1, 0), (2, 1), (3, 1), (4, 2)):
        compute(manager, seq, num_computed)
        assert num_found(manager, 1, 2, 3, 4) == found


def test_fully_cached_prompt_drops_its_last_block():
    manager = make_manager()
    compute(manager, make_sequence(1, 2, 3, 4))
    assert len(manager.find_prefix(make_sequence(1, 2, 3, 4))) == 1
    assert len(manager.find_prefix(make_sequence(1, 2, 3, 4, 5))) == 2
    assert manager.find_prefix(make_sequence(1, 2)) == []


def test_equal_blocks_behind_different_prefixes_differ():
    manager = make_manager()
    compute(manager, make_sequence(1, 2, 3, 4))
    compute(manager, make_sequence(5, 6, 3, 4))
    assert manager.num_free_blocks == 8 - 4
    assert num_found(manager, 3, 4) == 0
    assert num_found(manager, 1, 2, 3, 4) == num_found(manager, 5, 6, 3, 4) == 2
    one, two = (manager.find_prefix(make_sequence(*ids, 3, 4, 0)) for ids in ((1, 2), (5, 6)))
    assert not set(one) & set(two)


def test_duplicate_stays_unregistered_and_goes_on_in_its_twins_chain():
    manager = make_manager()
    first, second = make_sequence(1, 2, 3, 4), make_sequence(1, 2, 3, 4, 5, 6)
    manager.allocate(first, 4)  # both before either is registered: no sharing
    manager.allocate(second, 6)
    duplicates = second.block_table[:2]
    compute(manager, first)
    compute(manager, second)
    assert manager.find_prefix(make_sequence(1, 2, 3, 4, 5, 6, 7)) == [
        *first.block_table,
        second.block_table[2],
    ]
    manager.free(second)
    # Holds nothing that can be found: given away before blocks that were never used.
    assert set(take_blocks(manager, 2)) == set(duplicates)


def test_prompt_logprobs_skip_the_cache_until_reported():
    manager = make_manager()
    compute(manager, make_sequence(1, 2, 3, 4, 5))
    seq = make_sequence(1, 2, 3, 4, 5, prompt_logprobs=0)
    assert manager.find_prefix(seq) == []
    sibling = Sequence(seq.request, 1, 0, None)
    assert len(manager.find_prefix(sibling)) == 2, "only the first answer computes them"
    seq.request.add_prompt_logprobs([{} for _ in range(4)])
    assert len(manager.find_prefix(seq)) == 2, "after a preemption they are known"


def test_caching_can_be_off():
    manager = make_manager(enable_prefix_caching=False)
    seq = compute(manager, make_sequence(1, 2, 3, 4, 5))
    assert num_found(manager, 1, 2, 3, 4) == 0
    assert manager.next_content(seq, []) is None
    assert manager.next_unregistered(seq) is None
    manager.free(seq)
    assert manager.num_free_blocks == 8


def test_content_that_is_being_computed_has_the_same_name_for_both_sides():
    manager = make_manager()
    running = compute(manager, make_sequence(1, 2, 3, 4, 5), 3)
    waiting = make_sequence(1, 2, 3, 4, 9)
    prefix = manager.find_prefix(waiting)
    assert len(prefix) == 1
    assert manager.next_content(waiting, prefix) == manager.next_unregistered(running) is not None
    other = make_sequence(1, 2, 3, 5, 9)
    assert manager.next_content(other, prefix) != manager.next_unregistered(running)
    compute(manager, running)
    assert manager.next_unregistered(running) is None, "token 6 is not known yet"
    assert manager.next_content(make_sequence(1, 2, 3), prefix) is None


# Eviction


def test_eviction_order_is_never_used_then_least_recent_and_tail_before_head():
    manager = make_manager()
    a = compute(manager, make_sequence(1, 2, 3, 4, 5))
    b = compute(manager, make_sequence(6, 7, 8, 9))
    (a0, a1, a2), (b0, b1) = a.block_table, b.block_table
    manager.free(a)
    manager.free(b)
    order = take_blocks(manager, 8)
    assert order[0] == a2, "partly filled: nobody can find it"
    assert set(order[1:4]).isdisjoint({a0, a1, a2, b0, b1})
    assert order[4:] == [a1, a0, b1, b0]


def test_a_hit_makes_a_chain_recent():
    manager = make_manager(num_blocks=4)
    a = compute(manager, make_sequence(1, 2, 3, 4))
    b = compute(manager, make_sequence(6, 7, 8, 9))
    (a0, a1), (b0, b1) = a.block_table, b.block_table
    manager.free(a)
    manager.free(b)
    again = make_sequence(1, 2, 3, 4, 5)
    manager.allocate_prefix(again, manager.find_prefix(again))
    manager.free(again)
    assert take_blocks(manager, 4) == [b1, b0, a1, a0]


def test_eviction_shortens_a_chain_from_its_end():
    manager = make_manager(num_blocks=4)
    manager.free(compute(manager, make_sequence(*range(8))))
    lengths = []
    for _ in range(4):
        lengths.append(num_found(manager, *range(8)))
        take_blocks(manager, 1)
    assert lengths == [4, 3, 2, 1]


def test_eviction_shortens_a_chain_from_its_end_when_a_full_prompt_was_computed_again():
    """A prompt of k blocks is asked twice: its last block is computed again, and what follows
    hangs behind the first copy, which was free all the time and must not go before it."""
    manager = make_manager(num_blocks=4)
    manager.free(compute(manager, make_sequence(1, 2, 3, 4)))
    again = compute(manager, make_sequence(1, 2, 3, 4))  # drops and repeats 3, 4
    again.token_ids += [7, 8]
    compute(manager, again)
    manager.free(again)
    lengths = []
    for _ in range(4):
        lengths.append(num_found(manager, 1, 2, 3, 4, 7, 8))
        take_blocks(manager, 1)
    assert lengths == [3, 3, 2, 1], "the copy, then the chain from its end"


def test_freed_block_is_found_until_it_is_reused_and_never_after():
    manager = make_manager(num_blocks=3)
    seq = compute(manager, make_sequence(1, 2))
    block = seq.block_table[0]
    manager.free(seq)
    assert manager.find_prefix(make_sequence(1, 2, 3)) == [block]
    assert block not in take_blocks(manager, 2)
    assert manager.find_prefix(make_sequence(1, 2, 3)) == [block]
    assert take_blocks(manager, 1) == [block]
    assert manager.find_prefix(make_sequence(1, 2, 3)) == []


def test_reused_block_is_found_for_its_new_content_only():
    manager = make_manager(num_blocks=1)
    manager.free(compute(manager, make_sequence(1, 2)))
    compute(manager, make_sequence(3, 4))
    assert num_found(manager, 1, 2) == 0
    assert num_found(manager, 3, 4) == 1


# Hashes and chains


def test_hash_is_over_fixed_widths_order_and_parent():
    contents = [
        BlockContent(parent, ids)
        for parent in (0, 1, 12, 2**31, 2**40)
        for ids in ((1, 23), (12, 3), (3, 12), (123, 0), (0, 123), (1, 2, 3), (2**31, 1), (1,))
    ]
    contents += [BlockContent(1, ()), BlockContent(256, (1,)), BlockContent(1, (256,))]
    assert len({_hash_block(content) for content in contents}) == len(contents)
    assert _hash_block(BlockContent(1, (2, 3))) == _hash_block(BlockContent(1, (2, 3)))


def test_hash_spreads():
    hashes = {
        _hash_block(BlockContent(parent, ids))
        for parent in range(10)
        for ids in itertools.product(range(20), repeat=3)
    }
    assert len(hashes) == 10 * 20**3
    assert len({value & 0xFFFF for value in hashes}) > 40_000, "of 65,536: 46,200 expected"


def _lose_a_parent(manager: BlockManager) -> tuple[int, int]:
    """A block's parent goes while it stays: its twin's sequence still runs. (parent, child)"""
    first, second = make_sequence(1, 2), make_sequence(1, 2, 3, 4)
    manager.allocate(first, 2)
    manager.allocate(second, 4)
    compute(manager, first)
    compute(manager, second)  # its block 0 is the duplicate, its block 1 hangs behind first's
    parent, child = first.block_table[0], second.block_table[1]
    assert manager.find_prefix(make_sequence(1, 2, 3, 4, 5)) == [parent, child]
    manager.free(first)
    taken = take_blocks(manager, manager.num_free_blocks)
    assert taken[-1] == parent
    return parent, child


def test_chain_id_of_a_lost_parent_is_never_used_again():
    manager = make_manager(num_blocks=4)
    parent, child = _lose_a_parent(manager)
    reused = make_sequence(7, 8)
    reused.block_table = [parent]  # `take_blocks` took it; now other content is computed into it
    compute(manager, reused)
    assert manager.find_prefix(make_sequence(7, 8, 0)) == [parent]
    assert child not in manager.find_prefix(make_sequence(7, 8, 3, 4, 5))


def _constant_hash(content: BlockContent) -> int:
    return 7


def _two_hashes(content: BlockContent) -> int:
    return content.token_ids[0] % 2


@pytest.mark.parametrize("hash_block", [None, _two_hashes, _constant_hash])
def test_random_use_finds_only_what_was_computed(
    hash_block: Callable[[BlockContent], int] | None,
):
    """Whatever the hash function: a hit holds these ids, behind this prefix."""
    rng = random.Random(0)
    manager = make_manager(num_blocks=9, hash_block=hash_block)
    held: dict[int, tuple[int, ...]] = {}  # block -> all ids up to its end
    chains: dict[int, tuple[int, ...]] = {}  # chain id -> the same: never two histories
    running: list[Sequence] = []
    num_hits = 0
    for _ in range(3000):
        if running and rng.random() < 0.5:
            manager.free(running.pop(rng.randrange(len(running))))
        seq = make_sequence(*(rng.choice((0, 0, 1)) for _ in range(rng.randint(1, 9))))
        prefix = manager.find_prefix(seq)
        num_hits += len(prefix)
        for i, block in enumerate(prefix):
            assert held[block] == tuple(seq.token_ids[: (i + 1) * BLOCK_SIZE])
        if not manager.can_allocate(len(seq), prefix):
            continue
        manager.allocate_prefix(seq, prefix)
        assert manager.allocate(seq, len(seq))
        for i, block in enumerate(seq.block_table[len(prefix) :], len(prefix)):
            held[block] = tuple(seq.token_ids[: (i + 1) * BLOCK_SIZE])
        compute(manager, seq)
        running.append(seq)
        for block, chain_id in manager._chain_ids.items():
            assert chain_id != ROOT
            assert chains.setdefault(chain_id, held[block]) == held[block]
    assert num_hits > 300
    assert len(chains) > 300
    for seq in running:
        manager.free(seq)
    assert manager.num_free_blocks == 9
