"""The engine's loop and the user's API.

In: prompts (text, token ids, chat messages) and SamplingParams. Out: `RequestOutput`s.

`LLMEngine.step` is the whole engine: schedule, build, run, commit. `LLM` is vLLM's offline API on
top of it: `generate`, `chat`, and `stream`, which may run beside other calls on the same engine,
since every call only waits for its own requests while each step serves all.

Invariants: a list of prompts is checked whole before any is queued; what can never run is refused
here, so that a running engine never asserts on load; after an exception in a step, or Ctrl-C, the
next call starts clean.
"""

import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from nanoinfer.caches import make_pools
from nanoinfer.checkpoint import find_checkpoint
from nanoinfer.config import EngineConfig
from nanoinfer.model_config import ModelConfig, as_list, load_generation_config
from nanoinfer.model_runner import ModelRunner
from nanoinfer.outputs import EngineStats, RequestOutput
from nanoinfer.pipeline import Pipeline, on_device
from nanoinfer.prompts import (
    Prompt,
    as_conversations,
    as_prompt_list,
    check_prompt,
    check_vocabulary,
)
from nanoinfer.request import Request
from nanoinfer.sampling_params import SamplingParams, check_params
from nanoinfer.scheduler import Scheduler
from nanoinfer.sequence import Sequence
from nanoinfer.tokenizer import Detokenizer, Tokenizer

logger = logging.getLogger("nanoinfer")


