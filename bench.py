"""Throughput on random tokens, by nano-vllm's recipe.

In: number and ranges of lengths; the work depends on --seed alone. Out: a table, then JSON.
Prompts are random ids, temperature is 0.6, eos is ignored; a warm-up comes first, not counted.
Prefill rate: prompt tokens over the time until the last first token. Decode rate: tokens after each
first one, over the time from the earliest first token to the end. Where steps mix both, the times
overlap: each rate is then too low, never too high. Shares: least time for this work by
benchmarks/limits.py over measured time.

    python bench.py --shape qwen3-0.6b     # random weights in that shape
    python bench.py --model MODEL --num-seqs 64 --input-len 100 1024 --output-len 100 1024
"""

import argparse
import dataclasses
import json
import random
import resource
import statistics
import sys
import time

import torch

from benchmarks.limits import Work, floor_seconds, measure, share
from benchmarks.shapes import SHAPES, make_checkpoint
from nanoinfer import LLM, EngineConfig, RequestOutput, SamplingParams
from nanoinfer.demo import demo_model
from nanoinfer.model_runner import choose_dtype

DEFAULTS: dict[str, tuple[int, tuple[int, int], tuple[int, int]]] = {
    "cpu": (16, (64, 256), (32, 128)),  # sequences, tokens in, tokens out
    "cuda": (256, (100, 1024), (100, 1024)),
}


def main() -> None:
    args = parse_args()
    choices = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    if args.model is None:
        choices["model"] = str(make_checkpoint(args.shape) if args.shape else demo_model())
    device = EngineConfig(**choices).torch_device
    default_num, *default_lens = DEFAULTS[device.type]
    num_seqs = args.num_seqs or default_num
    lens_in, lens_out = args.input_len or default_lens[0], args.output_len or default_lens[1]
    with LLM(**choices, skip_tokenizer_init=True) as llm:
        model = llm.engine.model_config
        name, kernels = llm.engine.config.dtype_name, llm.engine.kernels
        dtype = choose_dtype(name, model.dtype, device, kernels)
        rng = random.Random(args.seed)
        ids, draw = range(model.vocab_size), rng.randint
        warm_up = [rng.choices(ids, k=draw(*lens_in)) for _ in range(min(num_seqs, 4))]
        prompts = [rng.choices(ids, k=draw(*lens_in)) for _ in range(num_seqs)]
        params = [draw_params(rng, lens_out) for _ in range(num_seqs)]
        llm.generate(warm_up, draw_params(rng, (4, 4)), use_tqdm=False)
        before, start = llm.stats(), time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds, after = time.perf_counter() - start, llm.stats()
    result = summarise(outputs, seconds)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, but bytes on macOS
    result["peak_resident_mib"] = resident >> (20 if sys.platform == "darwin" else 10)
    if device.type == "cuda":
        result["peak_cuda_mib"] = torch.cuda.max_memory_allocated(device) >> 20
    work = Work([len(p) for p in prompts], [len(o.outputs[0].token_ids) for o in outputs])
    limits = measure(device)  # after the peak was read: it takes memory of its own
    floor, roofline = (floor_seconds(model, work, limits, dtype, overlap=o) for o in (False, True))
    result["share_of_limits"] = round(floor / seconds, 3)
    result["share_of_roofline"] = round(share(roofline, seconds), 3)
    result |= {k: getattr(after, k) - getattr(before, k) for k in ("steps", "preemptions")}
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<32}{'-' if value is None else f'{value:,}':>12}")
    about = {"model": args.shape or args.model or "demo", "num_seqs": num_seqs}
    print(json.dumps({**about, "kernels": after.kernels, **result}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(epilog="No --model, no --shape: the demo model (93 MB).")
    parser.add_argument("--shape", choices=SHAPES, help="random weights in place of --model")
    parser.add_argument("--num-seqs", type=int, help="requests, all sent at once")
    for flag in ("--input-len", "--output-len"):
        parser.add_argument(flag, type=int, nargs=2, metavar=("MIN", "MAX"), help="in tokens")
    EngineConfig.add_cli_args(parser.add_argument_group("engine, as in LLM(...)"))
    args = parser.parse_args()
    if args.model and args.shape:
        parser.error("--model and --shape: need one of them")
    if args.num_seqs is not None and args.num_seqs < 1:
        parser.error(f"--num-seqs: got {args.num_seqs}, need at least 1")
    for low, high in filter(None, (args.input_len, args.output_len)):
        if not 1 <= low <= high:
            parser.error(f"lengths: got {low} {high}, need 1 <= MIN <= MAX")
    return args


def draw_params(rng: random.Random, lengths: tuple[int, int]) -> SamplingParams:
    max_tokens = rng.randint(*lengths)
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens, detokenize=False)


def summarise(outputs: list[RequestOutput], seconds: float) -> dict[str, int | float | None]:
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    num_in, num_out = sum(len(output.prompt_token_ids) for output in outputs), sum(counts)
    names = ("arrival_time", "first_token_time", "finished_time")
    came, first, end = ([getattr(output.metrics, name) for output in outputs] for name in names)
    waits = [f - c for f, c in zip(first, came, strict=True)]
    later = num_out - len(outputs)
    gaps = [(e - f) / (n - 1) for e, f, n in zip(end, first, counts, strict=True) if n > 1]
    return {
        "prompt_tokens": num_in,
        "output_tokens": num_out,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_out / seconds, 1),
        "total_tokens_per_second": round((num_in + num_out) / seconds, 1),
        "prefill_tokens_per_second": round(num_in / (max(first) - min(came)), 1),
        "decode_tokens_per_second": round(later / (max(end) - min(first)), 1) if gaps else None,
        "median_seconds_to_first_token": round(statistics.median(waits), 4),
        "median_seconds_per_output_token": round(statistics.median(gaps), 5) if gaps else None,
    }


if __name__ == "__main__":
    main()
