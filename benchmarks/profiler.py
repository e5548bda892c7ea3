"""Where the time of a step goes: stage by stage, op by op, beside what the machine allows.

In: a model or a shape, and a work: steps that decode `--num-seqs` sequences at `--context` tokens,
or read a prompt of `--prefill` tokens (none named: both). Out: a table for each, then JSON; with
--trace also the spans, for chrome://tracing or Perfetto. With --host no model runs at all: what is
left is the engine and `LLM.generate`'s loop, with and without `--waiting` requests in the queue.

recorder.py says what stages and ops are. Times are medians over the steps, so that rows add up to
the step only nearly. What the wrapping adds is told below each table; it lies in "python & rest".

Bytes are those of weights, inputs and outputs, once each (of caches and tables the rows that are
read or written), in the step in the middle; operations those of matrix products and attention. The
least time is the longer of the two at the rates of limits.py. A share of it over 100% is no error:
a cache served what memory could not have, or int8 multiplied what bf16 could not have.

Decoding runs layer by layer here. Recorded (nanoinfer/cpu_graphs.py), as an engine runs it, a step
is shorter by the "python & rest" of its forward pass, and by the checks in front of each kernel.

What must hold: all measured steps do the same work. Measure on an idle machine. The file is not
called profile.py, which would hide Python's own module from every script in this folder.

    python benchmarks/profiler.py --shape qwen3-0.6b --num-seqs 16 --context 320
    python benchmarks/profiler.py --shape qwen3-0.6b --prefill 512 --trace trace.json
    python benchmarks/profiler.py --shape qwen3-0.6b --host --waiting 10000
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from limits import Limits, measure
from recorder import (
    LOOP,
    STEP,
    Key,
    Recorder,
    Span,
    Step,
    medians,
    recording,
    split_step,
    wrapping_seconds,
)
from shapes import SHAPES, make_checkpoint

import nanoinfer.llm
from nanoinfer import LLM, EngineConfig, SamplingParams
from nanoinfer.batch import Batch
from nanoinfer.cache_sizes import CacheSizes
from nanoinfer.demo import demo_model
from nanoinfer.kernels import Kernels
from nanoinfer.launched import Launched
from nanoinfer.llm import LLMEngine
from nanoinfer.model_config import ModelConfig
from nanoinfer.model_runner import choose_dtype
from nanoinfer.sampler import Drawn

HEADS = ("ms", "% of step", "MB", "GFLOP", "least ms", "% reached")
PARAMS = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=None)
_WARM_UP = 2  # steps
_NULL_TOKEN = 40  # in most vocabularies an ordinary character
_NULL_LEN = 4096  # tokens of a sequence that the null model has room for


def prefill_steps(
    engine: LLMEngine, recorder: Recorder, steps: int, num_tokens: int
) -> list[list[Span]]:
    """Spans of steps that read one prompt of `num_tokens` each."""
    params = PARAMS.clone(max_tokens=1)

    def queue() -> None:
        engine.add_request(engine.make_request(random_ids(engine, num_tokens), params))

    found = run_steps(engine, recorder, steps, queue)
    if engine.scheduler.has_work:
        raise RuntimeError(f"prefill: {num_tokens} tokens took more than one step")
    return found


def decode_steps(
    engine: LLMEngine, recorder: Recorder, steps: int, num_seqs: int, context: int
) -> list[list[Span]]:
    """Spans of steps, in the middle of which the last sequence has `context` tokens."""
    prompt_len = max(1, context - steps // 2 - _WARM_UP - 1)
    for _ in range(num_seqs):
        engine.add_request(engine.make_request(random_ids(engine, prompt_len), PARAMS))
    scheduler = engine.scheduler
    while not (is_decoding(engine, num_seqs) or scheduler.num_preemptions):
        engine.step()
    recorder.take()
    found = run_steps(engine, recorder, steps)
    if scheduler.num_preemptions or not is_decoding(engine, num_seqs):
        raise RuntimeError(f"decode: {num_seqs} x {context} tokens do not fit the KV pool")
    return found


def run_steps(
    engine: LLMEngine, recorder: Recorder, steps: int, before: Callable[[], None] = lambda: None
) -> list[list[Span]]:
    """Warm up, then run `steps` steps and, in their middle, one that is counted but not timed."""
    found, middle = [], _WARM_UP + steps // 2
    for i in range(_WARM_UP + steps + 1):
        before()
        recorder.is_counting = i == middle
        engine.step()
        found.append(recorder.take())
    return found[_WARM_UP:middle] + found[middle + 1 :]


def is_decoding(engine: LLMEngine, num_seqs: int) -> bool:
    """Whether all run and have a token: the last one admitted is the last one to get it."""
    running = engine.scheduler.running
    return len(running) == num_seqs and running[-1].num_output_tokens > 0


def random_ids(engine: LLMEngine, num_tokens: int) -> list[int]:
    return random.choices(range(engine.model_config.vocab_size), k=num_tokens)


class NullRunner:
    """The runner's interface without a model: the next token is known at once."""

    kernels = Kernels(name="null")

    def __init__(self, config: EngineConfig, model_config: ModelConfig, folder: Path) -> None:
        self.max_model_len = min(config.max_model_len or _NULL_LEN, model_config.max_model_len)
        blocks = -(-self.max_model_len // config.block_size)
        num_blocks = config.num_kv_blocks or config.max_num_seqs * blocks
        self.cache_sizes = CacheSizes(num_blocks, config.max_num_seqs, 0)

    def launch(self, batch: Batch, before: Launched | None) -> Launched:
        ids = torch.full((len(batch.sampled_entries),), _NULL_TOKEN)
        return Launched(batch, Drawn(ids, [None] * len(ids), None), {})


class _Enough(Exception):  # noqa: N818 (no error)
    """Leaves `LLM.generate`, which would go on for as long as anything waits."""


def host_steps(llm: LLM, steps: int, num_seqs: int, context: int, waiting: int) -> list[Step]:
    """Seconds of steps of `LLM.generate`, each with the loop up to the next one's start."""
    engine, recorder = llm.engine, Recorder()
    prompts = [random_ids(engine, context) for _ in range(num_seqs)]
    prompts += [prompts[0]] * waiting
    decoded: list[list[Span]] = []

    def step() -> None:
        if len(decoded) > _WARM_UP + steps:
            raise _Enough
        if is_decoding(engine, num_seqs):
            decoded.append([])
        timed()
        spans = recorder.take()
        if decoded:
            decoded[-1] = spans

    with recording(engine, recorder), contextlib.suppress(_Enough):
        timed = engine.step
        with mock.patch.object(engine, "step", step):
            llm.generate(prompts, PARAMS, use_tqdm=False)
            raise RuntimeError(f"host: {num_seqs} never ran together for {steps} steps")
    found = []
    for this, following in itertools.pairwise(decoded[_WARM_UP:]):
        loop, period = (following[-1].start - time for time in (this[-1].end, this[-1].start))
        found.append(split_step(this) | {(LOOP, ""): loop, (STEP, ""): period})
    return found


def host_table(args: argparse.Namespace, choices: dict) -> dict:
    """Print milliseconds a step without and with a queue; return them for JSON."""
    with mock.patch.object(nanoinfer.llm, "ModelRunner", NullRunner):
        llm = LLM(**choices | {"max_num_seqs": args.num_seqs}, skip_tokenizer_init=bool(args.shape))
    run = functools.partial(host_steps, llm, args.steps, args.num_seqs, args.context)
    with llm:
        alone, queued = (medians(run(waiting)) for waiting in (0, args.waiting))
    print(f"host: {args.num_seqs} run at {args.context} tokens, median of {args.steps} steps")
    print(f"{'ms':<16}{'none wait':>12}{f'{args.waiting:,} wait':>14}{'change':>10}")
    for key in alone:
        before, after = 1e3 * alone[key], 1e3 * queued[key]
        print(f"{key[0]:<16}{before:>12.3f}{after:>14.3f}{after / before - 1:>+10.0%}")
    return {"alone": _as_milliseconds(alone), "queued": _as_milliseconds(queued)}


def _as_milliseconds(step: Step) -> dict[str, float]:
    return {stage: round(1e3 * seconds, 4) for (stage, _), seconds in step.items()}


def step_table(
    steps: list[list[Span]], costs: dict[Key, Counter], limits: Limits, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """Print a row for each stage and op; return the rows for JSON."""
    found, rows = medians([split_step(spans) for spans in steps]), {}
    print(f"{'':<24}" + "".join(f"{head:>12}" for head in HEADS))
    for (stage, op), seconds in found.items():
        own = [c for (s, o), c in costs.items() if stage in (s, STEP) and op in (o, "")]
        least = sum(max(c["bytes"] / limits.read, c["flops"] / limits.flops(dtype)) for c in own)
        values = [1e3 * seconds, 100 * seconds / found[STEP, ""]]
        if own:
            total = sum(own, Counter())
            values += [total["bytes"] / 1e6, total["flops"] / 1e9]
            values += [1e3 * least, 100 * least / seconds]
        print(f"{'  ' + op if op else stage:<24}" + "".join(f"{value:>12.3f}" for value in values))
        row = zip(HEADS, values, strict=False)  # what is not counted has no more than a time
        rows["/".join(filter(None, (stage, op)))] = {head: round(x, 4) for head, x in row}
    wrapping = 1e3 * len(steps[-1]) * wrapping_seconds()
    print(f"Wrapping {len(steps[-1])} calls adds {wrapping:.3f} ms a step.\n")
    return rows | {"wrapping": {"calls": len(steps[-1]), "ms": round(wrapping, 4)}}


def write_trace(file: Path, spans: list[Span]) -> None:
    """Chrome's complete events, in microseconds."""
    events = [
        {"ph": "X", "pid": 0, "tid": 0, "name": op or stage, "cat": stage}
        | {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
        for stage, op, start, end in spans
    ]
    file.write_text(json.dumps({"traceEvents": events}))


def step_tables(args: argparse.Namespace, choices: dict) -> dict:
    """Print a table for each work; return all for JSON."""
    choices["max_num_batched_tokens"] = max(args.max_num_batched_tokens, args.prefill or 1)
    choices["max_num_seqs"] = max(args.max_num_seqs, args.num_seqs or 1)
    works: dict[str, functools.partial[list[list[Span]]]] = {}
    if args.prefill:
        works["prefill"] = functools.partial(prefill_steps, num_tokens=args.prefill)
    if args.num_seqs:
        sizes = {"num_seqs": args.num_seqs, "context": args.context}
        works["decode"] = functools.partial(decode_steps, **sizes)
    found = {}
    with LLM(**choices, skip_tokenizer_init=bool(args.shape)) as llm:
        engine, device = llm.engine, llm.engine.config.torch_device
        names = engine.config.dtype_name, engine.model_config.dtype
        dtype = choose_dtype(*names, device, engine.kernels)
        for name, run in works.items():
            recorder = Recorder(_clock(device))
            with recording(engine, recorder):
                found[name] = run(engine, recorder, args.steps), recorder.costs
    limits, result = measure(device), {}
    for name, (steps, costs) in found.items():
        sizes = works[name].keywords
        text = ", ".join(f"{size.replace('_', ' ')} {value}" for size, value in sizes.items())
        print(f"{name}: {text}; median of {args.steps} steps, {dtype}")
        result[name] = sizes | step_table(steps, costs, limits, dtype)
    if args.trace:
        write_trace(args.trace, [span for steps, _ in found.values() for s in steps for span in s])
    rates = {name: round(rate) for name, rate in dataclasses.asdict(limits).items()}
    return result | {"limits": rates}


def _clock(device: torch.device) -> Callable[[], float]:
    """On a GPU a call only queues its work: wait for it."""

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return time.perf_counter if device.type == "cpu" else clock


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog="No --model, no --shape: the demo model (93 MB).")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in place of --model")
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help="default 512")
    parser.add_argument("--num-seqs", type=int, help="that decode: default 16, with --host 256")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of each: default 320")
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write the spans")
    parser.add_argument("--host", action="store_true", help="no model: the engine's own time")
    parser.add_argument("--waiting", type=int, default=10_000, help="requests, with --host")
    EngineConfig.add_cli_args(parser.add_argument_group("engine, as in LLM(...)"))
    args = parser.parse_args(arguments)
    if (args.model and args.shape) or (args.host and (args.prefill or args.trace)):
        parser.error("--model and --shape, --host and --prefill or --trace: need one of them")
    is_decode = args.host or args.num_seqs or args.context
    if is_decode or not args.prefill:
        args.num_seqs = args.num_seqs or (256 if args.host else 16)
        args.context = args.context or 320
    if not is_decode:
        args.prefill = args.prefill or 512
    for name in ("prefill", "num_seqs", "context", "steps", "waiting"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"{name}: got {value}, need at least 1")
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    choices = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    if args.model is None:
        choices["model"] = str(make_checkpoint(args.shape) if args.shape else demo_model())
    random.seed(0)
    result = host_table(args, choices) if args.host else step_tables(args, choices)
    print(json.dumps({"model": args.shape or args.model or "demo", **result}))


if __name__ == "__main__":
    main()
