"""What the small parts of a layer cost, form by form: launches, bytes, time.

In: nothing; sizes are Qwen3-0.6B's. Out: a Markdown table for each chapter of the book that quotes
one. With --update each is written into its chapter, between `<!-- measured: NAME -->` and
`<!-- end -->`. Measure on an idle machine.

A launch is an operator that computes (views are free), or a kernel that does the work of several.
Its bytes are those of its inputs and outputs, once each, whether memory or a cache serves them; of
a table only the rows that it reads. Time is the median of many calls.

    python benchmarks/layers.py                   # all tables
    python benchmarks/layers.py layernorm rotary  # some
    python benchmarks/layers.py --update
"""

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanoinfer.batch import SamplingBatch
from nanoinfer.kernels import Kernels, select_kernels
from nanoinfer.kernels.linear import linear_ref
from nanoinfer.kernels.norm_rope_store import HeadNorms
from nanoinfer.kernels.rotary import Rope
from nanoinfer.layers.linear import Linear, QKVParallelLinear
from nanoinfer.layers.rotary_embedding import inverse_frequencies
from nanoinfer.model_config import RopeConfig
from nanoinfer.sampler import sample

DOCS = Path(__file__).parent.parent / "docs"
CPU, DTYPE, EPS = torch.device("cpu"), torch.bfloat16, 1e-6
E, H, KV, D, FFN, V = 1024, 16, 8, 128, 3072, 151936
ROWS = (16, 2048)  # a step that decodes, one that reads prompts
_SECONDS = 0.5  # for each figure


class Form(NamedTuple):
    """One way of doing it. The counts are None where torch can count them itself."""

    name: str
    run: Callable[[], Any]
    launches: int | None = None
    num_bytes: int | None = None