class LLMEngine:
    """Requests in, steps, outputs. One engine may serve several threads."""

    def __init__(self, config: EngineConfig, skip_tokenizer_init: bool = False) -> None:
        self.config = config
        folder = find_checkpoint(config.model)
        self.model_config = ModelConfig.from_hf(folder)
        named = config.tokenizer and find_checkpoint(config.tokenizer, with_weights=False)
        self.tokenizer = Tokenizer(named or folder, skip=skip_tokenizer_init)
        found = load_generation_config(folder)
        self._eos_token_ids = self._find_eos_token_ids(found)
        self.generation_config = {} if config.generation_config == "ignore" else found
        with on_device(config.torch_device):
            runner = ModelRunner(config, self.model_config, folder)
        self.kernels = runner.kernels.name
        self.max_model_len = runner.max_model_len
        sizes = runner.cache_sizes
        make_blocks, make_states = make_pools(sizes, config)
        budget = config.max_num_batched_tokens
        self.scheduler = Scheduler(make_blocks, sizes.max_num_seqs, budget, make_states)
        self._pipeline: Pipeline | None = Pipeline(config, self.scheduler, runner)
        self._requests: dict[str, Request] = {}
        self._counter = itertools.count()
        self._num_steps = 0
        self.lock = threading.RLock()  # held by whoever reads or changes what steps change

    def make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Check a prompt and its parameters; nothing is queued. ValueError says what is wrong."""
        params = params.clone()
        text, ids = self.tokenizer.encode_prompt(prompt)
        ids = check_prompt(ids, self.model_config.vocab_size, self.max_model_len)
        named = [*params.stop_token_ids, *(params.logit_bias or ())]
        check_vocabulary("sampling_params", named, self.model_config.vocab_size)
        if params.stop:
            self.tokenizer.require("stop")
        has_text = params.detokenize and self.tokenizer.is_present
        number = next(self._counter)
        request = Request(
            str(number),
            text,
            ids,
            params,
            eos_token_ids=self._eos_token_ids,
            max_model_len=self.max_model_len,
            decode=self.tokenizer.decode_token if has_text else None,
        )
        seed = params.seed
        if seed is None:  # of its own, but the same in every run of a program
            seed = xxhash.xxh3_64_intdigest(b"%d,%d" % (self.config.seed, number))
        for i in range(params.n):
            detokenizer = Detokenizer(self.tokenizer, params) if has_text else None
            request.sequences.append(Sequence(request, i, (seed + i) % 2**63, detokenizer))
        return request

    def add_request(self, request: Request) -> None:
        """Queue a request; the following steps work on it."""
        with self.lock:
            if self._pipeline is None:
                raise RuntimeError("this engine has been closed; make a new LLM")
            self._requests[request.request_id] = request
            for seq in request.sequences:
                self.scheduler.add(seq)

    def abort(self, request_id: str) -> bool:
        """End a request with finish reason "abort". False if it is not (or no longer) known."""
        with self.lock:
            request = self._requests.get(request_id)
            if request is None:
                return False
            for seq in request.sequences:
                self.scheduler.abort(seq)
            self._note_progress(request)
            return True

    def step(self) -> None:
        """Run one batch: the whole engine in a few lines."""
        with self.lock:
            if not self.scheduler.has_work or self._pipeline is None:
                return
            start = time.perf_counter()
            try:
                step = self.scheduler.schedule()
                done = self._pipeline.run(step)
            except BaseException:  # Ctrl-C too: blocks and tokens may be half updated
                self._pipeline.clear()
                self.scheduler.reset(s for r in self._requests.values() for s in r.sequences)
                raise
            self._num_steps += bool(step)
            if logger.isEnabledFor(logging.DEBUG):  # one line a step: `example.py --trace`
                milliseconds = 1e3 * (time.perf_counter() - start)
                logger.debug("%s  %.1f ms", self.scheduler.describe(step), milliseconds)
            for seq, _, _, _ in done:
                if seq.is_finished or seq.request.metrics.first_token_time is None:
                    self._note_progress(seq.request)

    def stats(self) -> EngineStats:
        """Counters of this moment."""
        with self.lock:
            blocks, states = self.scheduler.block_manager, self.scheduler.caches.states
            return EngineStats(
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                free_blocks=blocks.num_free_blocks,
                total_blocks=blocks.num_blocks,
                preemptions=self.scheduler.num_preemptions,
                prefix_hit_tokens=self.scheduler.num_prefix_hit_tokens,
                steps=self._num_steps,
                kernels=self.kernels,
                snapshots=0 if states is None else states.num_snapshots,
                snapshot_bytes=0 if states is None else states.snapshot_bytes,
            )

    def close(self) -> None:
        """Free weights and caches. What still runs is aborted."""
        with self.lock:
            for request_id in list(self._requests):
                self.abort(request_id)
            self._pipeline = None

    def _note_progress(self, request: Request) -> None:
        """Note the times of first token and end; forget a request that is done."""
        metrics = request.metrics
        if metrics.first_token_time is None and any(s.num_output_tokens for s in request.sequences):
            metrics.first_token_time = time.time()
        if request.is_finished and self._requests.pop(request.request_id, None) is not None:
            metrics.finished_time = time.time()
            request.when_finished(request)

    def _find_eos_token_ids(self, generation_config: dict) -> frozenset[int]:
        """Union of what config.json, generation_config.json and the tokenizer call the end."""
        ids = set(self.model_config.eos_token_ids)
        ids.update(as_list(generation_config.get("eos_token_id")))
        ids.update(as_list(self.tokenizer.eos_token_id))
        return frozenset(ids)


class LLM:
    """vLLM's offline API: `LLM("Qwen/Qwen3-0.6B").generate("Hello")`.

    `model` is a folder, a GGUF file or a hub id; keywords are the fields of `EngineConfig`. An
    unknown keyword is a TypeError; vLLM's disable_log_stats is taken and does nothing. Usable as a
    context manager, which frees everything at the end.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        trust_remote_code: bool = False,
        disable_log_stats: bool = True,
        skip_tokenizer_init: bool = False,
        **kwargs: Any,
    ) -> None:
        if trust_remote_code:
            raise ValueError("trust_remote_code: got True, need False; checkpoints are data here")
        config = EngineConfig(model=str(model), **kwargs)
        self.engine = LLMEngine(config, skip_tokenizer_init=skip_tokenizer_init)
        if (defaults := self.get_default_sampling_params()) != SamplingParams():
            logger.info("sampling_params default to generation_config: %s", defaults)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self.engine.close()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the model."""
        return self.engine.tokenizer.require("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used when none are given: the checkpoint's generation_config."""
        return SamplingParams.from_generation_config(self.engine.generation_config)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in input order.

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. With
        sampling_params None the checkpoint's generation_config supplies the defaults.
        Raises ValueError, before anything is queued, naming what cannot run.
        """
        return self._run(self._make_requests(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Seq[dict] | Seq[Seq[dict]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template."""
        conversations = as_conversations(messages)
        encode = functools.partial(
            self.engine.tokenizer.encode_chat,
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        prompts = [encode(messages=list(conversation)) for conversation in conversations]
        return self._run(self._make_requests(prompts, sampling_params), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield what is new, as it comes, for one or many prompts.

        Each item is a RequestOutput (tell them apart by `request_id`) whose outputs[i] hold only
        the text and token_ids since the request's last item. Leaving the loop aborts what is left.
        """
        return self._stream(self._make_requests(prompts, sampling_params))

    def abort(self, request_id: str) -> bool:
        """End a running request, from inside a stream's loop or another thread."""
        return self.engine.abort(request_id)

    def _make_requests(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
    ) -> list[Request]:
        each = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(each)
        check_params(sampling_params, len(each))
        pairs = zip(each, sampling_params, strict=True)
        return [self.engine.make_request(prompt, params) for prompt, params in pairs]

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        with tqdm(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
            finished: list[Request] = []  # whichever thread's step finishes them
            try:
                for request in requests:
                    request.when_finished = finished.append
                    self.engine.add_request(request)
                while len(finished) < len(requests):
                    self.engine.step()
                    bar.update(len(finished) - bar.n)
            finally:
                self._abort_all(requests)
        return [request.output() for request in requests]

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        try:
            for request in requests:
                self.engine.add_request(request)
            active = requests
            while active:
                self.engine.step()
                with self.engine.lock:  # another thread may step
                    news = [request.delta() for request in active]
                yield from filter(None, news)
                active = [r for r in active if not (r.is_finished and r.is_reported)]
        finally:
            self._abort_all(requests)

    def _abort_all(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request.request_id)
