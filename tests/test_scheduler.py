"""Scheduler: who runs in a step and for how many tokens, one rule a test."""

from collections.abc import Callable

import pytest

from nanoinfer.block_manager import BlockContent, BlockManager
from nanoinfer.request import Request
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduler import SampledTokens, ScheduledSequence, Scheduler
from nanoinfer.sequence import Sequence

BLOCK_SIZE = 4
MAX_MODEL_LEN = 100


def make_scheduler(
    num_blocks: int = 100,
    budget: int = 100,
    max_num_seqs: int = 100,
    block_size: int = BLOCK_SIZE,
    hash_block: Callable[[BlockContent], int] | None = None,
) -> Scheduler:
    return Scheduler(
        lambda: BlockManager(num_blocks, block_size, hash_block=hash_block), max_num_seqs, budget
    )


def add(scheduler: Scheduler, name: str, prompt: list[int] | int, **params: object) -> Sequence:
    """Queue one sequence; a prompt given by its length shares nothing with any other."""
    ids = [1000 * ord(name[0]) + i for i in range(prompt)] if isinstance(prompt, int) else prompt
    request = Request(
        name,
        None,
        ids,
        SamplingParams(**{"max_tokens": None, **params}),
        eos_token_ids=frozenset({2}),
        max_model_len=MAX_MODEL_LEN,
    )
    request.sequences = [Sequence(request, 0, 0, None)]
    scheduler.add(request.sequences[0])
    return request.sequences[0]


def shares(step: list[ScheduledSequence]) -> list[tuple[str, int, int, bool]]:
    return [(seq.request.request_id, start, n, sampling) for seq, start, n, sampling in step]


def commit(scheduler: Scheduler, step: list[ScheduledSequence], *token_ids: int) -> None:
    """Every sampling entry gets `token_ids` (one token, 7, if none are given)."""
    results = [SampledTokens(list(token_ids or (7,)) if s.is_sampling else []) for s in step]
    scheduler.commit(step, results)


def run_step(scheduler: Scheduler) -> list[tuple[str, int, int, bool]]:
    step = scheduler.schedule()
    commit(scheduler, step)
    return shares(step)


# Budget and chunks


def test_prompt_is_chunked_and_sampled_at_its_end_only():
    scheduler = make_scheduler(budget=8)
    add(scheduler, "a", 19)
    steps = [run_step(scheduler) for _ in range(4)]
    assert steps == [
        [("a", 0, 8, False)],
        [("a", 8, 8, False)],
        [("a", 16, 3, True)],
        [("a", 19, 1, True)],
    ]


def test_decoding_goes_on_while_a_prompt_takes_what_is_left():
    scheduler = make_scheduler(budget=8)
    add(scheduler, "a", 3)
    add(scheduler, "b", 2)
    assert run_step(scheduler) == [("a", 0, 3, True), ("b", 0, 2, True)]
    add(scheduler, "c", 15)
    assert run_step(scheduler) == [("a", 3, 1, True), ("b", 2, 1, True), ("c", 0, 6, False)]
    assert run_step(scheduler) == [("a", 4, 1, True), ("b", 3, 1, True), ("c", 6, 6, False)]
    assert run_step(scheduler) == [("a", 5, 1, True), ("b", 4, 1, True), ("c", 12, 3, True)]


def test_decoding_goes_first_even_where_older_sequences_need_more_tokens():
    scheduler = make_scheduler(budget=4)
    add(scheduler, "a", 1)
    add(scheduler, "b", 1)
    step = scheduler.schedule()
    scheduler.commit(step, [SampledTokens([7] * 9), SampledTokens([7])])  # a owes 9 tokens
    assert run_step(scheduler) == [("b", 1, 1, True), ("a", 1, 3, False)]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 64])
