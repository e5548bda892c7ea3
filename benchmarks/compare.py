"""The same work through nanoinfer and through its peers, in one run.

In: a model (or a shape with random weights), a work, the engines. Out: for each engine its median
tokens a second, its share of what the machine allows (`limits.floor_seconds`), and nanoinfer's
ratio to each peer; the last line is the same as JSON. It is kept in a history, and a share or a
ratio that is lower than in the line before is said. Faster than the roofline is an error.

Each engine lives in a process of its own (engines.py), so loading is never timed and peers may need
other interpreters. Rounds alternate between the engines, and each round gives all of them the same
random token ids, the same dtype and the same number of threads; one works while the others sleep.
Ratios are taken within a round, so that a machine whose speed drifts slows both sides of a ratio.
The first round warms up and is not counted.

latency: decoding alone, the time for n new tokens less that for one. prefill: prompt tokens a
second. All others: new tokens a second. Prefix caches are on in prefix and chat, off elsewhere.
transformers runs a work as one left-padded batch until its longest answer is done: only tokens that
were asked for count. llama.cpp's binding runs one sequence at a time. Quantised engines read fewer
bytes than the limit counts, so they have no share; int8 and Q8_0 are compared with each other.

Only ratios and shares can be compared between machines, and only of an idle machine.

    python benchmarks/compare.py --shape qwen3-0.6b --work offline
    python benchmarks/compare.py --work latency --llama-cpp-python L/bin/python --no-history
    python benchmarks/compare.py --vllm-python V/bin/python --plot batch_sizes.png
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import platform
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from history import DEFAULT, commit, record
from limits import Limits, Work, floor_seconds, measure, share
from rounds import ENGINES, Round, make_engines, run_rounds
from shapes import SHAPES, make_checkpoint
from works import BATCHES, WORKS, Task

from nanoinfer.checkpoint import find_checkpoint
from nanoinfer.config import DTYPES
from nanoinfer.model_config import ModelConfig

_RIVALS = {"llama_cpp_q8_0": "nanoinfer_int8"}  # whose rate is compared; of all others: nanoinfer


class Result(NamedTuple):
    """One engine's rounds."""

    rates: list[float]  # tokens that count a second, one for each round
    whole_rate: float | None  # of decode: output tokens a second with the prompt's time, median
    ratio: float | None  # nanoinfer's rate to this one's: median over the rounds
    share: float | None  # of the bound
    share_of_roofline: float | None  # of the whole

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


class Comparison(NamedTuple):
    results: dict[str, Result]
    limits: Limits
    bound: float | None  # tokens a second at the machine's limits, nothing overlapped
    versions: dict[str, dict[str, str]]


def compare(args: argparse.Namespace, folder: Path, tasks: list[Task]) -> list[Comparison]:
    """Run the tasks' rounds, and measure the machine before and after them."""
    model = ModelConfig.from_hf(folder)
    engines = make_engines(args.engines, args.pythons, folder, args.dtype, tasks)
    limits = measure()
    seconds = []
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        versions = {engine.name: engine.versions for engine in engines}
        for task in tasks:
            seconds.append(run_rounds(engines, task, model.vocab_size, args.rounds))
    limits = limits.best_of(measure())
    comparisons = []
    for task, rounds in zip(tasks, seconds, strict=True):
        bound, roofline = find_limits(task, model, limits, DTYPES[args.dtype])
        results = {name: judge(name, task, rounds, bound, roofline) for name in rounds}
        rate = bound and task.num_tokens / bound
        comparisons.append(Comparison(results, limits, rate, versions))
    return comparisons


def find_limits(
    task: Task, model: ModelConfig, limits: Limits, dtype: torch.dtype
) -> tuple[float, float] | tuple[None, None]:
    """Least seconds: for the tokens that count with nothing overlapped; for the whole, overlapped.

    None with prefix caches: `floor_seconds` counts every prompt token as computed, a hit is not.
    """
    if task.has_prefixes:
        return None, None
    bound = floor_seconds(model, task.work, limits, dtype)
    if task.counted == "decode":
        first = Work(task.work.input_lens, [1] * len(task.work.output_lens))
        bound -= floor_seconds(model, first, limits, dtype)
    return bound, floor_seconds(model, task.work, limits, dtype, overlap=True)


