"""One answer in the making: what the scheduler runs and the block manager gives blocks to.

In: its request's prompt, then one sampled token at a time.
Out: token ids, text, and the reason why it ended.

A sequence's next work is always token_ids[num_computed : num_computed + n]: prompt, generated
tokens and what was lost to preemption are the same thing.

    token_ids     [ prompt ............ | generated ...... ]
    num_computed  ---- keys and values in the cache --->|      (<= len(token_ids) + num_pending)

Of a step that the device still works on, the sampled token is pending: it counts as the next work
before anybody knows which one it is.
"""

from dataclasses import dataclass

from nanoinfer.positions import ImagePositions
from nanoinfer.request import Logprobs, Request
from nanoinfer.tokenizer import Detokenizer


@dataclass
class SequenceState:
    """Where its recurrent state is, where the model has one; state_pool.py's business."""

    source: int = 0  # slot that its next step starts from
    slot: int = 0  # slot that the step leaves it in
    snapshot_points: tuple[int, ...] = ()  # where to keep it, in tokens
    answer_chain: int = 0  # behind which one of its answer is kept

    def reset(self) -> None:
        """It holds nothing."""
        self.source = self.slot = self.answer_chain = 0
        self.snapshot_points = ()


class Sequence:
    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        detokenizer: Detokenizer | None,
    ) -> None:
        self.request = request
        self.index = index
        self.params = request.params
        self.seed = seed
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        longest_answer = self.params.max_tokens or request.max_model_len
        self.max_len = min(self.num_prompt_tokens + longest_answer, request.max_model_len)
        self.image_positions: ImagePositions | None = None  # of a prompt with images
        self.num_computed = 0
        self.num_pending = 0  # tokens that launched steps sample
        self.pending_row = 0  # of the last one of them, among all that its step samples
        self.was_admitted = False
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache on first admission
        self.block_table: list[int] = []
        self.chain_id = 0  # of its last registered block; 0 is the root of all chains
        self.num_registered_blocks = 0
        self.state = SequenceState()
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[Logprobs] = []
        self.cumulative_logprob = 0.0
        self._detokenizer = detokenizer

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_remaining(self) -> int:
        """Known and pending tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_full(self) -> bool:
        """What is pending will be its last token."""
        return self.num_pending > 0 and len(self.token_ids) + self.num_pending >= self.max_len

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
        elif len(self.token_ids) >= self.max_len:
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
