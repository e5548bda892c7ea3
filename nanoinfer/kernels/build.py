"""Build the C++ kernels on first use and load them.

In: every `.cpp` beside this file. Out: one shared library with a plain C ABI, opened by ctypes: no
torch headers, so that a build takes seconds.

Invariant: a cached library is only ever opened by the machine that it was built for. Its name is a
hash of all that went into it: sources, compiler and version, flags and the CPU's features
(`-march=native` code from another machine ends in SIGILL). It is compiled under a temporary name
and renamed, so that no process ever sees half of one.

A production engine ships binaries for several CPUs and picks one at run time.
"""

import ctypes
import functools
import logging
import os
import platform
import shlex
import shutil
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT, run

import torch
import xxhash

logger = logging.getLogger("nanoinfer")

# Never -ffast-math: masks are -inf. What is left of it here keeps inf, NaN and the order of sums.
_FLAGS = (
    *("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_DIGEST_BYTES = 16


class KernelBuildError(RuntimeError):
    """The kernels cannot be built here; the message is one line that says why."""


def load_library(
    source_folder: Path = Path(__file__).parent, machine_flags: tuple[str, ...] | None = None
) -> ctypes.CDLL:
    """Open the library of all `*.cpp` in a folder; compile it when the cache has none.

    machine_flags: the compiler's flags for the CPU, this very one by default; an older one's code
    ("-march=x86-64-v3") runs here too.
    Compiler: $CXX, else c++, g++ or clang++. Cache: $XDG_CACHE_HOME/nanoinfer/kernels.
    Raises KernelBuildError where there is no compiler or it fails.
    """
    compiler = _find_compiler()
    sources = tuple(sorted(source_folder.glob("*.cpp")))
    version = _run([*compiler, "--version"])
    flags = (*_FLAGS, *(native_flags() if machine_flags is None else machine_flags))
    recipe = (*compiler, version, *flags, *sorted(cpu_features()))
    headers = sorted(source_folder.glob("*.h"))
    texts = (path.read_text() for path in (*sources, *headers))
    key = xxhash.xxh3_128_hexdigest("\0".join((*recipe, *texts)).encode())
    return _open_or_build(cache_home() / "kernels" / f"{key}.so", (*compiler, *flags), sources)


def cache_home() -> Path:
    """The folder of everything that nanoinfer keeps between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanoinfer"


def cpu_features() -> frozenset[str]:
    """Instruction sets by /proc/cpuinfo's names, such as "avx2" or "asimd"; elsewhere empty."""
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features")).split())


def has_slow_pairs() -> bool:
    """Whether AVX512-BF16 multiplies no faster than AVX-512 does in fp32.

    Its instruction makes twice the products of one in fp32. AMD's cores start as many of both in a
    cycle; Intel's, where AMX is meant for bf16, a quarter as many.
    """
    return "avx512_bf16" in cpu_features() and _cpuinfo("vendor_id") == "GenuineIntel"


def num_threads(library: ctypes.CDLL) -> int:
    """Threads that a kernel may use: torch's, or 1 where torch runs another OpenMP.

    Two OpenMP pools on the same cores spin against each other and stall for whole time slices.
    """
    return torch.get_num_threads() if _shares_torch_threads(library) else 1


def respect_cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> None:
    """Let torch use no more threads than a container's share of the CPUs (cgroup v2).

    Beyond it all threads are stopped together for the rest of each period, while those that wait at
    a barrier burn what is left. With OMP_NUM_THREADS set the user has chosen.
    """
    try:
        quota, period = path.read_text().split()
        limit = max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no Linux, no cgroup v2, or "max"
        return
    if limit < torch.get_num_threads() and os.environ.get("OMP_NUM_THREADS") is None:
        logger.info("threads: %d instead of %d, for the CPU quota", limit, torch.get_num_threads())
        torch.set_num_threads(limit)


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """Addresses for a call through ctypes; None for a tensor that is not there."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.cache
def _open_or_build(path: Path, command: tuple[str, ...], sources: tuple[Path, ...]) -> ctypes.CDLL:
    if (library := _open(path)) is not None:
        return library
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.mkdtemp(dir=path.parent)
    except OSError:  # the cache cannot be written: build for this process alone
        work = tempfile.mkdtemp()
        path = Path(work, path.name)
    try:
        built = Path(work, "building.so")
        _compile(command, sources, built)
        os.replace(built, path)
        library = _open(path)
    finally:
        shutil.rmtree(work)  # an opened library stays mapped
    if library is None:
        raise KernelBuildError(f"{command[0]}: built a library that does not load")
    return library


def _open(path: Path) -> ctypes.CDLL | None:
    """Open a finished library, or return None where it is missing or damaged."""
    try:
        data = path.read_bytes()
        # Without this check a truncated file is mapped, then kills the process with SIGBUS.
        if xxhash.xxh3_128_digest(data[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
            return None
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _compile(command: tuple[str, ...], sources: tuple[Path, ...], built: Path) -> None:
    logger.info("compiling %d C++ kernels, once", len(sources))
    _run([*command, *map(str, sources), "-o", str(built)])
    with built.open("r+b") as file:
        digest = xxhash.xxh3_128_digest(file.read())
        file.write(digest)  # ELF ignores what follows its last section


def _cpuinfo(key: str) -> str:
    """What Linux says of the first CPU; "" where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == key), "")


def _find_compiler() -> tuple[str, ...]:
    if command := os.environ.get("CXX"):
        return tuple(shlex.split(command))
    names = ("c++", "g++", "clang++")
    if (found := next(filter(None, map(shutil.which, names)), None)) is None:
        raise KernelBuildError(f"no C++ compiler: none of {', '.join(names)} on PATH, no CXX set")
    return (found,)


def native_flags() -> tuple[str, ...]:
    """The compiler's flags for this CPU."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    return ("-march=native", *(("-DHAS_SLOW_PAIRS",) if has_slow_pairs() else ()))


def _run(command: list[str]) -> str:
    try:
        done = run(command, text=True, errors="replace", stdout=PIPE, stderr=STDOUT)
    except OSError as error:
        raise KernelBuildError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
        # The last line is often a caret under the source: the first "error" says more.
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise KernelBuildError(f"{command[0]}: {reason.strip()}")
    return done.stdout


@functools.cache
def _shares_torch_threads(library: ctypes.CDLL) -> bool:
    """Set torch's number of threads to another value and see whether our OpenMP follows."""
    before = torch.get_num_threads()
    try:
        for count in (max(1, before - 1), before):
            torch.set_num_threads(count)
            if library.nanoinfer_omp_max_threads() != count:
                return False
    finally:
        torch.set_num_threads(before)
    return True
