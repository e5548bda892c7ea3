"""The C++ kernels without Python: tests/selftest.cpp, on this machine and on an emulated Arm."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, STDOUT, run

import pytest
from conftest import MULTIPLYING, machine_flags

import nanoinfer.kernels
from nanoinfer.kernels.build import _FLAGS, KernelBuildError, _find_compiler

KERNELS = Path(nanoinfer.kernels.__file__).parent
SELFTEST = Path(__file__).with_name("selftest.cpp")
FLAGS = [flag for flag in _FLAGS if flag not in ("-shared", "-fPIC")]
NAMES = {
    *("rms_norm", "rms_norm_quantized", "rotary", "norm_rope_store", "silu_mul", "store_kv"),
    *("sigmoid_mul", "paged_attention", "draw", "linear_bf16", "linear_int8"),
    *("moe", "causal_conv", "gated_delta"),
}
ARM_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def output(command: list[str]) -> str:
    done = run(command, text=True, stdout=PIPE, stderr=STDOUT, timeout=300)
    assert done.returncode == 0, done.stdout
    return done.stdout


def check(compiler: list[str], machine: list[str], emulator: list[str], folder: Path) -> None:
    """Build it, a file per thread, the kernels for `machine` and the test for any; run it."""

    def compiled(source: Path) -> str:
        flags = machine if source.parent == KERNELS else []
        target = str(folder / f"{source.stem}.o")
        output([*compiler, *FLAGS, *flags, "-c", str(source), "-o", target])
        return target

    program = str(folder / "selftest")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        objects = [*pool.map(compiled, [SELFTEST, *sorted(KERNELS.glob("*.cpp"))])]
    output([*compiler, *FLAGS, *objects, "-o", program])
    lines = output([*emulator, program]).splitlines()
    assert {line.split()[0] for line in lines} == NAMES
    assert all(line.split()[1] == "ok" for line in lines)


def test_every_kernel_is_in_the_self_test():
    """What tells of the build is no kernel; test_kernel_build.py and test_linear.py compare it."""
    text = "".join(path.read_text() for path in KERNELS.glob("*.cpp"))
    assert {*re.findall(r'extern "C" \w+ nanoinfer_(\w+)\(', text)} == NAMES | {
        "omp_max_threads",
        "has_pairs",
    }


@pytest.mark.parametrize("machine", ["native", *MULTIPLYING])
def test_kernels_pass_on_this_machine(tmp_path, machine):
    try:
        compiler, flags = _find_compiler(), machine_flags(machine)
    except KernelBuildError as error:
        pytest.skip(f"no C++ kernels here: {error}")
    check([*compiler], [*flags], [], tmp_path)


@pytest.mark.skipif(not ARM_COMPILER, reason="needs aarch64-linux-gnu-g++")
@pytest.mark.skipif(not EMULATOR, reason="needs qemu-aarch64 (Debian: qemu-user)")
@pytest.mark.parametrize("machine", ["armv8-a", "armv8.4-a+bf16+sve"])  # the oldest; Graviton3
def test_kernels_pass_on_an_emulated_arm(tmp_path, machine):
    compiler, emulator = [str(ARM_COMPILER), "-static"], [str(EMULATOR), "-cpu", "max"]
    check(compiler, [f"-march={machine}"], emulator, tmp_path)
