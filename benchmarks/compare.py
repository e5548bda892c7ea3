"""The same work through nanoinfer and through its peers, in one run.

In: a model (or a shape with random weights), a work, the engines. Out: for each engine its median
tokens a second, its share of what the machine allows (`limits.floor_seconds`), and nanoinfer's
ratio to each peer; the last line is the same as JSON. A share over 100% of the roofline is an
error.

Each engine lives in a process of its own, which loads the model once and then answers requests: a
line of JSON in, a line of JSON out. So loading is never timed. Rounds alternate between the
engines, and each round gives all of them the same random token ids, the same dtype and the same
number of threads. The peer runs each work as one batch, prompts padded on the left where their
lengths differ, with attention through SDPA. One engine works at a time while the others sleep in
`readline`. Ratios are taken within a round, so that a machine whose speed drifts slows both sides
of a ratio. The first round warms up and is not counted.

Only ratios and shares can be compared between machines, and only of an idle machine.

    python benchmarks/compare.py --shape qwen3-0.6b --work offline
    python benchmarks/compare.py --model MODEL --work latency --out docs/benchmarks/cpu.md
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from limits import Limits, Work, floor_seconds, measure, share
from shapes import SHAPES, make_checkpoint

from nanoinfer.config import DTYPES
from nanoinfer.loader import find_checkpoint
from nanoinfer.model_config import ModelConfig

_MIXED = [random.Random(i).randint(64, 256) for i in range(16)]  # the same in every run
WORKS = {
    "offline": Work.equal(16, 256, 128),
    "mixed": Work(_MIXED, [128] * len(_MIXED)),
    "latency": Work.equal(1, 256, 64),
}
TEMPERATURE = 0.6
_PAUSE = 0.2  # seconds: threads of the engine that has just worked fall asleep

Generate = Callable[[list[list[int]], int], list[list[int]]]  # (prompts, output_len) -> new ids


def load_nanoinfer(folder: Path, dtype: str) -> Generate:
    from nanoinfer import LLM, SamplingParams

    llm = LLM(folder, dtype=dtype, enable_prefix_caching=False, skip_tokenizer_init=True)

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=TEMPERATURE, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def load_transformers(folder: Path, dtype: str) -> Generate:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], attn_implementation="sdpa"
    )
    model.eval()

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left: all prompts end together
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        outputs = model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=output_len,
            max_new_tokens=output_len,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,  # all tokens, as in nanoinfer; the default keeps 50
            top_p=1.0,
            pad_token_id=0,
        )
        return outputs[:, longest:].tolist()

    return generate


ENGINES = {"nanoinfer": load_nanoinfer, "transformers": load_transformers}


def serve(engine: str, folder: Path, dtype: str) -> None:
    """The engine's process: answer requests from stdin until it is closed."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no reply
    generate = ENGINES[engine](folder, dtype)
    for line in sys.stdin:
        request = json.loads(line)
        torch.manual_seed(request["seed"])
        start = time.perf_counter()
        outputs = generate(request["prompts"], request["output_len"])
        seconds = time.perf_counter() - start
        reply = [seconds, [len(ids) for ids in outputs], torch.get_num_threads()]
        print(json.dumps(reply), file=replies, flush=True)


class Engine:
    """The parent's end of an engine's process."""

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        self.name = name
        self.command = [sys.executable, __file__, "--serve", name]
        self.command += ["--model", str(folder), "--dtype", dtype]

    def __enter__(self) -> "Engine":
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def run(self, work: Work, vocab_size: int, seed: int) -> float:
        """Seconds for one round. RuntimeError where the engine failed or did other work."""
        rng = random.Random(seed)
        prompts = [[rng.randrange(vocab_size) for _ in range(n)] for n in work.input_lens]
        (output_len,) = set(work.output_lens)  # transformers gives all rows of a batch equally many
        request = {"prompts": prompts, "output_len": output_len, "seed": seed}
        assert self._process.stdin is not None, "opened with a pipe"
        assert self._process.stdout is not None, "opened with a pipe"
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"{self.name}: its process ended; its last words are above")
        seconds, num_tokens, num_threads = json.loads(reply)
        if num_tokens != work.output_lens:
            raise RuntimeError(f"{self.name}: got {num_tokens} new tokens, need {output_len} each")
        if num_threads != torch.get_num_threads():
            need = torch.get_num_threads()
            raise RuntimeError(f"{self.name}: got {num_threads} threads, need {need}")
        time.sleep(_PAUSE)
        return seconds


class Result(NamedTuple):
    """One engine's rounds."""

    name: str
    rates: list[float]  # new tokens a second, one for each round
    ratio: float | None  # nanoinfer's rate to this one's: median over the rounds

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


class Comparison(NamedTuple):
    results: list[Result]
    limits: Limits
    bound: float  # tokens a second at the machine's limits, nothing overlapped
    roofline: float  # the same, where computing hides reading or reading hides computing