class Counter(TorchDispatchMode):
    """Counts operators that write a tensor of their own, and the bytes that they touch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in inputs}
        is_view = all(x.untyped_storage().data_ptr() in known for x in outputs)
        if not is_view or func._schema.is_mutable:
            self.launches += 1
            written = [] if func._schema.is_mutable else outputs
            if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.gather):
                inputs[0] = outputs[0]  # as much as it reads of the table
            self.num_bytes += nbytes(*inputs, *written)
        return out


def table(forms_at: Callable[[int], Iterator[Form]], rows: tuple[int, ...]) -> str:
    lines = [
        "| rows | form | launches | MB | ms |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for T in rows:
        for form in forms_at(T):
            launches, num_bytes = form.launches, form.num_bytes
            if launches is None:
                with Counter() as counter:
                    form.run()
                launches, num_bytes = counter.launches, counter.num_bytes
            size = "" if num_bytes is None else f"{num_bytes / 1e6:.2f}"
            ms = 1e3 * median_seconds(form.run)
            lines.append(f"| {T} | {form.name} | {launches} | {size} | {ms:.3f} |")
    return "\n".join(lines)


def median_seconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    times, end = [], time.perf_counter() + _SECONDS
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def linear(T: int) -> Iterator[Form]:
    """q, k and v of one token: three products, one, one from a packed weight."""
    x = torch.randn(T, E).to(DTYPE)
    weights = [torch.randn(heads * D, E).to(DTYPE) for heads in (H, KV, KV)]
    layers = [QKVParallelLinear(E, D, H, KV, dtype=DTYPE, device=CPU) for _ in range(2)]
    for layer in layers:
        for part, weight in zip(layer.cuts, weights, strict=True):
            layer.load("weight", part, weight)
    layers[1].pack(cpp_kernels().pack_weight)
    size = nbytes(x, *weights) + T * (H + 2 * KV) * D * DTYPE.itemsize
    yield Form("q, k, v one after the other", lambda: [F.linear(x, w) for w in weights])
    yield Form("qkv in one", lambda: layers[0](x), 1, size)
    yield Form("qkv in one, packed", lambda: layers[1](x), 1, size)


def accumulate(T: int) -> Iterator[Form]:
    """y += x W^T: into a new tensor and added, or where it belongs."""
    x, y = torch.randn(T, FFN).to(DTYPE), torch.zeros(T, E, dtype=DTYPE)
    layer = Linear(FFN, E, dtype=DTYPE, device=CPU)
    layer.weight.data.normal_()
    product = torch.empty_like(y)
    yield Form("y += linear(x)", lambda: y.add_(layer(x)))
    yield Form("linear(x, out=buffer), y += buffer", lambda: y.add_(layer(x, out=product)))
    run: Callable = lambda: linear_ref(x, layer.weight, None, None, y, is_accumulating=True)  # noqa: E731
    yield Form("linear(x, out_acc=y)", run, 1, nbytes(x, layer.weight, y, y))


def layernorm(T: int) -> Iterator[Form]:
    """The residual addition and the norm behind it."""
    x, residual = (torch.randn(T, E).to(DTYPE) for _ in range(2))
    weight = torch.ones(E, dtype=DTYPE)
    ref, cpp, compiled = Kernels(), cpp_kernels(), compiled_kernels()
    one_pass = nbytes(x, residual, weight, x, x)

    def two_kernels() -> Tensor:
        return cpp.rms_norm(x + residual, weight, EPS)

    arguments = (x, residual, weight, EPS)
    yield Form("operator by operator", lambda: ref.add_rms_norm(*arguments))
    yield Form("an addition, then a norm", two_kernels, 2, one_pass + nbytes(x))
    yield Form("fused by torch.compile", lambda: compiled.add_rms_norm(*arguments), 1, one_pass)
    yield Form("fused in C++", lambda: cpp.add_rms_norm(*arguments), 1, one_pass)


def rotary(T: int) -> Iterator[Form]:
    """Queries and keys turned; MRoPE with angles computed in each call, and read from a table."""
    config = RopeConfig(head_dim=D, rotary_dim=D, theta=1e6)
    inv_freq, _ = inverse_frequencies(config)
    angles = torch.outer(torch.arange(4096.0), inv_freq)
    cos, sin = angles.cos(), angles.sin()
    axes = torch.tensor([i % 3 for i in range(D // 2)]).repeat(2)
    rope = Rope(torch.cat((cos, sin), -1))
    mrope = rope._replace(axes=axes)
    q, k = torch.randn(T, H, D).to(DTYPE), torch.randn(T, KV, D).to(DTYPE)
    flat = torch.arange(T)
    grid = torch.stack((flat, flat // 32, flat % 32))
    ref, cpp, compiled = Kernels(), cpp_kernels(), compiled_kernels()
    size = nbytes(q, k, q, k) + T * D * 4

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    def two_tables() -> None:
        c, s = cos[flat].unsqueeze(1), sin[flat].unsqueeze(1)
        turn(q, c, s), turn(k, c, s)

    def one_table() -> None:
        c, s = rope.cos_sin[flat].unsqueeze(1).chunk(2, dim=-1)
        turn(q, c, s), turn(k, c, s)

    def uncached() -> None:
        angles = grid.float()[axes[: D // 2]].T * inv_freq
        c, s = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        turn(q, c, s), turn(k, c, s)

    yield Form("two tables, operator by operator", two_tables)
    yield Form("one table, operator by operator", one_table)
    yield Form("one table, torch.compile", lambda: compiled.rotary(flat, q, k, rope), 1, size)
    yield Form("one table, C++", lambda: cpp.rotary(flat, q, k, rope), 1, size)
    yield Form("MRoPE, angles computed", uncached)
    yield Form("MRoPE, from the table", lambda: ref.rotary(grid, q, k, mrope))
    yield Form("MRoPE, torch.compile", lambda: compiled.rotary(grid, q, k, mrope), 1, size)
    yield Form("MRoPE, C++", lambda: cpp.rotary(grid, q, k, mrope), 1, size)


def attention(T: int) -> Iterator[Form]:
    """From the fused projection to a query that may attend and keys and values that are stored."""
    qkv = torch.randn(T, (H + 2 * KV) * D).to(DTYPE)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in qkv.split((H * D, KV * D, KV * D), dim=-1))
    norms = HeadNorms(torch.ones(D, dtype=DTYPE), torch.ones(D, dtype=DTYPE), EPS)
    rope = Rope(torch.randn(4096, D))
    caches = [torch.zeros(T // 16 + 2, 16, KV, D, dtype=DTYPE) for _ in range(2)]
    positions = torch.arange(T)
    slots = positions + 16
    ref, cpp = Kernels(), cpp_kernels()
    q_and_k, angles = nbytes(q, k), T * D * 4

    def three_kernels() -> None:
        normed = cpp.rms_norm(q, norms.q_weight, EPS), cpp.rms_norm(k, norms.k_weight, EPS)
        _, turned = cpp.rotary(positions, *normed, rope)
        cpp.store_kv(turned, v, *caches, slots)

    arguments = (q, k, v, norms, positions, rope, *caches, slots)
    apart = 4 * q_and_k + angles + 2 * nbytes(k, v)
    together = 2 * q_and_k + angles + 2 * nbytes(v)
    yield Form("operator by operator", lambda: ref.norm_rope_store(*arguments))
    yield Form("norms, rotation, store in C++", three_kernels, 4, apart)
    yield Form("all in one", lambda: cpp.norm_rope_store(*arguments), 1, together)


def sampler(R: int) -> Iterator[Form]:
    """One token a row from logits over Qwen3's vocabulary, temperature 0.6."""
    logits = 3 * torch.randn(R, V)
    cpp = cpp_kernels()

    def batch(top_k: int, top_p: float) -> SamplingBatch:
        return SamplingBatch(
            temperatures=torch.full((R,), 0.6),
            top_k=torch.full((R,), top_k),
            top_p=torch.full((R,), top_p),
            min_p=torch.zeros(R),
            seeds=torch.arange(R),
            positions=torch.arange(R),
            added=None,
            repetition=None,
            penalties=None,
            num_logprobs=[None] * R,
        )

    def multinomial() -> Tensor:
        return torch.multinomial((logits / 0.6).softmax(-1), 1)

    def exponential() -> Tensor:
        probs = (logits / 0.6).softmax(-1)
        return (probs / torch.empty_like(probs).exponential_(1)).argmax(-1)

    def sort_and_cut() -> Tensor:
        values, ids = (logits / 0.6).sort(-1, descending=True)
        values[:, 20:] = -torch.inf
        probs = values.softmax(-1)
        probs[probs.cumsum(-1) - probs > 0.95] = 0
        return ids.gather(-1, torch.multinomial(probs, 1))

    plain, filtered = batch(0, 1.0), batch(20, 0.95)
    yield Form("softmax, multinomial", multinomial)
    yield Form("softmax over exponential noise, argmax", exponential)
    yield Form("bounded noise", lambda: sample(logits.clone(), plain, cpp))
    yield Form("top_k 20, top_p 0.95: sort, cut, multinomial", sort_and_cut)
    yield Form("top_k 20, top_p 0.95: threshold, bounded noise",
               lambda: sample(logits.clone(), filtered, cpp))  # fmt: skip


