"""What a user asks of one request: how to draw tokens, when to stop, what to report.

In: keyword arguments with vLLM's names and meanings.
Out: a `SamplingParams` whose values have all been checked. Fields may be set after construction,
as vLLM's examples do; the engine takes a checked copy when the request is added.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How to generate. Raises ValueError naming field, value and what is needed.

    `logprobs=k`: the k most likely tokens and the sampled one at each position, raw (before
    temperature, penalties and filters); -1 means the whole vocabulary.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self.stop = _as_list([self.stop] if isinstance(self.stop, str) else self.stop)
        self.stop_token_ids = _as_list(self.stop_token_ids)
        for name, (need, ok) in _CHECKS.items():
            value = getattr(self, name)
            if not ok(value):
                raise ValueError(f"{name}: got {value!r}, need {need}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: got {self.min_tokens}, need at most max_tokens = {self.max_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError(f"stop: got {self.stop!r} with detokenize=False; stop needs the text")

    @classmethod
    def from_generation_config(cls, found: dict[str, Any]) -> "SamplingParams":
        """The defaults that a checkpoint's generation_config.json suggests."""
        names = {name: name for name in _GENERATION_FIELDS} | {"max_new_tokens": "max_tokens"}
        values = {ours: found[hf] for hf, ours in names.items() if found.get(hf) is not None}
        return cls(**values)

    def clone(self, **changes: Any) -> "SamplingParams":
        """A copy, checked again."""
        return dataclasses.replace(self, **changes)


def check_params(each: Any, num_prompts: int) -> None:
    """One SamplingParams for each prompt, or an error that says what is there instead."""
    if not isinstance(each, list | tuple) or not all(isinstance(p, SamplingParams) for p in each):
        raise TypeError(
            f"sampling_params: got {each!r:.80}, need SamplingParams, or a list of them"
        )
    if len(each) != num_prompts:
        raise ValueError(
            f"sampling_params: got {len(each)} for {num_prompts} prompts; need one, or one for each"
        )


_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def _as_list(value: Any) -> Any:
    """A copy as a list; what cannot be one is left for the check to refuse."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | frozenset) else value


def _is_list(value: Any, is_good: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_good, value))


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _is_number(value: Any, low: float, high: float) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and math.isfinite(value) and low <= value <= high


def _is_logit_bias(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(_is_int(k, 0) and _is_number(v, -100, 100) for k, v in value.items())
    )


_FLAG = ("True or False", lambda v: isinstance(v, bool))
_LOGPROBS = ("None, -1 (the whole vocabulary) or an integer >= 0",
             lambda v: v is None or _is_int(v, -1))  # fmt: skip
_CHECKS: dict[str, tuple[str, Any]] = {
    "n": ("an integer >= 1", lambda v: _is_int(v, 1)),
    "temperature": ("a number >= 0", lambda v: _is_number(v, 0, math.inf)),
    "top_k": ("an integer >= -1 (0 and -1: off)", lambda v: _is_int(v, -1)),
    "top_p": ("a number in (0, 1]", lambda v: _is_number(v, 0, 1) and v > 0),
    "min_p": ("a number in [0, 1]", lambda v: _is_number(v, 0, 1)),
    "presence_penalty": ("a number in [-2, 2]", lambda v: _is_number(v, -2, 2)),
    "frequency_penalty": ("a number in [-2, 2]", lambda v: _is_number(v, -2, 2)),
    "repetition_penalty": ("a number in [0.01, 100]", lambda v: _is_number(v, 0.01, 100)),
    "logit_bias": ("a dict of token id to bias in [-100, 100]", _is_logit_bias),
    "seed": ("None or an integer", lambda v: v is None or _is_int(v, -(2**63))),
    "stop": ("non-empty strings", lambda v: _is_list(v, lambda s: isinstance(s, str) and s != "")),
    "stop_token_ids": ("integers >= 0", lambda v: _is_list(v, lambda i: _is_int(i, 0))),
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "min_tokens": ("an integer >= 0", lambda v: _is_int(v, 0)),
    "max_tokens": ("None or an integer >= 1", lambda v: v is None or _is_int(v, 1)),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "skip_special_tokens": _FLAG,
    "detokenize": _FLAG,
}