def compare(folder: Path, work: Work, names: list[str], dtype: str, rounds: int) -> Comparison:
    """Run the rounds, and measure the machine before and after them."""
    model = ModelConfig.from_hf(folder)
    limits = measure()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(Engine(name, folder, dtype)) for name in names]
        for engine in engines:
            engine.run(work, model.vocab_size, seed=0)
        for i in range(1, rounds + 1):
            for engine in engines if i % 2 else reversed(engines):
                seconds[engine.name].append(engine.run(work, model.vocab_size, seed=i))
            latest = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
            print(f"round {i} of {rounds}: {latest}", flush=True)
    limits = limits.best_of(measure())
    num_tokens = sum(work.output_lens)
    own = seconds.get("nanoinfer")
    results = []
    for name, times in seconds.items():
        ratio = None
        if own is not None:
            ratio = statistics.median(t / mine for t, mine in zip(times, own, strict=True))
        results.append(Result(name, [num_tokens / t for t in times], ratio))
    bound, roofline = (
        num_tokens / floor_seconds(model, work, limits, DTYPES[dtype], overlap=overlap)
        for overlap in (False, True)
    )
    for times in seconds.values():
        share(num_tokens / roofline, min(times))  # raises where a round is faster than can be
    return Comparison(results, limits, bound, roofline)


def describe(args: argparse.Namespace, comparison: Comparison) -> str:
    """A section of Markdown."""
    work, limits = WORKS[args.work], comparison.limits
    chosen = f"--model {args.label}" if args.model else f"--shape {args.shape}"
    lines = [
        f"## {datetime.date.today()}: {args.work}, {args.label}",
        "",
        f"{work}, {args.dtype}, "
        f"{args.rounds} rounds, threads of each engine: {limits.num_threads}. {cpu_name()}.",
        ", ".join(f"{name} {version}" for name, version in versions().items()) + ".",
        "",
        f"`python benchmarks/compare.py {chosen} --work {args.work} --dtype {args.dtype} "
        f"--engines {' '.join(args.engines)} --rounds {args.rounds}`",
        "",
        "| engine | tok/s, median | min..max | share of the limit | nanoinfer : engine |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for result in comparison.results:
        is_peer = result.ratio is not None and result.name != "nanoinfer"
        lines.append(
            f"| {result.name} | {result.median:.1f} "
            f"| {min(result.rates):.1f}..{max(result.rates):.1f} "
            f"| {result.median / comparison.bound:.0%} "
            f"| {f'{result.ratio:.2f}' if is_peer else ''} |"
        )
    lines += [
        "",
        f"The limit is {comparison.bound:.1f} tok/s with nothing overlapped "
        f"({comparison.roofline:.1f} where reading and computing hide each other): "
        f"{limits.read / 1e9:.1f} GB/s read, {limits.bf16 / 1e12:.2f} bf16 and "
        f"{limits.fp32 / 1e12:.2f} fp32 TFLOP/s, measured in the same run.",
        "",
    ]
    return "\n".join(lines)


def summarise(args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """What the JSON line holds."""
    summary: dict[str, Any] = {"model": args.label, "work": args.work, "dtype": args.dtype}
    for result in comparison.results:
        summary[f"tokens_per_second_{result.name}"] = round(result.median, 2)
        summary[f"share_{result.name}"] = round(result.median / comparison.bound, 3)
        summary[f"share_of_roofline_{result.name}"] = round(result.median / comparison.roofline, 3)
        if result.ratio is not None and result.name != "nanoinfer":
            summary[f"ratio_{result.name}"] = round(result.ratio, 3)
    limits = {k: round(v) for k, v in dataclasses.asdict(comparison.limits).items()}
    return summary | {"limits": limits, "cpu": cpu_name(), "versions": versions()}


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("nanoinfer", "torch", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "(source tree)"
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare nanoinfer with its peers on a CPU.")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, help="random weights (default: qwen3-0.6b)")
    model.add_argument("--model", help="a folder, a GGUF file or a hub id")
    parser.add_argument("--work", choices=WORKS, default="offline")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the section to this Markdown file")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds: got {args.rounds}, need at least 1")
    if args.model is None:
        args.shape = args.shape or "qwen3-0.6b"
    args.engines = list(dict.fromkeys(args.engines))
    args.label = args.shape or Path(args.model).name
    return args


def main() -> None:
    args = parse_args()
    folder = make_checkpoint(args.shape) if args.shape else find_checkpoint(args.model)
    if args.serve:
        return serve(args.serve, folder, args.dtype)
    comparison = compare(folder, WORKS[args.work], args.engines, args.dtype, args.rounds)
    section = describe(args, comparison)
    print("\n" + section)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write("\n" + section)
    print(json.dumps(summarise(args, comparison)))


if __name__ == "__main__":
    main()
