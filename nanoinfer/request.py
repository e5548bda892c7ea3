"""What was asked, and its n answers: a `Request` owns n `Sequence`s.

In: a checked prompt and SamplingParams; later the log probabilities of the prompt.
Out: `RequestOutput`s, of everything (`output`) or of what is new since the last one (`delta`).
"""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nanoinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanoinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoinfer.sequence import Sequence

Logprobs = dict[int, Logprob]  # candidates at one position, by token id


class Request:
    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        decode: Callable[[int], str] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self._decode = decode
        self.sequences: list[Sequence] = []
        self.prompt_logprobs: list[Logprobs | None] = [None]  # nothing predicts the first token
        self.when_finished: Callable[[Request], None] = lambda request: None
        self.metrics = RequestMetrics(arrival_time=time.time())
        self._reported = [(0, 0, False)] * params.n  # tokens, characters, finished: per sequence

    @property
    def is_finished(self) -> bool:
        return all(seq.is_finished for seq in self.sequences)

    @property
    def is_reported(self) -> bool:
        """`delta` has told that every sequence is finished."""
        return all(was_finished for *_, was_finished in self._reported)

    def name_tokens(self, logprobs: list[Logprobs]) -> None:
        """Fill in the text of every candidate."""
        if self._decode is None:
            return
        for candidates in logprobs:
            for token_id, candidate in candidates.items():
                candidate.decoded_token = self._decode(token_id)

    def add_prompt_logprobs(self, logprobs: list[Logprobs]) -> None:
        self.name_tokens(logprobs)
        self.prompt_logprobs += logprobs

    def output(self) -> RequestOutput:
        """Everything up to now."""
        return self._output([self._completion(seq, 0, 0) for seq in self.sequences])

    def delta(self) -> RequestOutput | None:
        """What is new since the last call; None when that is nothing."""
        completions, is_news = [], False
        for i, seq in enumerate(self.sequences):
            num_tokens, num_chars, was_finished = self._reported[i]
            completion = self._completion(seq, num_tokens, num_chars)
            completions.append(completion)
            has_text = bool(completion.token_ids or completion.text)
            is_news |= has_text or seq.is_finished != was_finished
            num_tokens += len(completion.token_ids)
            num_chars += len(completion.text)
            self._reported[i] = (num_tokens, num_chars, seq.is_finished)
        return self._output(completions) if is_news else None

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        wants_prompt = self.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=self.is_finished,
            prompt_logprobs=self.prompt_logprobs[:] if wants_prompt else None,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            metrics=dataclasses.replace(self.metrics),
        )

    def _completion(self, seq: "Sequence", from_token: int, from_char: int) -> CompletionOutput:
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=seq.index,
            text=seq.text()[from_char:],
            token_ids=seq.token_ids[seq.num_prompt_tokens + from_token :],
            cumulative_logprob=seq.cumulative_logprob if wants_logprobs else None,
            logprobs=seq.logprobs[from_token:] if wants_logprobs else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )
