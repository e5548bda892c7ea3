"""Wraps an engine's stages and ops from outside, and notes when they run and what they cost.

In: an `LLMEngine`, which runs as it is: nothing in the package knows of this. Out: `Span`s of each
step, their seconds by stage and op, and the bytes and operations of those that were counted.

Stages are methods of the engine and what it calls. Ops are the callables of the `Kernels` table and
the modules `Linear` (named by its place: qkv, o, gate_up, ...) and `Embedding`. What an op calls
belongs to the op; what a stage spends outside of its ops is its "python & rest".

Invariant: spans overlap only by nesting, so the parts of a step add up to the step.
"""

import contextlib
import functools
import statistics
import time
import timeit
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import nanoinfer.model_runner
from nanoinfer.batch import Batch
from nanoinfer.kernels import Kernels
from nanoinfer.kernels.moe import route
from nanoinfer.layers.embedding import Embedding
from nanoinfer.layers.linear import Linear
from nanoinfer.llm import LLMEngine

STAGES = ("schedule", "batch", "forward", "logits", "sampling", "null model", "commit")
STEP, REST, LOOP = "step", "python & rest", "generate's loop"

Key = tuple[str, str]  # stage, op; "" for the stage itself
Step = dict[Key, float]  # seconds
CostOf = Callable[[tuple, dict, Any], Counter]  # bytes, flops of (arguments, keywords, result)


class Span(NamedTuple):
    """One call, in seconds."""

    stage: str
    op: str
    start: float
    end: float


