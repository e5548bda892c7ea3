"""What is asked of engines in a comparison: lengths, and which tokens count.

In: a name from `WORKS`. Out: a `Task`, which draws the token ids of a round from its seed alone.
One task may have turns: the prompt of a turn is all before it, with the engine's own answers, and
new ids, so that ids differ between engines, but lengths never do.
"""

import random
from typing import NamedTuple

from limits import Work


class Task(NamedTuple):
    """What a round asks of every engine, and which tokens count."""

    work: Work  # of one turn
    counted: str = "output"  # or prompt, or decode: output tokens after the first
    num_shared: int = 0  # tokens that all prompts begin with
    num_turns: int = 1  # the prompt of a turn: all before it, answers too, and new ids

    @property
    def has_prefixes(self) -> bool:
        return self.num_shared > 0 or self.num_turns > 1

    @property
    def num_tokens(self) -> int:
        if self.counted == "prompt":
            return sum(self.work.input_lens)
        first = len(self.work.output_lens) if self.counted == "decode" else 0
        return self.num_turns * (sum(self.work.output_lens) - first)

    def draw(self, vocab_size: int, seed: int) -> list[list[list[int]]]:
        """New ids by turn and request; the same for every engine."""
        rng, ids = random.Random(seed), range(vocab_size)
        shared = rng.choices(ids, k=self.num_shared)
        own_lens = [n - self.num_shared for n in self.work.input_lens]
        turns = range(self.num_turns)
        return [[shared + rng.choices(ids, k=n) for n in own_lens] for _ in turns]

    def __str__(self) -> str:
        shared = f", {self.num_shared} tokens shared" if self.num_shared else ""
        return f"{self.work}{shared}" + (f", {self.num_turns} turns" if self.num_turns > 1 else "")


def _draw_mixed(num_seqs: int) -> Work:
    rng = random.Random(0)  # the same lengths in every run
    pairs = [(rng.randint(64, 256), rng.randint(32, 128)) for _ in range(num_seqs)]
    return Work([n for n, _ in pairs], [n for _, n in pairs])


WORKS = {
    "latency": Task(Work.equal(1, 256, 64), "decode"),
    "prefill": Task(Work.equal(1, 512, 1), "prompt"),
    "offline": Task(Work.equal(16, 256, 128)),
    "mixed": Task(_draw_mixed(64)),
    "long": Task(Work.equal(16, 1024, 64)),
    "prefix": Task(Work.equal(32, 1050, 32), num_shared=1000),
    "chat": Task(Work.equal(4, 64, 32), num_turns=4),
}
BATCHES = {n: Task(Work.equal(n, 128, 64)) for n in (1, 2, 4, 8, 16, 32, 64)}  # to be plotted