def test_budget_is_respected_and_used(budget: int):
    scheduler = make_scheduler(budget=budget)
    seqs = [add(scheduler, name, 5 + i, max_tokens=4) for i, name in enumerate("abcdefgh")]
    num_steps = 0
    while scheduler.has_work:
        num_known = sum(seq.num_remaining for seq in seqs if not seq.is_finished)
        step = scheduler.schedule()
        assert sum(entry.num_tokens for entry in step) == min(budget, num_known)
        commit(scheduler, step)
        num_steps += 1
    assert all(seq.output_token_ids == [7] * 4 for seq in seqs)
    assert num_steps == pytest.approx(sum(range(5, 13)) / budget + 3 * 8 / min(budget, 8), rel=0.5)


def test_number_of_running_sequences_is_respected():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 3, max_tokens=2)
    assert [name for name, *_ in run_step(scheduler)] == ["a", "b"]
    assert [name for name, *_ in run_step(scheduler)] == ["a", "b"]
    assert [name for name, *_ in run_step(scheduler)] == ["c"]


# Preemption


def _fill(scheduler: Scheduler, names: str) -> list[Sequence]:
    """Sequences of exactly one block each, which all want a second one in the next step."""
    seqs = [add(scheduler, name, BLOCK_SIZE) for name in names]
    run_step(scheduler)
    return seqs


def test_newest_is_preempted_and_waits_in_front():
    scheduler = make_scheduler(num_blocks=5)
    a, b, c = _fill(scheduler, "abc")
    add(scheduler, "d", 4)
    assert run_step(scheduler) == [("a", 4, 1, True), ("b", 4, 1, True)]
    assert scheduler.running == [a, b]
    assert scheduler.waiting[0] is c
    assert scheduler.num_preemptions == 1
    assert (c.block_table, c.num_computed, c.output_token_ids) == ([], 0, [7])
    assert scheduler.block_manager.num_free_blocks == 1


def test_preempted_keep_their_order():
    scheduler = make_scheduler(num_blocks=4)
    a, b, c, d = _fill(scheduler, "abcd")
    assert run_step(scheduler) == [("a", 4, 1, True), ("b", 4, 1, True)]
    assert scheduler.running == [a, b]
    assert list(scheduler.waiting) == [c, d]
    assert scheduler.num_preemptions == 2


def test_no_admission_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=4)
    prompt = list(range(10, 18))
    add(scheduler, "a", prompt)
    run_step(scheduler)
    b = add(scheduler, "b", prompt)  # shares a's first block, computes a copy of the second
    assert run_step(scheduler) == [("a", 8, 1, True), ("b", 4, 4, True)]
    # b has no room for a third block. Without its copy there would be, in a's second block.
    assert run_step(scheduler) == [("a", 9, 1, True)]
    assert scheduler.num_preemptions == 1
    assert scheduler.block_manager.can_allocate(len(b), scheduler.block_manager.find_prefix(b))
    assert run_step(scheduler) == [("a", 10, 1, True), ("b", 8, 1, True)]


def test_preempted_goes_on_where_it_was():
    scheduler = make_scheduler(num_blocks=3)
    a, b = _fill(scheduler, "ab")
    assert run_step(scheduler) == [("a", 4, 1, True), ("b", 4, 1, True)][:1]
    scheduler.abort(a)
    # Its block was full and computed, so it may be found again; the generated token is kept.
    assert run_step(scheduler) == [("b", 4, 1, True)]
    assert b.output_token_ids == [7, 7]
    assert b.num_cached_tokens == 0, "of the first admission"
    assert scheduler.num_prefix_hit_tokens == 4


def test_victim_that_is_in_the_step_already_leaves_it_and_its_budget():
    scheduler = make_scheduler(num_blocks=5, budget=17)
    for name, num_tokens in (("a", 4), ("b", 4), ("c", 9)):
        add(scheduler, name, num_tokens)
    step = scheduler.schedule()
    scheduler.commit(step, [SampledTokens([7] * n) for n in (2, 16, 1)])
    c = scheduler.running[2]
    scheduler._max_num_batched_tokens = 5
    # c decodes and comes first; then a needs its blocks; so b has 3 tokens left, not 2.
    assert run_step(scheduler) == [("a", 4, 2, True), ("b", 4, 3, False)]
    assert scheduler.num_preemptions == 1
    assert (c.num_computed, c.block_table, c.output_token_ids) == (0, [], [7])


