"""Launch a step before the results of the one before are there.

In: a step, from the scheduler. Out: the entries of steps whose results have been taken.

    host     schedule 1, launch | schedule 2, launch | take 1 | schedule 3, launch | take 2
    device             step 1 ..................... | step 2 ...................... | step 3

Step 2 is built without knowing what step 1 samples: those ids stay on the device and go from its
output to the input of step 2. The host knows that each sequence has one more token, and not which.
So a sequence that ends with step 1 (eos, a stop string) runs once more for nothing, and its result
is dropped. What it held is free at once: a GPU works in the order of launches, so that whoever gets
its blocks writes after it.

Some steps must be waited for: penalties count the tokens so far, log probabilities are looked up
when the token is known. So must all steps of a model with recurrent layers, since a state that is
kept for later must not be stepped on. On a CPU a launch is the whole step, and nothing is gained;
it runs the same way, which is how it is tested.

Source: vLLM's asynchronous scheduling, SGLang's zero-overhead scheduler (2024).
"""

import contextlib
from collections import deque

import torch

from nanoinfer.batch import Batch
from nanoinfer.config import EngineConfig
from nanoinfer.launched import Launched
from nanoinfer.model_runner import ModelRunner
from nanoinfer.scheduler import ScheduledSequence, Scheduler


class Pipeline:
    def __init__(self, config: EngineConfig, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._block_size = config.block_size
        self._device = with_index(config.torch_device)
        self._scheduler = scheduler
        self.runner = runner
        wanted = config.async_scheduling
        wanted = self._device.type == "cuda" if wanted is None else wanted
        self._is_async = wanted and scheduler.caches.states is None
        self._in_flight: deque[tuple[list[ScheduledSequence], Launched]] = deque()

    def run(self, step: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Launch a step (an empty one: nothing can run before results are there), take results."""
        with on_device(self._device):
            return self._run(step)

    def _run(self, step: list[ScheduledSequence]) -> list[ScheduledSequence]:
        if step:
            batch = Batch.build(step, self._block_size, self._device)
            before = self._in_flight[-1][1] if self._in_flight else None
            self._in_flight.append((step, self.runner.launch(batch, before)))
            if self._is_async:
                for row, seq in enumerate(entry.seq for entry in step if entry.is_sampling):
                    seq.pending_row = row
        keep = 1 if step and self._is_async and not any(map(_needs_tokens, step)) else 0
        done: list[ScheduledSequence] = []
        while len(self._in_flight) > keep:
            finished, launched = self._in_flight.popleft()
            self._scheduler.commit(finished, launched.tokens())
            done += finished
        if not self._scheduler.has_work:  # all that is in flight is in vain
            self._in_flight.clear()
        return done

    def clear(self) -> None:
        """Forget what was launched."""
        self._in_flight.clear()


def with_index(device: torch.device) -> torch.device:
    """This thread's GPU, where none was named."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches where the thread is, and any thread may step an engine."""
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.device(device) if has_gpu else contextlib.nullcontext()


def _needs_tokens(entry: ScheduledSequence) -> bool:
    """Must its token be known before the next step is launched?"""
    params = entry.seq.params
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    asks = params.logprobs is not None or params.prompt_logprobs is not None
    return asks or (entry.is_sampling and penalties != (0, 0, 1))
