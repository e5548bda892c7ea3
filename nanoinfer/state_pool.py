"""Who owns which slot of the recurrent states, and which states are kept to start from again.

In: sequences that run, with the chains of their blocks. Out: two slots for each: the one that its
next step starts from, `state.source`, and the one that the step writes, `state.slot`.

A state is changed in place, so that keeping one would cost a copy. It costs none here: the sequence
gives its slot away, as it is, and goes on in another one.

    step           reads   writes
    [0, 32)        0 (*)   slot 3        (*) the null slot: no past
    kept at 32     slot 3 is a snapshot now
    [32, 40)       3       slot 5
    [40, 41)       5       slot 5        in place, as ever

Snapshots are few, since each is as large as thousands of keys: behind a prompt's last full block
(that token's logits are needed, so never at its end), at a point where prompts were seen to part,
and, while there is room, behind the last full block of an answer, for the next turn of a chat.

Invariants: used + free = total; slot 0 belongs to nobody: padding writes there. No slot is written
that another sequence of the step reads. Snapshots never take a slot that a running sequence needs:
all slots that no sequence owns are at most `max_snapshots`, and the others are as many as sequences
can run, so that `allocate` never fails. A snapshot dies with the block that leads to it; if all are
in use, the least recently used goes first.

A production engine adds: states of several tokens back, for speculation; offloading to host memory.
"""

from collections import OrderedDict

from nanoinfer.sequence import Sequence

NULL_SLOT = 0


class StatePool:
    """Slots 1..max_num_seqs + max_snapshots, of `bytes_per_slot` in all layers."""

    def __init__(
        self, max_num_seqs: int, max_snapshots: int, block_size: int, bytes_per_slot: int = 0
    ) -> None:
        self.num_slots = max_num_seqs + max_snapshots
        self.max_snapshots = max_snapshots
        self._block_size = block_size
        self._bytes_per_slot = bytes_per_slot
        self._free = list(range(self.num_slots, 0, -1))
        self._num_owned = 0  # by sequences, to be written
        self._is_kept = [False] * (self.num_slots + 1)  # as a snapshot
        self._num_readers = [0] * (self.num_slots + 1)  # sequences that start from it next
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # chain id -> slot; oldest first
        self._planned: dict[int, tuple[Sequence, int]] = {}  # chain id -> who keeps it, in tokens

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def snapshot_bytes(self) -> int:
        return len(self._snapshots) * self._bytes_per_slot

    def deepest(self, chain_ids: list[int]) -> int:
        """How many leading blocks there are up to the last one with a snapshot."""
        depths = range(len(chain_ids), 0, -1)
        return next((n for n in depths if chain_ids[n - 1] in self._snapshots), 0)

    def is_planned(self, chain_id: int) -> bool:
        return chain_id in self._planned

    def start(self, seq: Sequence, known: list[int], depth: int) -> None:
        """Resume behind the first `depth` blocks of the chain `known`, where a snapshot is."""
        assert (seq.state.source, seq.state.slot) == (NULL_SLOT, NULL_SLOT), "it holds slots"
        if depth > 0:
            self._snapshots.move_to_end(known[depth - 1])
            self._read(seq, self._snapshots[known[depth - 1]])
        if self.max_snapshots == 0:
            return
        points = {(len(seq) - 1) // self._block_size, len(known)}
        seq.state.snapshot_points = tuple(n * self._block_size for n in sorted(points) if n > depth)
        if len(known) > depth:
            self._planned[known[-1]] = seq, len(known) * self._block_size

    def chunk_end(self, seq: Sequence, end: int) -> int:
        return next((p for p in seq.state.snapshot_points if seq.num_computed < p < end), end)

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """A slot to write: always there."""
        if seq.state.slot == NULL_SLOT:
            seq.state.slot = self._free.pop()
            self._num_owned += 1
        return True

    def register(self, seq: Sequence) -> None:
        """Its state is that of num_computed tokens: keep it, if it is worth it."""
        self._read(seq, NULL_SLOT)
        if not self._keep(seq):
            seq.state.source = seq.state.slot
        self._forget_plans(seq, seq.num_computed)

    def forget(self, chain_id: int) -> None:
        """Its blocks are gone: nobody can start there any more."""
        slot = self._snapshots.pop(chain_id, NULL_SLOT)
        self._is_kept[slot] = False
        if slot != NULL_SLOT and self._num_readers[slot] == 0:
            self._free.append(slot)

    def free(self, seq: Sequence) -> None:
        self._read(seq, NULL_SLOT)
        if seq.state.slot != NULL_SLOT:
            self._free.append(seq.state.slot)
            self._num_owned -= 1
        seq.state.reset()
        self._forget_plans(seq)

    def _keep(self, seq: Sequence) -> bool:
        """Turn the slot of `seq` into a snapshot; False if there is no reason, or no room."""
        count, rest = divmod(seq.num_computed, self._block_size)
        is_planned = seq.num_computed in seq.state.snapshot_points
        is_answer = rest == 0 and seq.num_remaining == 0 and self.max_snapshots > 0
        if count != seq.num_registered_blocks or not (is_planned or is_answer):
            return False
        if is_answer and not is_planned:  # takes what is free, and its own last one's place
            self.forget(seq.state.answer_chain)
        if seq.chain_id in self._snapshots:
            self._snapshots.move_to_end(seq.chain_id)
            return False
        if self._num_kept() >= self.max_snapshots and not (is_planned and self._drop_oldest()):
            return False
        if not is_planned:
            seq.state.answer_chain = seq.chain_id
        slot, seq.state.slot = seq.state.slot, NULL_SLOT
        self._num_owned -= 1
        self._snapshots[seq.chain_id] = slot
        self._is_kept[slot] = True
        self._read(seq, slot)
        return True

    def _num_kept(self) -> int:
        return self.num_slots - len(self._free) - self._num_owned

    def _drop_oldest(self) -> bool:
        """Free the least recently used snapshot that nobody is about to read."""
        for chain_id, slot in self._snapshots.items():
            if self._num_readers[slot] == 0:
                self.forget(chain_id)
                return True
        return False

    def _read(self, seq: Sequence, slot: int) -> None:
        """Let `seq` start from `slot` in its next step, instead of what it had."""
        old = seq.state.source
        if old not in (NULL_SLOT, seq.state.slot):
            self._num_readers[old] -= 1
            if self._num_readers[old] == 0 and not self._is_kept[old]:
                self._free.append(old)
        seq.state.source = slot
        if slot != NULL_SLOT:
            self._num_readers[slot] += 1

    def _forget_plans(self, seq: Sequence, reached: int | None = None) -> None:
        """Those that `seq` has passed, kept or not; or all of them."""
        for chain_id, (planner, point) in list(self._planned.items()):
            if planner is seq and (reached is None or reached >= point):
                del self._planned[chain_id]