def cpp_kernels() -> Kernels:
    return select_kernels(CPU, "auto", use_compile=False)


def compiled_kernels() -> Kernels:
    return select_kernels(CPU, "ref", use_compile=True)


SECTIONS: dict[str, tuple[Callable[[int], Iterator[Form]], tuple[int, ...]]] = {
    "linear": (linear, (1, *ROWS)),
    "accumulate": (accumulate, ROWS),
    "layernorm": (layernorm, ROWS),
    "rotary": (rotary, ROWS),
    "attention": (attention, ROWS),
    "sampler": (sampler, (1, 16, 64)),
}


def update(name: str, text: str) -> None:
    """Replace what stands between the section's markers, on whichever page has them."""
    pattern = re.compile(rf"(<!-- measured: {name} -->\n).*?(<!-- end -->)", flags=re.S)
    pages = [page for page in DOCS.glob("*.md") if pattern.search(page.read_text())]
    for page in pages:
        page.write_text(pattern.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page.read_text()))
    if not pages:
        raise ValueError(f"docs: no page has <!-- measured: {name} -->")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--update", action="store_true", help="write the tables into docs/")
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"sections: got {', '.join(unknown)}, need some of {', '.join(SECTIONS)}")
    for name in args.sections or SECTIONS:
        text = table(*SECTIONS[name])
        print(f"## {name}\n\n{text}\n")
        if args.update:
            update(name, text)


if __name__ == "__main__":
    main()
