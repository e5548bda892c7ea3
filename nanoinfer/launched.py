"""A step that a GPU may still be working on.

In: what the device has drawn, or will have. Out: its token ids on the device, for a step that is
launched before anybody knows them; and on the host, once they are there.

    launch(n)     kernels of step n ... | ids -> pinned memory | event
    launch(n+1)                                                        kernels of step n + 1 ...
    tokens() of n waits for the event only, not for what was launched behind it
"""

import torch
from torch import Tensor

from nanoinfer.batch import Batch
from nanoinfer.outputs import Logprob
from nanoinfer.sampler import Drawn, top_logprobs
from nanoinfer.scheduler import SampledTokens

Candidates = dict[int, Logprob]


class Launched:
    """`drawn`: None for a step that samples nothing. prompt_logprobs: by scheduled sequence."""

    def __init__(
        self, batch: Batch, drawn: Drawn | None, prompt_logprobs: dict[int, list[Candidates]]
    ) -> None:
        self._batch = batch
        self._drawn = drawn
        self._prompt_logprobs = prompt_logprobs
        self._event: torch.cuda.Event | None = None
        self._ids = torch.zeros(0) if drawn is None else drawn.token_ids
        if self._ids.is_cuda:
            on_device = self._ids
            self._ids = torch.empty_like(on_device, device="cpu", pin_memory=True)
            self._ids.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def token_ids(self) -> Tensor:
        """[R] on the device."""
        assert self._drawn is not None, "the step samples"
        return self._drawn.token_ids

    def tokens(self) -> list[SampledTokens]:
        """Wait for the step; what it sampled, for each scheduled sequence."""
        if self._event is not None:
            self._event.synchronize()
        results = [SampledTokens([])] * self._batch.num_entries
        if self._drawn is not None:
            ids = self._ids.tolist()
            rows = zip(self._batch.sampled_entries, ids, collect(self._drawn, ids), strict=True)
            for i, token_id, logprobs in rows:
                results[i] = SampledTokens([token_id], None if logprobs is None else [logprobs])
        for i, found in self._prompt_logprobs.items():
            results[i] = results[i]._replace(prompt_logprobs=found)
        return results


def collect(drawn: Drawn, ids: list[int]) -> list[Candidates | None]:
    """Log probabilities of each row that asked for them, on the host."""
    if drawn.logprobs is None:
        return [None] * len(ids)
    pairs = zip(ids, drawn.num_logprobs, strict=True)
    wanted, counts = zip(*((i, k) for i, k in pairs if k is not None), strict=True)
    found = iter(top_logprobs(drawn.logprobs, [*wanted], [*counts]))
    return [None if k is None else next(found) for k in drawn.num_logprobs]
