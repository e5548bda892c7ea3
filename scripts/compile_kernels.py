"""Compile every Triton kernel for a GPU on a machine that has none.

In: a compute capability, 90 by default. Out: a line for each variant (registers, bytes of stack,
shared memory), exit status 1 if one of them spills or needs more shared memory than the GPU has.

Triton is told that such a GPU is there, and its launches stop behind the compilation. So the
wrappers that the engine calls choose tiles and specialise arguments exactly as they would there.

    python scripts/compile_kernels.py --capability 90
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from nanoinfer.kernels.gated_delta import Decay
from nanoinfer.kernels.moe import Experts, Routing
from nanoinfer.kernels.norm_rope_store import HeadNorms
from nanoinfer.kernels.quantize import FP8
from nanoinfer.kernels.rotary import Rope
from nanoinfer.kernels.triton_attention import paged_attention_triton, store_kv_triton
from nanoinfer.kernels.triton_delta import causal_conv_triton, gated_delta_triton
from nanoinfer.kernels.triton_draw import draw_triton
from nanoinfer.kernels.triton_fp8 import multiply_triton, quantize_triton
from nanoinfer.kernels.triton_moe import moe_triton
from nanoinfer.kernels.triton_norm_rope import norm_rope_store_triton
from nanoinfer.layers.attention import KVCacheSpec
from nanoinfer.layers.quantized_kv_cache import QuantizedKVCacheSpec

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}
BF16 = torch.bfloat16
PAGE, NUM_BLOCKS = 16, 64
# query heads, kv heads, head dim: Qwen3-0.6B, 8B, 30B-A3B, Qwen3.5-0.8B, Llama-3-8B, SmolLM2
ATTENTIONS = [(16, 8, 128), (32, 8, 128), (32, 4, 128), (8, 2, 256), (32, 8, 64), (9, 3, 64)]


class Stub:
    """A driver of a GPU that is not there: all that a compilation asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_only(capability: int) -> list[Any]:
    """From now on launches compile and stop. Returns the list that collects what was compiled."""
    compiled: list[Any] = []
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    triton.runtime.driver.set_active(Stub(capability))
    JITFunction.run = warm_up
    return compiled


def launch_all(has_fp8: bool) -> None:
    """Every kernel, for the shapes of published models, as decoding and as prompts."""
    for heads, kv_heads, head_dim in ATTENTIONS:
        for num_seqs, q_len in ((1, 1), (32, 1), (256, 1), (4, 100)):
            for kv_dtype in (BF16, torch.int8, FP8) if has_fp8 else (BF16, torch.int8):
                _launch_attention(heads, kv_heads, head_dim, num_seqs, q_len, kv_dtype)
    rows_of = [torch.zeros(8, dtype=dtype) for dtype in (torch.float32, torch.int64)]
    filters = (rows_of[0], rows_of[1], rows_of[0], rows_of[0])  # temperature, top_k, top_p, min_p
    draw_triton(torch.zeros(8, 151_936), *filters, torch.zeros(8, dtype=torch.int32))
    for q_len in (1, 100):
        _launch_delta(q_len)
        x, logits = rows(4 * q_len, 2048), torch.zeros(4 * q_len, 128)
        experts = Experts(rows(128, 1536, 2048), rows(128, 2048, 768))
        moe_triton(x, logits, experts, Routing(8, True))
        if has_fp8:
            weight, scales = torch.zeros(4096, 2048, dtype=FP8), torch.zeros(32, 16)
            for bias in (None, rows(4096)):
                multiply_triton(quantize_triton(x), weight, scales, bias, BF16)


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=BF16)


def _launch_attention(H: int, KV: int, D: int, S: int, q_len: int, kv_dtype: torch.dtype) -> None:
    T = S * q_len
    q, k, v = rows(T, H, D), rows(T, KV, D), rows(T, KV, D)
    spec = KVCacheSpec(KV, D, BF16)
    if kv_dtype != BF16:
        spec = QuantizedKVCacheSpec(KV, D, kv_dtype, is_rotated=True)
    k_cache, v_cache, *scales = spec.allocate(NUM_BLOCKS, PAGE, torch.device("cpu"))
    caches = (k_cache, v_cache)
    slots = torch.zeros(T, dtype=torch.int64)
    tables = torch.zeros(S, 8, dtype=torch.int32)
    bounds = torch.arange(S + 1, dtype=torch.int32) * q_len
    paged_attention_triton(q, *caches, tables, bounds[1:].clone(), bounds, D**-0.5, *scales)
    if not scales:
        store_kv_triton(k, v, *caches, slots)
    is_wide = D == 256  # Qwen3.5: weights 1 + w in fp32, a quarter of the head, three axes
    weight = torch.zeros(D, dtype=torch.float32 if is_wide else BF16)
    R = D // 4 if is_wide else D
    axes = torch.zeros(R, dtype=torch.int64) if is_wide else None
    rope = Rope(torch.zeros(64, R), axes)
    for norms in (HeadNorms(weight, weight, 1e-6), None):
        norm_rope_store_triton(q, k, v, norms, slots, rope, *caches, slots, *scales)


def _launch_delta(q_len: int) -> None:
    S, HK, HV, D = 4, 16, 32, 128
    T, C = S * q_len, (2 * HK + HV) * D
    bounds = torch.arange(S + 1, dtype=torch.int32) * q_len
    places = (bounds, torch.zeros(S, dtype=torch.int32), torch.ones(S, dtype=torch.int32))
    causal_conv_triton(rows(T, C), torch.zeros(4, C), rows(8, 3, C), *places)
    q, k, v = rows(T, HK, D), rows(T, HK, D), rows(T, HV, D)
    a, b, decay = rows(T, HV), rows(T, HV), Decay(torch.zeros(HV), torch.zeros(HV))
    gated_delta_triton(q, k, v, a, b, decay, torch.zeros(8, HV, D, D), *places)


def resources(kernel: Any) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack (what was spilled), bytes of shared memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True).stdout
    found = [int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK")]  # type: ignore[index]
    return found[0], found[1], kernel.metadata.shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--capability", type=int, default=90, choices=SHARED_BYTES)
    capability = parser.parse_args().capability
    compiled = compile_only(capability)
    launch_all(has_fp8=capability >= 89)
    variants = {kernel.hash: kernel for kernel in compiled}
    print(f"triton {triton.__version__}, sm_{capability}: {len(variants)} variants")
    print(f"{'kernel':<20}{'warps':>6}{'registers':>11}{'stack':>7}{'shared':>8}")
    is_good = True
    for kernel in variants.values():
        registers, stack, shared = resources(kernel)
        is_good &= stack == 0 and shared <= SHARED_BYTES[capability]
        name, warps = kernel.metadata.name, kernel.metadata.num_warps
        print(f"{name:<20}{warps:>6}{registers:>11}{stack:>7}{shared:>8}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