class Recorder:
    """Wraps functions, and notes when they run; while `is_counting` also what they cost."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.costs: dict[Key, Counter] = defaultdict(Counter)
        self.is_counting = False
        self._spans: list[Span] = []
        self._clock = clock
        self._open: Key = ("", "")

    def wrap(
        self, function: Callable, stage: str = "", op: str = "", cost: CostOf | None = None
    ) -> Callable:
        """As a stage, or as an op of the stage that is open when it is called."""

        def call(*args: Any, **kwargs: Any) -> Any:
            outer = self._open
            if outer[1]:
                return function(*args, **kwargs)
            self._open = key = (stage or outer[0], op)
            start = self._clock()
            result = function(*args, **kwargs)
            self._spans.append(Span(*key, start, self._clock()))
            self._open = outer
            if cost is not None and self.is_counting:
                self.costs[key] += cost(args, kwargs, result)
            return result

        return call

    def take(self) -> list[Span]:
        """The spans since the last call."""
        spans, self._spans = self._spans, []
        return spans


def wrapping_seconds() -> float:
    """What the recorder adds to a call."""
    functions = (Recorder().wrap(tuple, op="nothing"), tuple)
    wrapped, plain = (min(timeit.repeat(f, number=1000, repeat=9)) for f in functions)
    return (wrapped - plain) / 1000


def call_cost(args: tuple, kwargs: dict, result: Any) -> Counter:
    """Inputs and outputs, once each."""
    found = {id(x): x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)}
    return Counter(bytes=sum(x.numel() * x.itemsize for x in found.values()))


def linear_cost(layer: Linear, args: tuple, kwargs: dict, result: Tensor) -> Counter:
    """The weight in whatever order it is held: packed, its parameter is empty but has its dtype."""
    weight = layer.out_features * layer.in_features * layer.weight.itemsize
    rest = call_cost((args, layer.scales, layer.bias), kwargs, result)
    return rest + Counter(bytes=weight, flops=2 * result.numel() * layer.in_features)


def embedding_cost(args: tuple, kwargs: dict, result: Tensor) -> Counter:
    return call_cost(args, kwargs, (result, torch.empty_like(result)))  # rows read, and written


def attention_cost(args: tuple, kwargs: dict, result: Tensor) -> Counter:
    q, k_cache, _, tables, seq_lens, cu_seqlens_q, _, *scales = args
    lens = list(zip(cu_seqlens_q.diff().tolist(), seq_lens.tolist(), strict=True))
    # Of a chunk of n queries the last one sees all keys, the one before it one less.
    pairs = sum(n * seq_len - n * (n - 1) // 2 for n, seq_len in lens)
    bytes_per_token = k_cache[0, 0].numel() * k_cache.itemsize
    bytes_per_token += sum(pair.k[0, 0].numel() * pair.k.itemsize for pair in scales)
    read = 2 * int(seq_lens.sum()) * bytes_per_token
    rest = call_cost((q, tables, seq_lens, cu_seqlens_q), {}, result)
    return rest + Counter(bytes=read, flops=4 * pairs * q[0].numel())  # q k, then p v


def store_cost(args: tuple, kwargs: dict, result: Tensor) -> Counter:
    q, k, v, norms, positions, rope, k_cache, _, slots, *scales = args
    angles = positions.numel() * rope.cos_sin[0].numel() * rope.cos_sin.itemsize
    per_token = k[0].numel() * k_cache.itemsize + sum(4 * pair.k[0, 0].numel() for pair in scales)
    stored = Counter(bytes=angles + 2 * len(k) * per_token)
    return call_cost((q, k, v, norms, positions, slots), {}, result) + stored


def conv_cost(args: tuple, kwargs: dict, result: Tensor) -> Counter:
    x, weight, state, *places = args
    kept = 2 * len(places[-1]) * state[0].numel() * state.itemsize  # read, and written
    return call_cost((x, weight, places), {}, result) + Counter(bytes=kept)


def delta_cost(args: tuple, kwargs: dict, result: Tensor) -> Counter:
    *rows, decay, state, _, _, slots = args
    kept = 2 * len(slots) * state[0].numel() * state.itemsize
    flops = 6 * len(result) * state[0].numel()  # two answers and a write, of every number
    return call_cost((rows, decay), {}, result) + Counter(bytes=kept, flops=flops)


def moe_cost(args: tuple, kwargs: dict, result: Tensor) -> Counter:
    x, logits, experts, routing = args
    chosen = route(logits, routing)[1]
    per_expert = sum(w[0].numel() for w in experts)
    weights = len(chosen.unique()) * per_expert * x.itemsize
    rest = call_cost((x, logits), {}, result)
    return rest + Counter(bytes=weights, flops=2 * chosen.numel() * per_expert)


_COSTS: dict[str, CostOf] = {
    "paged_attention": attention_cost,
    "norm_rope_store": store_cost,
    "causal_conv": conv_cost,
    "gated_delta": delta_cost,
    "moe": moe_cost,
}


@contextlib.contextmanager
def recording(engine: LLMEngine, recorder: Recorder) -> Iterator[None]:
    """Every stage and op of `engine` goes through `recorder` until the end of the block."""
    runner: Any = engine._pipeline.runner
    stages: list[tuple[Any, str, str]] = [
        (engine, "step", STEP),
        (engine.scheduler, "schedule", "schedule"),
        (Batch, "build", "batch"),
        (engine.scheduler, "commit", "commit"),
    ]
    with contextlib.ExitStack() as stack:
        if not isinstance(runner, nanoinfer.model_runner.ModelRunner):
            stages.append((runner, "launch", "null model"))
        else:
            stages += [(runner._model, "forward", "forward"), (runner._model, "logits", "logits")]
            stages.append((nanoinfer.model_runner, "sample", "sampling"))
            # Recorded steps have no layers to be seen: here they run layer by layer.
            stack.enter_context(mock.patch.object(runner, "_graphs", None))
            for patch in _op_patches(runner._model, runner.kernels, recorder):
                stack.enter_context(patch)
        for owner, name, stage in stages:
            cost = call_cost if stage == "sampling" else None
            wrapped = recorder.wrap(getattr(owner, name), stage, cost=cost)
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def _op_patches(model: nn.Module, kernels: Kernels, recorder: Recorder) -> Iterator[Any]:
    table: Any = kernels
    for op, body in kernels._asdict().items():
        if callable(body):
            cost = _COSTS.get(op, call_cost)
            table = table._replace(**{op: recorder.wrap(body, op=op, cost=cost)})
    for name, module in model.named_modules():
        if getattr(module, "_kernels", None) is kernels:
            yield mock.patch.object(module, "_kernels", table)
        op, cost = "embedding", embedding_cost
        if isinstance(module, Linear):
            op = name.rpartition(".")[2].removesuffix("_proj")
            cost = functools.partial(linear_cost, module)
        for method in ("forward", "wide"):  # a head's sums in fp32
            if isinstance(module, Linear | Embedding) and hasattr(module, method):
                wrapped = recorder.wrap(getattr(module, method), op=op, cost=cost)
                yield mock.patch.object(module, method, wrapped)


def split_step(spans: list[Span]) -> Step:
    """Seconds of each stage and op, and of what is in none of them."""
    seconds: Step = defaultdict(float)
    for span in spans:
        seconds[span.stage, span.op] += span.end - span.start
    for stage in {span.stage for span in spans if span.op}:
        in_ops = sum(seconds[key] for key in seconds if key[0] == stage and key[1])
        seconds[stage, REST] = seconds[stage, ""] - in_ops
    in_stages = sum(seconds[key] for key in seconds if key[0] in STAGES and not key[1])
    seconds[REST, ""] = seconds[STEP, ""] - in_stages
    return dict(seconds)


def medians(steps: list[Step]) -> Step:
    """Stages in the order in which a step has them, each with its ops behind it."""
    order = (*STAGES, REST, LOOP, STEP)
    keys = sorted(steps[0], key=lambda key: (order.index(key[0]), key[1] != "", key[1] == REST))
    return {key: statistics.median(step[key] for step in steps) for key in keys}
