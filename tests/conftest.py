"""Fixtures of all tests, and the environment that the default run needs: no network.

Tests marked `network` are run with HF_HUB_OFFLINE=0 in the environment, which wins over the default
below.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Both are read when huggingface_hub and tokenizers are imported: set before anything else is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny("tiny-qwen3")` is that checkpoint's folder, built once a session: read only."""
    from tiny import make_tiny

    root = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda name: make_tiny(name, root / name))


NEEDED = {  # a level of x86-64, and what a CPU of it has, among others
    "x86-64-v3": {"avx2", "fma", "bmi2"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
}


MULTIPLYING = (*NEEDED, "pairs")  # "pairs": AVX512-BF16 where native avoids it


def machine_flags(machine: str) -> tuple[str, ...]:
    """The compiler's flags for "native" or one of `MULTIPLYING`; skips where it cannot run."""
    from nanoinfer.kernels.build import cpu_features, has_slow_pairs, native_flags

    if machine == "native":
        return native_flags()
    if machine == "pairs":
        if not has_slow_pairs():
            pytest.skip("native multiplies pairs, or has none")
        return ("-march=native",)
    if not NEEDED[machine] <= cpu_features():
        pytest.skip(f"this CPU cannot run {machine}")
    return (f"-march={machine}",)


def kernel_library(machine: str) -> ctypes.CDLL:
    """The C++ kernels built for a machine; skips where they cannot run."""
    from nanoinfer.kernels.build import KernelBuildError, load_library

    try:
        return load_library(machine_flags=machine_flags(machine))
    except KernelBuildError as error:
        pytest.skip(f"no C++ kernels here: {error}")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny: Callable[[str], Path]) -> Path:
    return tiny("tiny-qwen3")
