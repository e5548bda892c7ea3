"""What a user gets back: vLLM's field names, plain dataclasses.

`LLM.generate` and `LLM.chat` return whole `RequestOutput`s in input order; `LLM.stream` yields
`RequestOutput`s whose `outputs[i].text` and `.token_ids` hold only what is new.
"""

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """One candidate at one position: raw log probability, rank (1 is most likely), its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    """stop (eos, stop string or stop token), length, or abort; None while running."""
    stop_reason: int | str | None = None
    """The stop string or user stop token that ended it; None for eos."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times in seconds since the epoch; None: has not happened yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass
class RequestOutput:
    """A request and its n answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache, of the first answer."""
    metrics: RequestMetrics | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine, for tests and dashboards."""

    running: int
    waiting: int
    free_blocks: int
    total_blocks: int
    preemptions: int
    prefix_hit_tokens: int
    steps: int
    kernels: str
    snapshots: int
    """Recurrent states that are kept for prefix hits."""
    snapshot_bytes: int
