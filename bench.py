"""Throughput on random tokens, by nano-vllm's recipe.

In: how many sequences, and the ranges that their lengths are drawn from. Out: a table and, as the
last line, the same as JSON. Prompts are random token ids, temperature is 0.6, eos is ignored, and
nothing is detokenised; a warm-up comes first and is not counted. The work depends on --seed alone.

    python bench.py                        # the demo model
    python bench.py --shape qwen3-0.6b     # random weights in that shape
    python bench.py --model MODEL --num-seqs 64 --input-len 100 1024 --output-len 100 1024
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from typing import NamedTuple

from benchmarks.shapes import SHAPES, make_checkpoint
from nanoinfer import LLM, EngineConfig, RequestOutput, SamplingParams
from nanoinfer.demo import demo_model


class Defaults(NamedTuple):
    num_seqs: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]


DEFAULTS = {
    "cpu": Defaults(16, (64, 256), (32, 128)),
    "cuda": Defaults(256, (100, 1024), (100, 1024)),
}


def main() -> None:
    args = parse_args()
    config = choose_config(args)
    default = DEFAULTS[config.torch_device.type]
    num_seqs = args.num_seqs or default.num_seqs
    input_len = args.input_len or default.input_len
    output_len = args.output_len or default.output_len

    with LLM(**dataclasses.asdict(config), skip_tokenizer_init=True) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        rng = random.Random(config.seed)
        warm_up = [draw_prompt(rng, input_len, vocab_size) for _ in range(min(num_seqs, 4))]
        prompts = [draw_prompt(rng, input_len, vocab_size) for _ in range(num_seqs)]
        params = [draw_params(rng, output_len) for _ in range(num_seqs)]
        llm.generate(warm_up, draw_params(rng, (4, 4)), use_tqdm=False)

        before = llm.stats()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        after = llm.stats()

    result = summarise(outputs, seconds)
    result["steps"] = after.steps - before.steps
    result["preemptions"] = after.preemptions - before.preemptions
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<28}{value:>12,}")
    model = args.shape or args.model or "demo"
    print(json.dumps({"model": model, "num_seqs": num_seqs, "kernels": after.kernels, **result}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Throughput on random tokens.",
        epilog="Without --model or --shape the demo model is used (downloads 93 MB once).",
    )
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


def choose_config(args: argparse.Namespace) -> EngineConfig:
    choices = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    if args.model is None:
        choices["model"] = str(make_checkpoint(args.shape) if args.shape else demo_model())
    return EngineConfig(**choices)


def draw_prompt(rng: random.Random, lengths: tuple[int, int], vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(rng.randint(*lengths))]


def draw_params(rng: random.Random, lengths: tuple[int, int]) -> SamplingParams:
    max_tokens = rng.randint(*lengths)
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens, detokenize=False)


def summarise(outputs: list[RequestOutput], seconds: float) -> dict[str, int | float]:
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    waits = []
    for output in outputs:
        times = output.metrics
        if times is not None and times.first_token_time is not None:
            waits.append(times.first_token_time - times.arrival_time)
    return {
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": num_output_tokens,
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(num_output_tokens / seconds, 1),
        "median_seconds_to_first_token": round(statistics.median(waits), 3),
    }


if __name__ == "__main__":
    main()
