"""Scheduler, block manager and state pool under random operations; invariants hold after each.

No model: a fake runner keeps, for every physical slot, the whole history of ids that its keys and
values were computed from, and it draws a token from the history that the block table leads to, not
from the sequence's own ids. So a block that is stale, shared too early, handed out twice or written
twice shows as a wrong history, and at the end as a token that differs from the solo run's. Slots of
recurrent states hold a history, too: that of the whole sequence so far.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoinfer import EngineConfig
from nanoinfer.batch import Batch
from nanoinfer.block_manager import BlockContent, BlockManager
from nanoinfer.outputs import Logprob
from nanoinfer.pipeline import Pipeline
from nanoinfer.request import Request
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduler import SampledTokens, ScheduledSequence, Scheduler
from nanoinfer.sequence import Sequence
from nanoinfer.state_pool import StatePool

MAX_MODEL_LEN = 24
NUM_TOKEN_IDS = 3  # few, so that prefixes coincide
EOS = 3
PREFIXES = ((), (0,) * 8, (0, 1, 2) * 3, (0, 1, 2, 0, 1, 2, 2))
NUM_EXAMPLES, NUM_STEPS = 120, 50

History = tuple[int, ...]


class FakeRunner:
    """Slots that hold histories instead of keys and values, or of states."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.slots: dict[int, History] = {}
        self.states: dict[int, History] = {}

    def read(self, block_table: list[int], position: int) -> History | None:
        block = block_table[position // self._block_size]
        return self.slots.get(block * self._block_size + position % self._block_size)

    def launch(self, batch: Batch, before: "FakeLaunched | None" = None) -> "FakeLaunched":
        if batch.pending is not None:
            rows, sources = batch.pending
            batch.input_ids[rows] = before.token_ids[sources]
        tables, bounds = batch.block_tables.tolist(), batch.cu_seqlens_q.tolist()
        ids, positions = batch.input_ids.tolist(), batch.positions.tolist()
        slots = batch.slot_mapping.tolist()
        assert len(set(slots)) == len(slots), "two tokens in one slot"
        for i, table in enumerate(tables):
            for t in range(bounds[i], bounds[i + 1]):
                before = self.read(table, positions[t] - 1) if positions[t] else ()
                self.slots[slots[t]] = (*(before or ()), ids[t])
        self.run_states(batch)
        results = [SampledTokens([])] * batch.num_entries
        if batch.sampling is not None:
            lengths, seeds = batch.seq_lens.tolist(), batch.sampling.seeds.tolist()
            for i, seed in zip(batch.sampled_entries, seeds, strict=True):
                results[i] = SampledTokens([draw(self.read(tables[i], lengths[i] - 1), seed)])
        for wanted in batch.prompt_logprobs:
            found = [{target: Logprob(0.0, 1)} for target in wanted.targets]
            results[wanted.entry] = results[wanted.entry]._replace(prompt_logprobs=found)
        return FakeLaunched(results, [results[i].token_ids[0] for i in batch.sampled_entries])

    def run_states(self, batch: Batch) -> None:
        """All read before any writes: no slot that is written may be another's source."""
        sources, slots = batch.states.tolist()
        written = [slot for slot in slots if slot]
        assert len(set(written)) == len(written), "two sequences in one slot"
        others = [source for source, slot in zip(sources, slots, strict=True) if source != slot]
        assert not set(others) & set(written), "writes a state that another sequence reads"
        ids, bounds = batch.input_ids.tolist(), batch.cu_seqlens_q.tolist()
        for i, (source, slot) in enumerate(zip(sources, slots, strict=True)):
            before = self.states[source] if source else ()
            self.states[slot] = (*before, *ids[bounds[i] : bounds[i + 1]])


class FakeLaunched:
    def __init__(self, results: list[SampledTokens], token_ids: list[int]) -> None:
        self._results = results
        self.token_ids = torch.tensor(token_ids)

    def tokens(self) -> list[SampledTokens]:
        return self._results


def draw(history: History | None, seed: int) -> int:
    """A token that depends on every id before it."""
    assert history is not None, "reads a slot that was never written"
    value = zlib.crc32(bytes((*history, seed)))
    return EOS if value % 17 == 0 else value // 17 % NUM_TOKEN_IDS


def solo_run(seq: Sequence) -> list[int]:
    """What the sequence generates without scheduler, cache or neighbours."""
    ids = list(seq.request.prompt_token_ids)
    limit = min(len(ids) + (seq.params.max_tokens or MAX_MODEL_LEN), seq.request.max_model_len)
    while len(ids) < limit:
        ids.append(draw(tuple(ids), seq.seed))
        if ids[-1] == EOS:
            break
    return ids


class SchedulerMachine(RuleBasedStateMachine):
    hash_block: Callable[[BlockContent], int] | None = None
    is_hybrid = False  # some layers keep a state
    is_ahead = False  # a step is launched before the results of the one before are taken
    counts: Counter  # of operations, over all examples

    @initialize(
        block_size=st.integers(1, 4),
        num_spare_blocks=st.integers(0, 8),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from((1, 2, 3, 5, 9, 40)),
        is_caching=st.sampled_from((True, True, True, False)),
        max_snapshots=st.integers(0, 5),
    )
    def start(
        self,
        block_size: int,
        num_spare_blocks: int,
        max_num_seqs: int,
        budget: int,
        is_caching: bool,
        max_snapshots: int,
    ) -> None:
        self.num_blocks = -(-MAX_MODEL_LEN // block_size) + num_spare_blocks
        self.block_size, self.budget, self.max_num_seqs = block_size, budget, max_num_seqs
        self.scheduler = Scheduler(
            lambda: BlockManager(self.num_blocks, block_size, is_caching, type(self).hash_block),
            max_num_seqs,
            budget,
            (lambda: StatePool(max_num_seqs, max_snapshots * is_caching, block_size))
            if self.is_hybrid
            else None,
        )
        self.runner = FakeRunner(block_size)
        options = {"block_size": block_size, "device": "cpu", "async_scheduling": self.is_ahead}
        config = EngineConfig(model="none", **options)
        self.pipeline = Pipeline(config, self.scheduler, self.runner)
        self.chains: dict[int, History] = {}  # chain id -> the history that it stands for
        self.sequences: list[Sequence] = []

    @rule(
        prefix=st.sampled_from(PREFIXES),
        suffix=st.lists(st.integers(0, NUM_TOKEN_IDS - 1), min_size=1, max_size=12),
        n=st.integers(1, 3),
        max_tokens=st.sampled_from((1, 2, 5, 9, None)),
        seed=st.integers(0, 1),
        prompt_logprobs=st.sampled_from((None, None, None, 0)),
    )
    def add_request(
        self,
        prefix: History,
        suffix: list[int],
        n: int,
        max_tokens: int | None,
        seed: int,
        prompt_logprobs: int | None,
    ) -> None:
        self.counts["add"] += 1
        params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        request = Request(
            str(len(self.sequences)),
            None,
            [*prefix, *suffix],
            params,
            eos_token_ids=frozenset({EOS}),
            max_model_len=MAX_MODEL_LEN,
        )
        request.sequences = [Sequence(request, i, seed + i, None) for i in range(n)]
        for seq in request.sequences:
            self.sequences.append(seq)
            self.scheduler.add(seq)

    @rule(num_steps=st.integers(1, 4))
    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.scheduler.has_work:
                step = self._schedule()
                self.counts["pending"] += sum(entry.start == len(entry.seq) for entry in step)
                self.pipeline.run(step)
                self.counts["step"] += 1
                self.check_blocks()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.counts["abort"] += 1
        unfinished = [seq for seq in self.sequences if not seq.is_finished]
        seq = unfinished[which % len(unfinished)]
        self.scheduler.abort(seq)
        self.scheduler.abort(seq)  # a second time changes nothing
        assert seq.finish_reason == "abort"

    @precondition(lambda self: self.scheduler.has_work)
    @rule(num_committed=st.sampled_from((None, 0, 1, 2)))
    def fail_a_step(self, num_committed: int | None) -> None:
        """An exception before the run (None), or after some results were taken."""
        self.counts["reset"] += 1
        step = self._schedule()
        if num_committed is not None and not self.is_ahead:
            batch = Batch.build(step, self.block_size, torch.device("cpu"))
            results = self.runner.launch(batch).tokens()

            def interrupted() -> Iterator[SampledTokens]:
                yield from results[:num_committed]
                raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                self.scheduler.commit(step, interrupted())
        self.pipeline.clear()
        self.scheduler.reset(self.sequences)
        self.chains.clear()
        assert not self.scheduler.running
        assert self.scheduler.block_manager.num_free_blocks == self.num_blocks

    def _schedule(self) -> list[ScheduledSequence]:
        """A step, checked against what the slots hold before it writes them."""
        scheduler = self.scheduler
        oldest = scheduler.running[0] if scheduler.running else None
        num_preemptions, admitted = scheduler.num_preemptions, list(scheduler.running)
        step = scheduler.schedule()
        self.counts["preemption"] += scheduler.num_preemptions - num_preemptions
        assert step or self.pipeline._in_flight
        assert sum(entry.num_tokens for entry in step) <= self.budget
        assert len(scheduler.running) <= self.max_num_seqs
        assert len({id(entry.seq) for entry in step}) == len(step)
        may_rest = oldest is None or oldest.is_full
        assert may_rest or any(entry.seq is oldest for entry in step)
        num_victims = scheduler.num_preemptions - num_preemptions
        if num_victims:  # nobody is admitted, no victim either
            assert scheduler.running == admitted[: len(admitted) - num_victims]
        counts = scheduler.block_manager._ref_counts
        for seq, start, num_tokens, is_sampling in step:
            assert seq in scheduler.running
            assert num_tokens > 0
            length = len(seq) + seq.num_pending - is_sampling  # before this step
            assert length - len(seq) <= self.is_ahead
            assert seq.num_computed == start + num_tokens <= length
            assert seq.num_computed < MAX_MODEL_LEN
            assert is_sampling == (seq.num_computed == length)
            assert len(seq.block_table) == -(-seq.num_computed // self.block_size)
            for position in range(start):
                history = self.runner.read(seq.block_table, position)
                assert history == tuple(seq.token_ids[: position + 1])
            for block in seq.block_table[start // self.block_size :]:
                assert counts[block] == 1, "writes a block that somebody shares"
            if self.is_hybrid:
                state = self.runner.states[seq.state.source] if seq.state.source else ()
                assert state == tuple(seq.token_ids[:start])
                assert seq.state.slot > 0
            if start == seq.num_cached_tokens > 0:
                self.counts["hit"] += 1
        return step

    @invariant()
    def check_blocks(self) -> None:
        self.counts["check"] += 1
        manager = self.scheduler.block_manager
        tables = [seq.block_table for seq in self.sequences]
        holders = Counter(block for table in tables for block in table)
        assert all(len(set(table)) == len(table) for table in tables)
        assert manager._ref_counts == [holders[block] for block in range(self.num_blocks + 1)]
        free = set(manager._free)
        assert manager.num_free_blocks == len(free)
        assert not free & set(holders)
        assert free | set(holders) == set(range(1, self.num_blocks + 1)), "block 0 is nobody's"
        assert set(manager._by_hash.values()) <= set(manager._contents)
        assert set(manager._chain_ids) == set(manager._contents)
        for key, block in manager._by_hash.items():
            assert manager._hash(manager._contents[block]) == key
        for block, (parent, token_ids, _) in manager._contents.items():
            history = self.runner.slots[block * self.block_size + self.block_size - 1]
            head, tail = history[: -self.block_size], history[-self.block_size :]
            assert tail == token_ids
            assert (self.chains[parent] if parent else ()) == head
            assert self.chains.setdefault(manager._chain_ids[block], history) == history

    @invariant()
    def check_states(self) -> None:
        states = self.scheduler.caches.states
        if states is None:
            return
        owned = [seq.state.slot for seq in self.sequences if seq.state.slot]
        read = {seq.state.source for seq in self.sequences} - {0, *owned}
        kept = set(states._snapshots.values())
        assert len(set(owned)) == len(owned)
        assert len(owned) == states._num_owned <= self.max_num_seqs
        assert len(kept | read) <= states.max_snapshots
        assert kept.isdisjoint(owned)
        free = states._free
        assert len(set(free)) == len(free)
        assert {*free, *owned, *kept, *read} == set(range(1, states.num_slots + 1))
        assert len(free) + len(owned) + len(kept | read) == states.num_slots, "0 is nobody's"
        chains = self.scheduler.block_manager._chain_ids.values()
        assert set(states._snapshots) <= set(chains), "its blocks are gone"
        for chain_id, slot in states._snapshots.items():
            assert self.runner.states[slot] == self.chains[chain_id]
        planners = [seq for seq, _ in states._planned.values()]
        assert all(seq in self.scheduler.running for seq in planners)
        self.counts["snapshots"] += len(kept)

    @invariant()
    def check_sequences(self) -> None:
        waiting, running = list(self.scheduler.waiting), self.scheduler.running
        unfinished = [seq for seq in self.sequences if not seq.is_finished]
        assert Counter(map(id, [*waiting, *running])) == Counter(map(id, unfinished))
        for seq in self.sequences:
            assert 0 <= seq.num_computed <= len(seq) + seq.num_pending
            assert len(seq) <= MAX_MODEL_LEN
            if seq not in running:
                assert (seq.block_table, seq.num_computed) == ([], 0)
                assert (seq.state.source, seq.state.slot) == (0, 0)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        unfinished = [seq for seq in self.sequences if not seq.is_finished]
        # The oldest running sequence advances on each step and is never preempted.
        bound = sum(len(solo_run(seq)) + 2 * self.is_ahead for seq in unfinished)
        for _ in range(bound):
            self.run_steps(1)
            self.check_sequences()
        assert not self.scheduler.has_work, f"not done after {bound} steps"
        assert self.scheduler.block_manager.num_free_blocks == self.num_blocks
        if (states := self.scheduler.caches.states) is not None:
            assert states.num_free_slots + states.num_snapshots == states.num_slots
        for seq in self.sequences:
            expected = solo_run(seq)
            if seq.finish_reason == "abort":
                assert seq.token_ids == expected[: len(seq)]
                continue
            assert seq.token_ids == expected
            assert seq.finish_reason == ("stop" if expected[-1] == EOS else "length")
            if seq.params.prompt_logprobs is not None and seq.index == 0:
                reported = [list(found or ()) for found in seq.request.prompt_logprobs]
                assert reported == [[], *([i] for i in seq.request.prompt_token_ids[1:])]


def _constant_hash(content: BlockContent) -> int:
    return 0


@pytest.mark.parametrize("kind", ["attention", "hybrid", "ahead"])
@pytest.mark.parametrize("hash_block", [None, _constant_hash], ids=["xxh3", "constant"])
def test_invariants_hold_under_random_operations(
    hash_block: Callable[[BlockContent], int] | None, kind: str
):
    class Machine(SchedulerMachine):
        pass

    Machine.counts = Counter()
    Machine.is_hybrid = kind == "hybrid"
    Machine.is_ahead = kind == "ahead"
    Machine.hash_block = staticmethod(hash_block) if hash_block else None
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=NUM_STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    counts = Machine.counts
    num_operations = counts["add"] + counts["step"] + counts["abort"] + counts["reset"]
    assert num_operations >= 5_000
    # The run has met what it is for.
    assert min(counts["preemption"], counts["hit"], counts["reset"], counts["abort"]) >= 50
    assert (counts["snapshots"] >= 300) == Machine.is_hybrid
    assert (counts["pending"] >= 300) == Machine.is_ahead