def test_sequence_that_is_the_newest_preempts_itself():
    scheduler = make_scheduler(num_blocks=3)
    a, b = _fill(scheduler, "ab")
    add(scheduler, "c", 1)
    assert run_step(scheduler) == [("a", 4, 1, True)]
    assert [seq.request.request_id for seq in scheduler.waiting] == ["b", "c"]
    assert a in scheduler.running
    assert b.num_computed == 0


# Prefixes that are being computed


def test_request_waits_for_the_block_that_another_computes():
    scheduler = make_scheduler()
    prompt = list(range(10, 20))
    add(scheduler, "a", prompt)
    b = add(scheduler, "b", [*prompt[:8], 99])
    add(scheduler, "c", [*prompt[:4], 98])
    add(scheduler, "d", prompt[:3])
    assert run_step(scheduler) == [("a", 0, 10, True), ("d", 0, 3, True)]
    assert next(iter(scheduler.waiting)) is b
    assert run_step(scheduler) == [
        ("a", 10, 1, True),
        ("d", 3, 1, True),
        ("b", 8, 1, True),
        ("c", 4, 1, True),
    ]
    assert b.num_cached_tokens == 8
    assert scheduler.num_prefix_hit_tokens == 12
    assert scheduler.block_manager.num_free_blocks == 100 - 3 - 1 - 1 - 1


def test_request_waits_through_all_steps_that_its_block_takes():
    scheduler = make_scheduler(budget=3, block_size=8)
    prompt = list(range(10, 27))  # two blocks and one token
    add(scheduler, "a", prompt)
    b = add(scheduler, "b", [*prompt[:16], 99], max_tokens=1)
    chunks = [run_step(scheduler) for _ in range(6)]
    assert chunks == [[("a", start, min(3, 17 - start), start == 15)] for start in range(0, 18, 3)]
    assert run_step(scheduler) == [("a", 17, 1, True), ("b", 16, 1, True)]
    assert b.num_cached_tokens == 16


def test_request_waits_with_a_budget_that_leaves_room_in_each_step():
    """The block takes several steps although each step has budget left for the other."""
    scheduler = make_scheduler(budget=6, block_size=8)
    for name in "vw":  # two decoding sequences, so that a's chunks have 4 tokens
        add(scheduler, name, 1)
    run_step(scheduler)
    prompt = list(range(10, 30))
    add(scheduler, "a", prompt)
    b = add(scheduler, "b", [*prompt[:8], 99])
    c = add(scheduler, "c", [*prompt[:8], 98])
    while b.num_computed == 0:
        run_step(scheduler)
        assert not any(seq.block_table for seq in (b, c) if not seq.num_cached_tokens)
    assert b.num_cached_tokens == 8
    while c.num_computed == 0:
        run_step(scheduler)
    assert c.num_cached_tokens == 8


def test_block_filled_by_decoding_is_waited_for_too():
    scheduler = make_scheduler()
    a = add(scheduler, "a", [10, 11])
    run_step(scheduler)
    run_step(scheduler)  # a: 10 11 7 | 7, whose computation fills the block
    assert (a.num_computed, len(a)) == (3, 4)
    b = add(scheduler, "b", [10, 11, 7, 7, 5])
    assert run_step(scheduler) == [("a", 3, 1, True)]
    assert run_step(scheduler) == [("a", 4, 1, True), ("b", 4, 1, True)]
    assert b.num_cached_tokens == 4


def test_waiting_for_a_block_ends_when_the_other_is_aborted():
    scheduler = make_scheduler(budget=3)
    a = add(scheduler, "a", list(range(10, 19)))
    b = add(scheduler, "b", list(range(10, 18)))
    assert run_step(scheduler) == [("a", 0, 3, False)]
    scheduler.abort(a)
    assert run_step(scheduler) == [("b", 0, 3, False)]
    assert b.num_cached_tokens == 0


