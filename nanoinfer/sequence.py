"""One request's state: a `Request` owns n `Sequence`s, a `Sequence` is what the scheduler runs.

In: a checked prompt and SamplingParams. Then one sampled token at a time.
Out: `RequestOutput`s, whole or as what is new since the last one.

A sequence's next work is always token_ids[num_computed : num_computed + n]: prompt, generated
tokens and what was lost to preemption are the same thing.

    token_ids     [ prompt ............ | generated ...... ]
    num_computed  ---- keys and values in the cache --->|      (<= len(token_ids))
"""

import time
from collections.abc import Callable

import numpy as np

from nanoinfer.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.tokenizer import Detokenizer

Logprobs = dict[int, Logprob]


class Sequence:
    """One answer in the making."""

    def __init__(
        self,
        request: "Request",
        index: int,
        seed: int,
        detokenizer: Detokenizer | None,
    ) -> None:
        self.request = request
        self.index = index
        self.params: SamplingParams = request.params
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed = 0
        self.was_admitted = False
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache on first admission
        self.block_table: list[int] = []
        self.chain_id = 0  # of its last registered block; 0 is the root of all chains
        self.num_registered_blocks = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self._detokenizer = detokenizer

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Known tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Its prompt's logits are still needed, so its prompt must not come from the cache."""
        return (
            self.params.prompt_logprobs is not None
            and self.index == 0
            and len(self.request.prompt_logprobs) < self.num_prompt_tokens
        )

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Rotary positions of token_ids[start:stop]."""
        return np.arange(start, stop, dtype=np.int64)

    def append_token(self, token_id: int, logprobs: Logprobs | None) -> None:
        """Take a sampled token and decide whether it was the last."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.request.name_tokens([logprobs])
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token_id].logprob
        params, count = self.params, self.num_output_tokens
        may_stop = count >= params.min_tokens
        is_eos = may_stop and not params.ignore_eos and token_id in self.request.eos_token_ids
        is_stop_id = may_stop and token_id in params.stop_token_ids
        if self._detokenizer is not None:
            hide = (is_eos or is_stop_id) and not params.include_stop_str_in_output
            if not hide:
                stop = self._detokenizer.append(token_id, check_stop=may_stop)
                if stop is not None:
                    self.finish("stop", stop)
                    return
        if is_eos or is_stop_id:
            self.finish("stop", None if is_eos else token_id)
        elif count == params.max_tokens or len(self) >= self.request.max_model_len:
            self.finish("length")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        if self.is_finished:
            return
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._detokenizer is not None and not isinstance(stop_reason, str):
            self._detokenizer.finish()

    def text(self) -> str:
        """What may be shown: all of it once finished, else without a possible stop string."""
        if self._detokenizer is None:
            return ""
        full = self._detokenizer.text
        return full if self.is_finished else full[: self._detokenizer.num_stable_chars()]


class Request:
    """What was asked and its n sequences; `output` reports all, `delta` what is new."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        decode: Callable[[list[int]], str] | None = None,
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
                candidate.decoded_token = self._decode([token_id])

    def add_prompt_logprobs(self, logprobs: list[Logprobs]) -> None:
        self.name_tokens(logprobs)
        self.prompt_logprobs += logprobs

    def output(self) -> RequestOutput:
        """Everything up to now."""
        return self._output([self._completion(seq, 0, 0) for seq in self.sequences])

    def delta(self) -> RequestOutput | None:
        """What is new since the last call; None when that is nothing."""
        new = []
        for i, seq in enumerate(self.sequences):
            num_tokens, num_chars, was_finished = self._reported[i]
            completion = self._completion(seq, num_tokens, num_chars)
            if completion.token_ids or completion.text or seq.is_finished != was_finished:
                new.append(completion)
            self._reported[i] = (
                num_tokens + len(completion.token_ids),
                num_chars + len(completion.text),
                seq.is_finished,
            )
        return self._output(new) if new else None

    def _output(self, completions: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=completions,
            finished=self.is_finished,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            metrics=self.metrics,
        )

    def _completion(self, seq: Sequence, from_token: int, from_char: int) -> CompletionOutput:
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
