"""Triton kernels without a GPU: their numbers in the interpreter, and that they compile for one.

Both change triton for the whole process, so each runs in its own.
"""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoinfer.kernels import Kernels, select_kernels

TESTS = Path(__file__).parent
has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed")


def run(*command: str | Path) -> str:
    paths = [str(TESTS.parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@needs_triton
def test_kernels_equal_their_references_in_the_interpreter():
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", TESTS)
    assert " passed" in run("-m", "pytest", *options, TESTS / "triton_kernels.py", "-o", "addopts=")


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_and_spill_nothing(capability):
    """The script fails where a variant spills or needs too much shared memory."""
    script = TESTS.parent / "scripts/compile_kernels.py"
    output = run(script, "--capability", str(capability))
    names = {line.split()[0] for line in output.splitlines()[2:]}
    expected = {"_attend", "_join", "_store", "_norm_rope_store", "_convolve", "_apply_rule"}
    expected |= {"_grouped_product", "_draw", "_turn_back"}
    assert names == expected | ({"_quantize", "_multiply_blocks"} if capability == 90 else set())


@needs_triton
def test_a_gpu_gets_the_triton_kernels():
    table = select_kernels(torch.device("cuda"), "auto", use_compile=False)
    assert table.name == "triton"
    for op in ("paged_attention", "store_kv", "norm_rope_store", "gated_delta", "moe", "draw"):
        assert getattr(table, op) is not getattr(Kernels(), op)
    compiled = select_kernels(torch.device("cuda"), "auto", use_compile=True)
    assert compiled.norm_rope_store is table.norm_rope_store
    assert compiled.add_rms_norm is not table.add_rms_norm
    assert select_kernels(torch.device("cuda"), "ref", use_compile=False) == Kernels()


def test_a_gpu_without_triton_gets_the_references_and_one_warning(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("nanoinfer.kernels.triton_")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING):
        assert select_kernels(torch.device("cuda"), "auto", use_compile=False) == Kernels()
    (record,) = caplog.records
    assert "no triton kernels, running the PyTorch references" in record.message