def test_one_that_waits_for_a_block_keeps_its_place():
    scheduler = make_scheduler(max_num_seqs=3)
    add(scheduler, "a", list(range(10, 19)))
    for name in "bc":
        add(scheduler, name, [10, 11, 12, 13, ord(name)])
    for name in "def":
        add(scheduler, name, 3)
    assert [name for name, *_ in run_step(scheduler)] == ["a", "d", "e"]
    assert [seq.request.request_id for seq in scheduler.waiting] == ["b", "c", "f"]


# Progress and order


def test_everything_that_decodes_advances_on_each_step():
    scheduler = make_scheduler(budget=9)
    seqs = [add(scheduler, name, 1) for name in "abcdefgh"]
    run_step(scheduler)
    add(scheduler, "x", 60)
    for num_steps in range(1, 30):
        run_step(scheduler)
        assert [seq.num_output_tokens for seq in seqs] == [1 + num_steps] * 8


def test_admission_is_in_order_of_arrival():
    scheduler = make_scheduler(num_blocks=12, budget=16)
    add(scheduler, "a", 20, max_tokens=25)
    add(scheduler, "b", 30, max_tokens=2)  # no room beside a
    add(scheduler, "c", 2, max_tokens=2)  # room, but b came first
    order: list[str] = []
    while scheduler.has_work:
        order += [name for name, *_ in run_step(scheduler) if name not in order]
    assert order == ["a", "b", "c"]


def test_admission_leaves_room_for_the_whole_prompt_not_only_a_chunk():
    scheduler = make_scheduler(num_blocks=8, budget=8)
    add(scheduler, "a", 15, max_tokens=3)
    add(scheduler, "b", 20, max_tokens=3)
    for _ in range(4):
        assert {name for name, *_ in run_step(scheduler)} == {"a"}
    assert run_step(scheduler)[0][:3] == ("b", 0, 8)
    assert scheduler.num_preemptions == 0


def test_all_end_although_the_pool_holds_one_at_a_time():
    scheduler = make_scheduler(num_blocks=MAX_MODEL_LEN // BLOCK_SIZE, budget=16)
    seqs = [add(scheduler, name, 10 + i) for i, name in enumerate("abcdef")]
    bound = len(seqs) * MAX_MODEL_LEN
    for _ in range(bound):
        if scheduler.has_work:
            run_step(scheduler)
    assert [(len(seq), seq.finish_reason) for seq in seqs] == [(MAX_MODEL_LEN, "length")] * 6
    assert 0 < scheduler.num_preemptions < bound
    assert scheduler.block_manager.num_free_blocks == MAX_MODEL_LEN // BLOCK_SIZE


def test_error_when_nothing_can_run_has_sizes():
    scheduler = make_scheduler(num_blocks=3)
    add(scheduler, "a", 13)
    add(scheduler, "b", 1)
    text = "nothing can run; 0 running, 2 waiting, 3 of 3 blocks free"
    with pytest.raises(RuntimeError, match=text):
        scheduler.schedule()
    scheduler = make_scheduler(num_blocks=1)
    add(scheduler, "a", 4)
    run_step(scheduler)
    with pytest.raises(RuntimeError, match="0 running, 1 waiting, 1 of 1 blocks free"):
        scheduler.schedule()


def test_no_work_is_an_empty_step():
    scheduler = make_scheduler()
    assert not scheduler.has_work
    assert scheduler.schedule() == []


# Results


def test_commit_takes_ragged_tokens():
    scheduler = make_scheduler(budget=9)
    a, b = add(scheduler, "a", 3, max_tokens=5), add(scheduler, "b", 2, max_tokens=3)
    c, d = add(scheduler, "c", 3), add(scheduler, "d", 9)
    step = scheduler.schedule()
    assert [n for _, _, n, _ in step] == [3, 2, 3, 1]
    results = [SampledTokens(ids) for ids in ([7, 8], [7, 8, 9, 10], [7, 2, 8], [])]
    scheduler.commit(step, results)
    assert (a.output_token_ids, a.finish_reason) == ([7, 8], None)
    assert (b.output_token_ids, b.finish_reason) == ([7, 8, 9], "length"), "the rest is dropped"
    assert (c.output_token_ids, c.finish_reason) == ([7, 2], "stop")
    assert (d.output_token_ids, d.finish_reason) == ([], None)
    assert scheduler.running == [a, d]
    assert b.block_table == c.block_table == []
    assert run_step(scheduler) == [("a", 3, 2, True), ("d", 1, 7, False)]
    with pytest.raises(ValueError, match="zip"):
        scheduler.commit(scheduler.schedule(), [SampledTokens([7])])


def test_tokens_that_no_model_has_seen_are_not_findable():
    """Several tokens in one result: the last block's keys and values are not all computed."""
    scheduler = make_scheduler()
    a = add(scheduler, "a", [10, 11, 12])
    scheduler.commit(scheduler.schedule(), [SampledTokens([7, 8, 9])])
    b = add(scheduler, "b", [10, 11, 12, 7, 8])
    assert scheduler.block_manager.find_prefix(b) == []
    run_step(scheduler)
    assert scheduler.block_manager.find_prefix(b) == a.block_table[:1]


def test_abort_gives_blocks_back_wherever_the_sequence_is():
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=1)
    a, b = add(scheduler, "a", 9), add(scheduler, "b", 9)
    run_step(scheduler)
    for seq in (b, a, a):
        scheduler.abort(seq)
        assert seq.finish_reason == "abort"
    assert not scheduler.has_work
    assert scheduler.block_manager.num_free_blocks == 10
    done = add(scheduler, "c", 3, max_tokens=1)
    run_step(scheduler)
    scheduler.abort(done)
    assert done.finish_reason == "length", "an end is final"


