"""Who runs in this step, and for how many tokens.

In: sequences that wait; after the step, the tokens sampled for those that ran.
Out: a step, which is a list of (sequence, first token, number of tokens).

There is no prefill step and no decode step. Under one token budget, sequences that need a single
token (decoding) go first, prompts take what is left in chunks, then waiting sequences are admitted:

    budget 8 :  A decodes 1 | B decodes 1 | C's prompt 20..25 (6 of 30)

Invariants: `schedule` advances num_computed, `commit` registers blocks, takes tokens, checks stops
and frees. The oldest running sequence always advances, so every request ends: when the pool is
short the newest is preempted, that is, it drops its blocks and will be computed again. A waiting
sequence whose next block is being computed already waits for it instead of computing it too.

A production engine adds: priorities, fairness between users, KV transfer between machines.
One kind of step and the token budget: vLLM V1, after Sarathi-Serve's chunked prefill (2024).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from nanoinfer.block_manager import BlockManager
from nanoinfer.caches import Caches, Prefix
from nanoinfer.outputs import Logprob
from nanoinfer.sequence import Sequence
from nanoinfer.state_pool import StatePool


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: token_ids[start : start + num_tokens]."""

    seq: Sequence
    start: int
    num_tokens: int
    is_sampling: bool
    """The chunk reaches the last token, known or pending: the next is drawn from its logits."""


class SampledTokens(NamedTuple):
    """What the runner returns for one ScheduledSequence."""

    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob]] | None = None


class Scheduler:
    """Queues of waiting and running sequences over one set of caches."""

    def __init__(
        self,
        make_block_manager: Callable[[], BlockManager],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        make_state_pool: Callable[[], StatePool] | None = None,
    ) -> None:
        self._make_block_manager = make_block_manager
        self._make_state_pool = make_state_pool  # None: no layer is recurrent
        self.caches = self._make_caches()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0

    @property
    def block_manager(self) -> BlockManager:
        return self.caches.blocks

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step. RuntimeError if there is work and none of it can run."""
        preemptions_before = self.num_preemptions
        step = self._schedule_running()
        if self.num_preemptions == preemptions_before:
            self._admit_waiting(step)
        if not step and self.has_work and not any(seq.num_pending for seq in self.running):
            raise RuntimeError(
                f"scheduler: nothing can run; {len(self.running)} running, {len(self.waiting)} "
                f"waiting, {self.block_manager.num_free_blocks} of "
                f"{self.block_manager.num_blocks} blocks free"
            )
        return step

    def commit(self, step: list[ScheduledSequence], sampled: list[SampledTokens]) -> None:
        """Take a step's results: a ragged list, one entry per scheduled sequence.

        What ended after the step was launched has no use for them.
        """
        for (seq, _, _, is_sampling), result in zip(step, sampled, strict=True):
            if seq.is_finished:
                continue
            seq.num_pending -= is_sampling
            self.caches.register(seq)
            if result.prompt_logprobs is not None:
                seq.request.add_prompt_logprobs(result.prompt_logprobs)
            for i, token_id in enumerate(result.token_ids):
                seq.append_token(token_id, result.logprobs[i] if result.logprobs else None)
                if seq.is_finished:
                    self._remove(seq)
                    break

    def abort(self, seq: Sequence) -> None:
        """Finish with reason "abort", wherever the sequence is, and give its blocks back."""
        if not seq.is_finished:
            seq.finish("abort")
            self._remove(seq)

    def reset(self, seqs: Iterable[Sequence]) -> None:
        """After an exception in a step: forget all blocks, compute what is unfinished again.

        The queues may be half updated, so the caller says which sequences there are.
        """
        self.caches = self._make_caches()
        self.running, self.waiting = [], deque(seq for seq in seqs if not seq.is_finished)
        for seq in self.waiting:
            seq.num_pending = 0
            seq.block_table = []
            seq.state.reset()
            self.caches.free(seq)

    def describe(self, step: list[ScheduledSequence]) -> str:
        """A step that was committed, in one line: request.child[first:last], and the pool."""
        who = ", ".join(f"{s.request.request_id}.{s.index}[{a}:{a + n}]" for s, a, n, _ in step)
        num_tokens, blocks = sum(entry.num_tokens for entry in step), self.block_manager
        used = f"{blocks.num_blocks - blocks.num_free_blocks} of {blocks.num_blocks} blocks used"
        hits = f"{self.num_prefix_hit_tokens} prefix hits"
        return f"{num_tokens} tokens: {who}  |  {len(self.waiting)} waiting, {used}, {hits}"

    def _make_caches(self) -> Caches:
        states = None if self._make_state_pool is None else self._make_state_pool()
        return Caches(self._make_block_manager(), states)

    def _schedule_running(self) -> list[ScheduledSequence]:
        step: list[ScheduledSequence] = []
        victims: list[Sequence] = []
        budget = self._max_num_batched_tokens
        for seq in sorted(self.running, key=lambda s: s.num_remaining > 1):
            num_tokens = self._chunk(seq, budget)
            if num_tokens == 0 or seq in victims:
                continue
            while not self.caches.allocate(seq, seq.num_computed + num_tokens):
                victim = self._preempt_newest()
                victims.append(victim)
                for entry in [entry for entry in step if entry.seq is victim]:
                    budget += entry.num_tokens
                    victim.num_pending -= entry.is_sampling
                    step.remove(entry)
                if victim is seq:
                    break
            else:
                step.append(self._advance(seq, num_tokens))
                budget -= num_tokens
        return step

    def _admit_waiting(self, step: list[ScheduledSequence]) -> None:
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return
        budget = self._max_num_batched_tokens - sum(entry.num_tokens for entry in step)
        in_progress = {self.caches.in_progress(seq) for seq in self.running}
        deferred: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            seq = self.waiting.popleft()
            prefix = self.caches.find_prefix(seq)
            if self.caches.must_wait(seq, prefix, in_progress):
                deferred.append(seq)
                continue
            if not self.caches.can_admit(seq, prefix):
                self.waiting.appendleft(seq)
                break
            self._admit(seq, prefix)
            num_tokens = self._chunk(seq, budget)
            has_room = self.caches.allocate(seq, seq.num_computed + num_tokens)
            assert has_room, f"{seq.request.request_id}: can_admit said that there is room"
            in_progress.add(self.caches.in_progress(seq))
            step.append(self._advance(seq, num_tokens))
            budget -= num_tokens
        self.waiting.extendleft(reversed(deferred))

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """How many of its tokens to compute next."""
        num_tokens = 0 if seq.is_full else min(seq.num_remaining, budget)
        return self.caches.chunk_end(seq, seq.num_computed + num_tokens) - seq.num_computed

    def _admit(self, seq: Sequence, prefix: Prefix) -> None:
        self.caches.admit(seq, prefix)
        self.running.append(seq)
        self.num_prefix_hit_tokens += seq.num_computed
        metrics = seq.request.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.time()
        if not seq.was_admitted:
            seq.was_admitted = True
            seq.num_cached_tokens = seq.num_computed

    def _advance(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        start = seq.num_computed
        seq.num_computed += num_tokens
        is_sampling = seq.num_remaining == 0
        seq.num_pending += is_sampling
        return ScheduledSequence(seq, start, num_tokens, is_sampling)

    def _preempt_newest(self) -> Sequence:
        victim = self.running.pop()
        self.caches.free(victim)
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def _remove(self, seq: Sequence) -> None:
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)
        self.caches.free(seq)