def judge(
    name: str,
    task: Task,
    rounds: dict[str, list[Round]],
    bound: float | None,
    roofline: float | None,
) -> Result:
    """An engine's rates beside its rival's and the limits, which are in seconds."""
    seconds, whole = zip(*rounds[name], strict=True)
    rival = rounds.get(_RIVALS.get(name, "nanoinfer"))
    ratio = None
    if rival is not None and name != "nanoinfer":
        pairs = zip(seconds, rival, strict=True)
        ratio = statistics.median(theirs / mine.seconds for theirs, mine in pairs)
    is_bounded = ENGINES[name].quantization is None
    if roofline is not None and is_bounded:
        share(roofline, min(whole))  # raises where a round is faster than can be
    rate, whole_rate = (statistics.median(1 / t for t in times) for times in (seconds, whole))
    return Result(
        [task.num_tokens / t for t in seconds],
        sum(task.work.output_lens) * whole_rate if task.counted == "decode" else None,
        ratio,
        bound * rate if bound and is_bounded else None,
        roofline * whole_rate if roofline and is_bounded else None,
    )


def describe(args: argparse.Namespace, comparison: Comparison) -> str:
    """A section of Markdown."""
    task, limits = WORKS[args.work], comparison.limits
    chosen = f"--model {args.label}" if args.model else f"--shape {args.shape}"
    chosen += "".join(f" --{name.replace('_', '-')}-python PYTHON" for name in args.peers)
    versions = {k: v for found in comparison.versions.values() for k, v in found.items()}
    lines = [
        f"## {datetime.date.today()}: {args.work}, {args.label}",
        "",
        f"{task}, {args.dtype}, "
        f"{args.rounds} rounds, threads of each engine: {limits.num_threads}. {cpu_name()}.",
        ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
        "",
        f"`python benchmarks/compare.py {chosen} --work {args.work} --dtype {args.dtype} "
        f"--engines {' '.join(args.engines)} --rounds {args.rounds}`",
        "",
        f"| engine | {task.counted} tok/s, median | min..max | share of the limit "
        "| nanoinfer : engine |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, result in comparison.results.items():
        low, high = min(result.rates), max(result.rates)
        judged = "" if result.share is None else f"{result.share:.0%}"
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        lines.append(
            f"| {name} | {result.median:.1f} | {low:.1f}..{high:.1f} | {judged} | {ratio} |"
        )
    rates = f"{limits.read / 1e9:.1f} GB/s read, {limits.bf16 / 1e12:.2f} bf16"
    rates += f" and {limits.fp32 / 1e12:.2f} fp32 TFLOP/s, measured in the same run."
    if comparison.bound:
        rates = f"The limit is {comparison.bound:.1f} tok/s with nothing overlapped: {rates}"
    return "\n".join([*lines, "", rates, ""])


def summarise(args: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """What the JSON line holds."""
    summary: dict[str, Any] = {"date": str(datetime.date.today()), "commit": commit()}
    summary |= {"model": args.label, "work": args.work, "dtype": args.dtype}
    summary |= {"cpu": cpu_name(), "threads": comparison.limits.num_threads, "rounds": args.rounds}
    for name, result in comparison.results.items():
        found = {
            "tokens_per_second": result.median,
            "whole_tokens_per_second": result.whole_rate,
            "share": result.share,
            "share_of_roofline": result.share_of_roofline,
            "ratio": result.ratio,
        }
        summary |= {f"{k}_{name}": round(v, 3) for k, v in found.items() if v is not None}
    limits = {k: round(v) for k, v in dataclasses.asdict(comparison.limits).items()}
    return summary | {"limits": limits, "versions": comparison.versions}


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare nanoinfer with its peers on a CPU.")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", choices=SHAPES, help="random weights (default: qwen3-0.6b)")
    model.add_argument("--model", help="a folder, a GGUF file or a hub id")
    parser.add_argument("--work", choices=WORKS, default="offline")
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        metavar="ENGINE",
        help=f"of {', '.join(ENGINES)}; default: those whose interpreter is given, as they are",
    )
    parser.add_argument("--vllm-python", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--llama-cpp-python", metavar="PYTHON", help="one that has llama_cpp")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    parser.add_argument("--out", **file, help="append the section to this Markdown file")
    parser.add_argument("--history", **file, default=DEFAULT, help=f"JSON lines ({DEFAULT.name})")
    parser.add_argument("--no-history", action="store_const", const=None, dest="history")
    parser.add_argument("--plot", **file, help="draw rates by batch size in place of a work")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error(f"--rounds: got {args.rounds}, need at least 1")
    if args.model is None:
        args.shape = args.shape or "qwen3-0.6b"
    args.label = args.shape or Path(args.model).name
    choose_engines(parser, args)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: needs matplotlib; try pip install 'nanoinfer[bench]'")
    return args


def choose_engines(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in the default engines, or refuse those that cannot do the work."""
    pythons = {"nanoinfer": sys.executable, "vllm": args.vllm_python}
    pythons |= {"llama_cpp": args.llama_cpp_python, "transformers": sys.executable}
    tasks = list(BATCHES.values()) if args.plot else [WORKS[args.work]]
    is_single = all(len(task.work.input_lens) == 1 for task in tasks)
    has_prefixes = any(task.has_prefixes for task in tasks)
    if args.engines is None:
        able = [name for name in pythons if is_single or name != "llama_cpp"]
        args.engines = [name for name in able if pythons[name] is not None]
    args.engines = list(dict.fromkeys(args.engines))
    for name in args.engines:
        variant = ENGINES[name]
        if pythons[variant.engine] is None:
            option = f"--{variant.engine.replace('_', '-')}-python"
            parser.error(f"--engines {name}: need {option}, an interpreter that has it")
        if variant.engine == "llama_cpp" and not is_single:
            parser.error(f"--engines {name}: runs one sequence at a time; try latency or prefill")
        if name == "nanoinfer_no_cache" and not has_prefixes:
            parser.error(f"--engines {name}: the cache is off anyway; try --work prefix or chat")
    used = {ENGINES[name].engine for name in args.engines}
    args.pythons, args.peers = pythons, [name for name in ("vllm", "llama_cpp") if name in used]


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    folder = make_checkpoint(args.shape) if args.shape else find_checkpoint(args.model)
    if args.plot:
        return plot_batches(args, folder)
    (comparison,) = compare(args, folder, [WORKS[args.work]])
    section = describe(args, comparison)
    print("\n" + section)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.write("\n" + section)
    summary = summarise(args, comparison)
    if args.history:
        for line in record(args.history, summary):
            print(line)
    print(json.dumps(summary))


def plot_batches(args: argparse.Namespace, folder: Path) -> None:
    """Run every batch size, and draw each engine's rates and the limit."""
    from plot import draw  # matplotlib is in no other extra

    comparisons = compare(args, folder, list(BATCHES.values()))
    curves = {
        name: [comparison.results[name].median for comparison in comparisons]
        for name in args.engines
    }
    bounds = [comparison.bound or 0.0 for comparison in comparisons]
    title = f"{args.label}, {args.dtype}: 128 tokens in, 64 out\n{cpu_name()}"
    title += f", {comparisons[0].limits.num_threads} threads"
    draw(args.plot, list(BATCHES), curves, bounds, title)
    rates = {name: [round(rate, 2) for rate in rates] for name, rates in curves.items()}
    about = {"model": args.label, "dtype": args.dtype, "batch_sizes": list(BATCHES)}
    bounds = [round(bound, 2) for bound in bounds]
    print(json.dumps(about | {"limit": bounds, "tokens_per_second": rates}))


if __name__ == "__main__":
    main()