# After an exception


def test_reset_computes_everything_again_in_order():
    scheduler = make_scheduler(max_num_seqs=2)
    a, b, c = (add(scheduler, name, 5) for name in "abc")
    run_step(scheduler)
    scheduler.schedule()
    scheduler.reset([a, b, c])
    assert list(scheduler.waiting) == [a, b, c]
    assert scheduler.block_manager.num_free_blocks == 100
    assert run_step(scheduler) == [("a", 0, 6, True), ("b", 0, 6, True)]
    assert a.output_token_ids == [7, 7]


@pytest.mark.parametrize("num_calls", [1, 6, 11])
def test_interrupt_while_scheduling_loses_no_sequence(num_calls: int):
    """Ctrl-C may come at any line: here it comes in the n-th hash of a step that admits."""
    calls_left = 1000

    def hash_block(content: BlockContent) -> int:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0:
            raise KeyboardInterrupt
        return hash(content)

    scheduler = make_scheduler(hash_block=hash_block)
    prompt = list(range(10, 23))
    seqs = [add(scheduler, "a", prompt)]
    run_step(scheduler)
    seqs += [add(scheduler, name, [*prompt, ord(name), *[5] * 5]) for name in "bcd"]
    calls_left = num_calls
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule()
    scheduler.reset(seqs)
    calls_left = 1000
    assert scheduler.block_manager.num_free_blocks == 100
    scheduler.abort(seqs[1])
    while scheduler.has_work:
        run_step(scheduler)
    assert [len(seq) for seq in seqs] == [MAX_MODEL_LEN, 19, MAX_MODEL_LEN, MAX_MODEL_LEN]
    assert scheduler.block_manager.num_free_blocks == 100


def test_interrupt_while_preempting_loses_no_sequence(monkeypatch: pytest.MonkeyPatch):
    def interrupted(seq: Sequence) -> None:
        raise KeyboardInterrupt

    scheduler = make_scheduler(num_blocks=3)
    seqs = _fill(scheduler, "ab")
    monkeypatch.setattr(scheduler.block_manager, "free", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scheduler.schedule()
    scheduler.reset(seqs)
    assert list(scheduler.waiting) == seqs
    assert run_step(scheduler) == [("a", 0, 5, True)]
    scheduler.abort(seqs[1])
    assert scheduler.running == seqs[:1]
    assert not scheduler.waiting
