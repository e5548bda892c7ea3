"""By how much torch.compile's bodies, the C++ bodies and the references differ in bf16.

In: nothing; the demo model is had on first use. Out: Markdown, with --out also to a file: for each
op the share of outputs that differ from the reference's, and the largest difference; for the whole
model the mean KL divergence from transformers' fp32 distribution over real text.

    python benchmarks/agreement.py --out docs/benchmarks/agreement.md
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.batch import Batch
from nanoinfer.demo import demo_model
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.norm_rope_store import HeadNorms
from nanoinfer.kernels.rotary import Rope
from nanoinfer.scheduler import ScheduledSequence

CPU, DTYPE, EPS = torch.device("cpu"), torch.bfloat16, 1e-6
T, E, H, KV, D = 512, 1024, 16, 8, 128
NUM_POSITIONS = 2000
PAGES = ("README.md", "docs/design.md")  # the real text


class Case(NamedTuple):
    op: str
    run: Callable[[Kernels], Any]


def cases() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    x, residual, gate, weight = random(T, E), random(T, E), random(T, E), 1 + random(E) / 4
    q, k, v = random(T, H, D), random(T, KV, D), random(T, KV, D)
    norms = HeadNorms(1 + random(D) / 4, 1 + random(D) / 4, EPS)
    angles = torch.arange(4096.0)[:, None] / 1e6 ** (torch.arange(0, D, 2) / D)
    rope = Rope(torch.cat((angles.cos(), angles.sin()), -1))
    positions = torch.arange(T)
    yield Case("rms_norm", lambda table: table.rms_norm(x, weight, EPS))
    yield Case("add_rms_norm", lambda table: table.add_rms_norm(x, residual, weight, EPS))
    yield Case("rms_norm_gated", lambda table: table.rms_norm_gated(x, gate, weight, EPS))
    yield Case("rotary", lambda table: table.rotary(positions, q, k, rope))
    yield Case("silu_mul", lambda table: table.silu_mul(x))

    def store(table: Kernels) -> tuple[Tensor, ...]:
        caches = [torch.zeros(T // 16, 16, KV, D, dtype=DTYPE) for _ in range(2)]
        out = table.norm_rope_store(q, k, v, norms, positions, rope, *caches, positions)
        return out, *caches

    yield Case("norm_rope_store", store)


def difference(found: Any, expected: Any) -> tuple[float, float]:
    """Share of values that differ, and the largest difference in the values' own unit."""
    ours, theirs = (
        torch.cat([x.flatten() for x in tree_leaves(outputs)]) for outputs in (found, expected)
    )
    return float((ours != theirs).float().mean()), float((ours - theirs).abs().max())


def ops_table(tables: dict[str, Kernels]) -> str:
    head = "| op | " + " | ".join(f"{name}: differ | by" for name in tables) + " |"
    lines = [head, "| --- |" + " ---: | ---: |" * len(tables)]
    for case in cases():
        expected = case.run(Kernels())
        cells = [difference(case.run(table), expected) for table in tables.values()]
        text = " | ".join(f"{share:.4%} | {most:.3g}" for share, most in cells)
        lines.append(f"| {case.op} | {text} |")
    return "\n".join(lines)


def logprobs(folder: Path, ids: list[int], **options: Any) -> Tensor:
    """[T, V]: the whole text in one step."""
    with LLM(folder, dtype="bfloat16", max_model_len=4096, **options) as llm:
        engine, runner = llm.engine, llm.engine._pipeline.runner
        seq = engine.make_request(ids, SamplingParams()).sequences[0]
        block_size = engine.config.block_size
        seq.block_table = list(range(1, 1 + -(-len(ids) // block_size)))
        step = [ScheduledSequence(seq, 0, len(ids), is_sampling=True)]
        hidden = runner._model(Batch.build(step, block_size, CPU), runner._caches)
        return runner._model.logits(hidden).log_softmax(-1)


def model_table(folder: Path) -> str:
    root = Path(__file__).parent.parent
    text = "".join((root / page).read_text() for page in PAGES)
    with LLM(folder, num_kv_blocks=4) as llm:
        ids = llm.get_tokenizer().encode(text)[:NUM_POSITIONS]

    def theirs(dtype: torch.dtype) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    exact = theirs(torch.float32)
    rows: list[tuple[str, Callable[[], Tensor]]] = [
        ("transformers, bf16", lambda: theirs(DTYPE)),
        ("references", lambda: logprobs(folder, ids, kernels="ref")),
        ("torch.compile", lambda: logprobs(folder, ids, kernels="ref", compile=True)),
        ("C++", lambda: logprobs(folder, ids)),
    ]
    lines = ["| bodies | mean KL to fp32 | same best token |", "| --- | ---: | ---: |"]
    for name, run in rows:
        found = run()
        kl = float((exact.exp() * (exact - found)).sum(-1).mean())
        same = float((exact.argmax(-1) == found.argmax(-1)).float().mean())
        lines.append(f"| {name} | {kl:.2e} | {same:.1%} |")
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a page to write")
    args = parser.parse_args()
    tables = {
        "torch.compile": select_kernels(CPU, "ref", use_compile=True),
        "C++": select_kernels(CPU, "auto", use_compile=False),
    }
    page = f"""# How far bf16 results differ

Written by `python benchmarks/agreement.py --out docs/benchmarks/agreement.md`; torch
{torch.__version__}.

Each op against its reference, {T} rows of normal random numbers: the share of outputs that differ,
and the largest difference. Neighbouring bf16 numbers between 2 and 4 are 0.0156 apart.
Both round where the reference does (torch.compile is told to: left alone it keeps fp32 between the
operations that it fuses, and a quarter of the outputs fall on the neighbouring number). What is
left is the order of a sum of squares, and e^x.

{ops_table(tables)}

The demo model over {NUM_POSITIONS:,} positions of real text, against transformers in fp32:

{model_table(demo_model())}
"""
    print(page)
    if args.out:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
