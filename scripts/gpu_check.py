"""Everything that a GPU is needed for, in one run of minutes.

In: a machine with a GPU. Out: `gpu.json` and `gpu.md` in --out: which tests passed, throughput by
nano-vllm's recipe, and decoding with its share of the memory's bandwidth. The host's gap is what a
step takes longer when the host waits for its tokens before it prepares the next one.

    python scripts/gpu_check.py --out docs/benchmarks

With --device cpu --shapes qwen3-tiny it runs anywhere, to see that it runs.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.limits import Work, floor_seconds, measure
from benchmarks.shapes import SHAPES, make_checkpoint
from nanoinfer import LLM, SamplingParams
from nanoinfer.model_runner import choose_dtype

ROOT = Path(__file__).parent.parent
SHAPES_OF_A_RUN = ["qwen3-0.6b", "qwen3-8b"]
BATCHES = [1, 32, 256]
_DECODED, _CONTEXT = 64, 256


def run_tests() -> dict[str, str]:
    """`pytest -m gpu`: its last line, and whether it passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-q",
        "-m",
        "gpu",
        "tests/test_gpu.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    print(*lines[-15:], sep="\n")
    return {"verdict": "passed" if done.returncode == 0 else "FAILED", "summary": lines[-1]}


def run_recipe(shape: str, device: str, num_seqs: int, longest: int) -> dict[str, float]:
    """nano-vllm's recipe: output tokens a second of `num_seqs` requests of random lengths."""
    command = [sys.executable, "bench.py", "--shape", shape, "--device", device]
    lengths = [str(min(100, longest)), str(longest)]
    command += ["--num-seqs", str(num_seqs), "--input-len", *lengths, "--output-len", *lengths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"bench.py failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def time_decoding(llm: LLM, num_seqs: int) -> float:
    """Seconds a step, `num_seqs` sequences at _CONTEXT tokens and a few more."""
    vocab = range(llm.engine.model_config.vocab_size)
    prompts = [random.choices(vocab, k=_CONTEXT) for _ in range(num_seqs)]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=_DECODED)
    seconds = []
    for _ in range(2):  # the first one warms up
        outputs = llm.generate(prompts, params, use_tqdm=False)
        first = max(output.metrics.first_token_time for output in outputs)
        last = max(output.metrics.finished_time for output in outputs)
        seconds.append((last - first) / (_DECODED - 1))
    return seconds[-1]


def measure_decoding(shape: str, device: torch.device, batches: list[int]) -> list[dict]:
    """Tokens a second, and the least time that bandwidth and products allow over the measured."""
    limits, rows = measure(device), []
    folder = str(make_checkpoint(shape))
    options: dict[str, Any] = {"device": device.type, "enable_prefix_caching": False}
    with LLM(folder, skip_tokenizer_init=True, async_scheduling=False, **options) as llm:
        waiting = {num_seqs: time_decoding(llm, num_seqs) for num_seqs in batches}
    with LLM(folder, skip_tokenizer_init=True, async_scheduling=True, **options) as llm:
        model = llm.engine.model_config
        dtype = choose_dtype("auto", model.dtype, device, llm.engine.kernels)
        for num_seqs in batches:
            seconds = time_decoding(llm, num_seqs)
            gap = 1e3 * (waiting[num_seqs] - seconds)
            work = (Work.equal(num_seqs, _CONTEXT, n) for n in (_DECODED, 1))
            whole, prompts = (floor_seconds(model, w, limits, dtype, overlap=True) for w in work)
            least = (whole - prompts) / (_DECODED - 1)
            rate = num_seqs / seconds
            row = {"batch": num_seqs, "tokens_per_second": rate, "share": least / seconds}
            rows.append({**row, "host_gap_ms": gap})
            print(
                f"{shape}, batch {num_seqs}: {rate:,.0f} tokens/s, {row['share']:.0%} of the limit"
            )
    return rows


def to_markdown(result: dict) -> str:
    lines = [f"# {result['device']}", "", result["versions"], ""]
    lines += [f"Tests marked gpu: {result['tests']['verdict']} ({result['tests']['summary']})", ""]
    for shape, found in result["shapes"].items():
        rate = found["recipe"]["output_tokens_per_second"]
        lines += [f"## {shape}", "", f"nano-vllm's recipe: {rate:,.0f} output tokens/s.", ""]
        lines.append("| decoding, batch | tokens/s | share of the limit | host's gap hidden, ms |")
        lines.append("| ---: | ---: | ---: | ---: |")
        for row in found["decoding"]:
            numbers = f"{row['tokens_per_second']:,.0f} | {row['share']:.0%}"
            lines.append(f"| {row['batch']} | {numbers} | {row['host_gap_ms']:.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES_OF_A_RUN, choices=SHAPES)
    args = parser.parse_args()
    device, start = torch.device(args.device), time.perf_counter()
    is_gpu = args.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        parser.error("no CUDA device: try --device cpu --shapes qwen3-tiny")
    result: dict = {
        "device": torch.cuda.get_device_name() if is_gpu else "CPU",
        "versions": f"torch {torch.__version__}, python {sys.version.split()[0]}",
        "tests": run_tests(),
        "shapes": {},
    }
    num_seqs, longest, batches = (256, 1024, BATCHES) if is_gpu else (4, 32, [1, 2])
    for shape in args.shapes:
        decoding = measure_decoding(shape, device, batches)
        recipe = run_recipe(shape, args.device, num_seqs, longest)
        result["shapes"][shape] = {"recipe": recipe, "decoding": decoding}
    result["seconds"] = round(time.perf_counter() - start)
    (args.out / "gpu.json").write_text(json.dumps(result, indent=2) + "\n")
    (args.out / "gpu.md").write_text(to_markdown(result))
    print(f"{result['seconds']} s; written to {args.out}/gpu.json and gpu.md")
    return 0 if result["tests"]["verdict"] == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
