"""What this machine can do at best, and the least time that a piece of work takes on it.

In: nothing, or a model's facts and a work. Out: `Limits`, measured through plain torch with all of
its threads (streaming read, and matrix products with many rows), and `floor_seconds`.

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

from nanoinfer.model_config import ModelConfig
from nanoinfer.model_runner import available_memory

_READ_BYTES = 1 << 30  # far more than any cache holds
_GEMM_SIZE = 2048
_SECONDS = 0.5  # for each measurement
_RATES = ("read", "bf16", "fp32")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Rates of this machine, in bytes or floating point operations a second."""

    read: float
    bf16: float
    fp32: float
    num_threads: int

    def flops(self, dtype: torch.dtype) -> float:
        return self.bf16 if dtype == torch.bfloat16 else self.fp32

    def best_of(self, other: "Limits") -> "Limits":
        """The higher of two measurements: noise only ever makes a machine slower."""
        rates = {name: max(getattr(self, name), getattr(other, name)) for name in _RATES}
        return dataclasses.replace(self, **rates)


class Work(NamedTuple):
    """Equal requests that start together: `num_seqs` x (`input_len` in, `output_len` out)."""

    num_seqs: int
    input_len: int
    output_len: int


def measure() -> Limits:
    """Measure this machine; takes about two seconds."""
    return Limits(
        read=_measure_read(),
        bf16=_measure_gemm(torch.bfloat16),
        fp32=_measure_gemm(torch.float32),
        num_threads=torch.get_num_threads(),
    )


def floor_seconds(
    model: ModelConfig, work: Work, limits: Limits, dtype: torch.dtype, *, overlap: bool = False
) -> float:
    """The least time for `work` when the model is held in `dtype`.

    One step computes all prompts and gives the first tokens; each further step gives one token a
    sequence, reading all weights once and the KV cache of all sequences. Matrix products and
    attention cost their operations at the GEMM rate plus their bytes at the read rate. With
    `overlap` each of the two costs only the longer of both: a bound that no engine can pass.
    """
    head = model.hidden_size * model.vocab_size
    body = model.num_hidden_layers * _layer_weights(model)
    width = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    kv_width = model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    combine = max if overlap else sum
    seconds = 0.0
    for step in range(work.output_len):
        num_new = work.input_len if step == 0 else 1  # tokens of each sequence in this step
        context = work.input_len + step  # its tokens in the cache at the end of this step
        pairs = num_new * (2 * context - num_new + 1) / 2  # of a query and a key that it sees
        gemm_flops = 2 * work.num_seqs * (num_new * body + head)
        gemm_bytes = dtype.itemsize * (body + head)
        attention_flops = 4 * work.num_seqs * pairs * width  # q k and p v
        attention_bytes = 2 * dtype.itemsize * work.num_seqs * context * kv_width  # k and v
        for flops, size in ((gemm_flops, gemm_bytes), (attention_flops, attention_bytes)):
            seconds += combine((flops / limits.flops(dtype), size / limits.read))
    return seconds


def _layer_weights(model: ModelConfig) -> int:
    """Weights of one layer's matrices: q and o, k and v, gate, up and down."""
    num_heads = model.num_attention_heads + model.num_key_value_heads
    attention = 2 * model.hidden_size * num_heads * model.head_dim
    return attention + 3 * model.hidden_size * model.intermediate_size


def _measure_read() -> float:
    """Bytes a second of reducing a large tensor, the faster of two ways."""
    size = min(_READ_BYTES, available_memory() // 4)
    data = torch.ones(size // 4, dtype=torch.float32)
    largest = data.view(torch.int32).amax
    return data.nbytes / min(_best_seconds(data.sum), _best_seconds(largest))


def _measure_gemm(dtype: torch.dtype) -> float:
    """Operations a second of a product of square matrices."""
    x = torch.randn(_GEMM_SIZE, _GEMM_SIZE).to(dtype)
    weight = torch.randn(_GEMM_SIZE, _GEMM_SIZE).to(dtype)
    return 2 * _GEMM_SIZE**3 / _best_seconds(lambda: torch.nn.functional.linear(x, weight))


def _best_seconds(function: Callable[[], object]) -> float:
    """The shortest call of those that fit into the time, after one that warms up."""
    function()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        function()
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
