"""What this machine can do at best, and the least time that a piece of work takes on it.

In: nothing, or a model's facts and a work. Out: `Limits`, measured through plain torch with all of
its threads (streaming read, and matrix products with many rows; the best of several probes each),
`floor_seconds`, and `share`: the part of the measured time that the machine really needs.

A figure in tokens a second tells more about the machine than about the engine. Its share of what
the machine allows can be compared: two engines, two machines, two years. Measure on an idle
machine, in the run whose figures are to be judged.

    python benchmarks/limits.py
"""

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanoinfer.cache_sizes import available_memory
from nanoinfer.model_config import ModelConfig

_READ_BYTES = 1 << 30  # far more than any cache holds; less only where memory is short
_READ_ROW = 4096  # numbers in a row, for the probe that multiplies a matrix and a vector
_GEMM_SIZES = {  # rows, inputs, outputs
    "cpu": ((2048, 2048, 2048), (1024, 1024, 4096)),
    "cuda": ((8192, 8192, 8192), (4096, 4096, 16384)),
}
_SECONDS = 0.3  # for each probe
_RATES = ("read", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Rates of this machine, in bytes or floating point operations a second."""

    read: float
    bf16: float
    fp32: float
    num_threads: int

    def flops(self, dtype: torch.dtype) -> float:
        """For two-byte types the better of both: an engine may widen what it has read."""
        return max(self.bf16, self.fp32) if dtype.itemsize == 2 else self.fp32

    def best_of(self, other: "Limits") -> "Limits":
        """The higher of two measurements: noise only ever makes a machine slower."""
        rates = {name: max(getattr(self, name), getattr(other, name)) for name in _RATES}
        return dataclasses.replace(self, **rates)


class Work(NamedTuple):
    """Requests that start together: tokens in and tokens out, one number a request."""

    input_lens: list[int]
    output_lens: list[int]

    @classmethod
    def equal(cls, num_seqs: int, input_len: int, output_len: int) -> "Work":
        return cls([input_len] * num_seqs, [output_len] * num_seqs)

    def __str__(self) -> str:
        spans = (_span(self.input_lens), _span(self.output_lens))
        return "{} x ({} in, {} out)".format(len(self.input_lens), *spans)


def measure(device: torch.device | None = None) -> Limits:
    """Measure this machine (its CPU unless told otherwise); takes some seconds."""
    device = device or torch.device("cpu")
    return Limits(
        read=_measure_read(device),
        bf16=_measure_gemm(torch.bfloat16, device),
        fp32=_measure_gemm(torch.float32, device),
        num_threads=torch.get_num_threads(),
    )


def floor_seconds(
    model: ModelConfig, work: Work, limits: Limits, dtype: torch.dtype, *, overlap: bool = False
) -> float:
    """The least time for `work` when the model is held in `dtype`.

    The fewest steps are as many as the longest output has tokens, and each reads all weights once,
    of a mixture those of the experts that its tokens are expected to choose. A recurrent state is
    read and written at each token of an output.
    A request's prompt gives its first token; each further token is computed from the one before
    and reads the request's KV cache. So an output's last token is never computed with. Operations
    cost their number at the GEMM rate, bytes theirs at the read rate: the sum of the two. With
    `overlap` only the longer: a bound that no engine can pass, in whatever order it works, as long
    as weights and KV come from memory and not from a cache.
    """
    head = model.hidden_size * model.vocab_size
    body = sum(_layer_weights(model, i) for i in range(model.num_hidden_layers))
    num_attending = model.layer_types.count("full_attention")
    width = num_attending * model.num_attention_heads * model.head_dim
    kv_width = num_attending * model.num_key_value_heads * model.head_dim
    state = (model.num_hidden_layers - num_attending) * _state_numbers(model)
    flops = 0
    num_seqs = len(work.output_lens)
    read = sum(_layer_weights(model, i, num_seqs) for i in range(model.num_hidden_layers))
    numbers = max(work.output_lens) * (read + head)  # that are read
    states = sum(work.output_lens) * 2 * state
    for num_in, num_out in zip(work.input_lens, work.output_lens, strict=True):
        computed = num_in + num_out - 1  # tokens that pass through the layers
        pairs = computed * (computed + 1) // 2  # of a query and a key that it sees
        contexts = num_out * num_in + num_out * (num_out - 1) // 2  # tokens in the cache, all steps
        flops += 2 * (computed * body + num_out * head) + 4 * pairs * width  # attention: q k, p v
        flops += 6 * computed * state  # two answers and a write
        numbers += 2 * contexts * kv_width  # k and v
    num_bytes = dtype.itemsize * numbers + torch.float32.itemsize * states
    seconds = (flops / limits.flops(dtype), num_bytes / limits.read)
    return max(seconds) if overlap else sum(seconds)


def share(floor: float, seconds: float) -> float:
    """Part of `seconds` that the roofline needs: `floor_seconds(..., overlap=True)`.

    ValueError where that is more than all: then the work was not done, the limits were measured on
    a busy machine, or the model is so small that a cache holds it.
    """
    if floor > seconds:
        raise ValueError(
            f"seconds: got {seconds:.4g}, need at least the floor, {floor:.4g}: "
            "limits measured on a busy machine, work left out, or a model that fits in a cache"
        )
    return floor / seconds


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}..{high}"


def _layer_weights(model: ModelConfig, layer: int, num_tokens: int | None = None) -> float:
    """Weights of a layer's matrices: those that one token meets, or that `num_tokens` read."""
    if model.layer_types[layer] == "full_attention":
        num_heads = (2 + model.gated_attention) * model.num_attention_heads
        mixer = model.hidden_size * (num_heads + 2 * model.num_key_value_heads) * model.head_dim
    else:
        assert model.delta is not None, "a layer without attention has a state"
        keys = model.delta.num_key_heads * model.delta.key_head_dim
        values = model.delta.num_value_heads * model.delta.value_head_dim
        mixer = model.hidden_size * (2 * keys + 3 * values + 2 * model.delta.num_value_heads)
    if model.moe is None or layer not in model.moe.layers:
        return mixer + 3 * model.hidden_size * model.intermediate_size
    moe, met = model.moe, float(model.moe.num_experts_per_tok)
    if num_tokens is not None:  # expected, of experts that are chosen evenly
        met = moe.num_experts * (1 - (1 - met / moe.num_experts) ** num_tokens)
    inner = met * moe.moe_intermediate_size + moe.shared_expert_intermediate_size
    return mixer + model.hidden_size * (3 * inner + moe.num_experts)


def _state_numbers(model: ModelConfig) -> int:
    """Numbers of one layer's state of a sequence."""
    d = model.delta
    return 0 if d is None else d.num_value_heads * d.key_head_dim * d.value_head_dim


def _measure_read(device: torch.device) -> float:
    """Bytes a second of reducing a large tensor, the fastest of several ways."""
    is_cpu = device.type == "cpu"
    size = min(_READ_BYTES, available_memory() // 4) if is_cpu else _READ_BYTES
    data = torch.ones(size // 4 // _READ_ROW, _READ_ROW, device=device)
    vector = torch.ones(_READ_ROW, device=device)
    half = data.view(torch.bfloat16)
    half_vector = torch.ones(half.shape[1], dtype=half.dtype, device=device)
    probes = (
        data.sum,
        data.view(torch.int32).amax,
        lambda: torch.mv(data, vector),
        lambda: torch.mv(half, half_vector),
    )
    return data.nbytes / min(_best_seconds(probe, device) for probe in probes)


def _measure_gemm(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a matrix product, the best of several sizes."""
    return max(_gemm_rate(*sizes, dtype, device) for sizes in _GEMM_SIZES[device.type])


def _gemm_rate(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Operations a second at these sizes: the weight as it comes, and where possible packed."""
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    transposed = weight.T.contiguous()
    probes = [
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.mm(x, transposed),
    ]
    is_bf16_cpu = device.type == "cpu" and dtype == torch.bfloat16
    if is_bf16_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        linear = torch.ops.mkldnn._linear_pointwise
        probes.append(lambda: linear(x, packed, None, "none", [], ""))
    return 2 * rows * inputs * outputs / min(_best_seconds(probe, device) for probe in probes)


def _best_seconds(function: Callable[[], object], device: torch.device) -> float:
    """The shortest call of those that fit into the time, after one that warms up."""

    def call() -> None:
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    limits = measure()
    print(f"streaming read  {limits.read / 1e9:8.1f} GB/s")
    print(f"bf16 GEMM       {limits.bf16 / 1e12:8.3f} TFLOP/s")
    print(f"fp32 GEMM       {limits.fp32 / 1e12:8.3f} TFLOP/s")
    print(f"threads         {limits.num_threads:8d}")
    print(json.dumps({name: round(rate) for name, rate in dataclasses.asdict(limits).items()}))


if __name__ == "__main__":
    main()
