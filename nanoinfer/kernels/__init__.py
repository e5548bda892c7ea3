"""The table of kernels: which body runs behind each op, decided once per engine.

In: the device, the engine's `kernels` ("auto" or "ref") and whether to torch.compile.
Out: a frozen `Kernels`, given to layers at construction. Every body of an op has the reference's
signature, so a layer never asks which one it has. "ref" is plain PyTorch throughout: it runs the
whole engine, slowly, and is what the others are compared with.
"""

import importlib.util
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoinfer.kernels.build import (
    KernelBuildError,
    load_library,
    num_threads,
    respect_cpu_quota,
)
from nanoinfer.kernels.causal_conv import causal_conv_ref, make_causal_conv_cpu
from nanoinfer.kernels.draw import draw_ref, make_draw_cpu
from nanoinfer.kernels.gated_delta import gated_delta_chunks, make_gated_delta_cpu
from nanoinfer.kernels.linear import LinearCpu, Pack, pack_never
from nanoinfer.kernels.moe import MoeCpu, PackExperts, moe_ref, pack_experts_never
from nanoinfer.kernels.norm_rope_store import (
    make_norm_rope_store,
    make_norm_rope_store_cpu,
    norm_rope_ref,
    norm_rope_store_ref,
)
from nanoinfer.kernels.paged_attention import make_paged_attention_cpu, paged_attention_ref
from nanoinfer.kernels.quantize import Quantized
from nanoinfer.kernels.record import Recorder
from nanoinfer.kernels.rms_norm import (
    RmsNormCpu,
    add_rms_norm_ref,
    rms_norm_gated_ref,
    rms_norm_quantized_ref,
    rms_norm_ref,
)
from nanoinfer.kernels.rotary import make_rotary_cpu, rotary_ref
from nanoinfer.kernels.sigmoid_mul import make_sigmoid_mul_cpu, sigmoid_mul_ref
from nanoinfer.kernels.silu_mul import make_silu_mul_cpu, silu_mul_ref
from nanoinfer.kernels.store_kv import make_store_kv_cpu, store_kv_ref

logger = logging.getLogger("nanoinfer")


class Kernels(NamedTuple):
    """One callable per op, and the name of the set."""

    name: str = "ref"
    keeps_fp8: bool = False  # its linear layers multiply weights in FP8
    pack_weight: Pack = pack_never
    pack_experts: PackExperts = pack_experts_never
    rms_norm: Callable[..., Tensor] = rms_norm_ref
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]] = add_rms_norm_ref
    rms_norm_gated: Callable[..., Tensor] = rms_norm_gated_ref
    rms_norm_quantized: Callable[..., tuple[Quantized, Tensor | None]] = rms_norm_quantized_ref
    rotary: Callable[..., tuple[Tensor, Tensor | None]] = rotary_ref
    silu_mul: Callable[..., Tensor] = silu_mul_ref
    sigmoid_mul: Callable[..., Tensor] = sigmoid_mul_ref
    causal_conv: Callable[..., Tensor] = causal_conv_ref
    gated_delta: Callable[..., Tensor] = gated_delta_chunks
    moe: Callable[..., Tensor] = moe_ref
    store_kv: Callable[..., None] = store_kv_ref
    norm_rope_store: Callable[..., Tensor] = norm_rope_store_ref
    paged_attention: Callable[..., Tensor] = paged_attention_ref
    draw: Callable[..., Tensor] = draw_ref
    recorder: Recorder | None = None  # of all calls of these kernels


# What torch.compile fuses: elementwise, with at most a sum over a row.
_ELEMENTWISE = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_gated",
    "rms_norm_quantized",
    "rotary",
    "silu_mul",
    "sigmoid_mul",
)


def select_kernels(device: torch.device, kernels: str, use_compile: bool) -> Kernels:
    """The best bodies that this machine has, with one warning if it lacks what they need."""
    table = Kernels()
    if device.type == "cpu":
        respect_cpu_quota()
    if kernels == "auto":
        table = _cpu_kernels() if device.type == "cpu" else _cuda_kernels(device)
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        use_compile = False  # torch.compile writes Triton there
    if use_compile:
        compiled = {op: _compile(getattr(Kernels(), op)) for op in _ELEMENTWISE}  # references
        table = table._replace(**compiled, recorder=None)
        if table.name != "triton":  # there it is one kernel as it is
            fused = make_norm_rope_store(_compile(norm_rope_ref), table.store_kv)
            table = table._replace(norm_rope_store=fused)
    return table


def _compile(function: Any) -> Any:
    """Rounds where the reference rounds: left alone, fused operations hand on fp32."""
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return torch.compile(_own_copy(function), dynamic=True, fullgraph=True, options=options)


def _own_copy(function: Any) -> FunctionType:
    """torch.compile keeps graphs by code object, a few for each: engines must not share one."""
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__)


def _cuda_kernels(device: torch.device) -> Kernels:
    try:
        from nanoinfer.kernels.triton_attention import paged_attention_triton, store_kv_triton
        from nanoinfer.kernels.triton_delta import causal_conv_triton, gated_delta_triton
        from nanoinfer.kernels.triton_draw import draw_triton
        from nanoinfer.kernels.triton_fp8 import LinearCuda
        from nanoinfer.kernels.triton_moe import moe_triton
        from nanoinfer.kernels.triton_norm_rope import norm_rope_store_triton
    except ImportError as error:
        logger.warning("no triton kernels, running the PyTorch references (slower): %s", error)
        return Kernels()
    has_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if has_gpu else (0, 0)
    has_fp8 = capability >= (8, 9)
    return Kernels(
        name="triton",
        keeps_fp8=has_fp8,
        pack_weight=LinearCuda(capability).pack if has_fp8 else pack_never,
        store_kv=store_kv_triton,
        norm_rope_store=norm_rope_store_triton,
        paged_attention=paged_attention_triton,
        causal_conv=causal_conv_triton,
        gated_delta=gated_delta_triton,
        moe=moe_triton,
        draw=draw_triton,
    )


def _cpu_kernels() -> Kernels:
    try:
        built = load_library()
    except KernelBuildError as error:
        logger.warning("no C++ kernels, running the PyTorch references (slower): %s", error)
        return Kernels(pack_weight=LinearCpu(None, 1).pack)
    threads = num_threads(built)
    library: Any = Recorder(built)
    norms, experts = RmsNormCpu(library, threads), MoeCpu(library, threads)
    return Kernels(
        name="cpu",
        pack_weight=LinearCpu(library, threads).pack,
        pack_experts=experts.pack,
        moe=experts.moe,
        rms_norm=norms.rms_norm,
        add_rms_norm=norms.add_rms_norm,
        rms_norm_gated=norms.rms_norm_gated,
        rms_norm_quantized=norms.rms_norm_quantized,
        rotary=make_rotary_cpu(library, threads),
        silu_mul=make_silu_mul_cpu(library, threads),
        sigmoid_mul=make_sigmoid_mul_cpu(library, threads),
        causal_conv=make_causal_conv_cpu(library, threads),
        gated_delta=make_gated_delta_cpu(library, threads),
        store_kv=make_store_kv_cpu(library, threads),
        norm_rope_store=make_norm_rope_store_cpu(library, threads),
        paged_attention=make_paged_attention_cpu(library, threads),
        draw=make_draw_cpu(library, threads),
        recorder=library,
    )
