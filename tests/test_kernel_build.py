"""The build of the C++ kernels: compiled once, cached by content, refused in one line."""

import ctypes
import os
import stat
import sys

import pytest
import torch
from conftest import MULTIPLYING, kernel_library

from nanoinfer.kernels import build

SOURCE = 'extern "C" int nanoinfer_answer() { return %d; }\n'


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with one source, an empty cache and a compiler that counts its calls."""
    try:
        (real,) = build._find_compiler()
    except (build.KernelBuildError, ValueError):
        pytest.skip("no C++ compiler on PATH")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.cpp").write_text(SOURCE % 1)
    write_compiler(tmp_path, f'exec {real} "$@"')
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write_compiler(home, command):
    script = home / "compiler"
    script.write_text(
        '#!/bin/sh\ncase "$*" in *--version) echo fake 1.0; exit 0;; esac\n'
        f"echo call >> {home}/calls\n{command}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


def count_builds(home):
    calls = home / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


def load(home):
    """Load as a new process would."""
    build._open_or_build.cache_clear()
    return build.load_library(home / "src")


def cached_files(home):
    return sorted((home / "cache" / "nanoinfer" / "kernels").iterdir())


def test_second_load_compiles_nothing(home):
    assert load(home).nanoinfer_answer() == 1
    assert load(home).nanoinfer_answer() == 1
    assert count_builds(home) == 1
    assert [path.suffix for path in cached_files(home)] == [".so"]  # nothing else is left over


def test_one_process_opens_one_library(home):
    assert build.load_library(home / "src") is build.load_library(home / "src")


def test_all_sources_go_into_one_call(home):
    (home / "src" / "two.cpp").write_text('extern "C" int nanoinfer_two() { return 2; }\n')
    library = load(home)
    assert (library.nanoinfer_answer(), library.nanoinfer_two()) == (1, 2)
    assert count_builds(home) == 1


@pytest.mark.parametrize("change", ["source", "header", "compiler", "features"])
def test_key_follows_what_goes_into_a_build(home, monkeypatch, change):
    load(home)
    if change == "source":
        (home / "src" / "one.cpp").write_text(SOURCE % 3)
    elif change == "header":
        (home / "src" / "one.h").write_text("// new\n")
    elif change == "compiler":
        script = home / "compiler"
        script.write_text(script.read_text().replace("fake 1.0", "fake 1.1"))
    else:
        monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"another"}))
    assert load(home).nanoinfer_answer() == (3 if change == "source" else 1)
    assert count_builds(home) == len(cached_files(home)) == 2


@pytest.mark.parametrize("damage", ["garbage", "empty", "truncated"])
def test_damaged_library_is_rebuilt(home, damage):
    assert load(home).nanoinfer_answer() == 1
    (path,) = cached_files(home)
    data = path.read_bytes()
    path.unlink()  # this process has mapped that file: damage another of the same name
    damaged = {"garbage": b"not a library" * 99, "empty": b"", "truncated": data[: len(data) // 2]}
    path.write_bytes(damaged[damage])
    assert load(home).nanoinfer_answer() == 1
    assert path.read_bytes()[:4] == data[:4]
    assert load(home).nanoinfer_answer() == 1
    assert count_builds(home) == 2


def test_cache_that_cannot_be_written(home):
    (home / "cache").write_text("a file where the folder should be")
    assert load(home).nanoinfer_answer() == 1
    assert count_builds(home) == 1


def test_source_that_does_not_compile(home):
    (home / "src" / "one.cpp").write_text("this is not C++\n")
    with pytest.raises(build.KernelBuildError, match=r"compiler: .*one\.cpp:1.*error") as caught:
        load(home)
    assert "\n" not in str(caught.value)
    assert cached_files(home) == []


def test_broken_compiler(home, monkeypatch):
    write_compiler(home, "echo warming up; echo out of patience; exit 1")
    with pytest.raises(build.KernelBuildError, match=r"^\S*compiler: out of patience$"):
        load(home)
    write_compiler(home, "exit 3")
    with pytest.raises(build.KernelBuildError, match=r"^\S*compiler: exit status 3$"):
        load(home)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    with pytest.raises(build.KernelBuildError, match=r"^/nonexistent/c\+\+: No such file"):
        load(home)


def test_compiler_that_writes_nonsense(home):
    write_compiler(home, 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"')
    with pytest.raises(build.KernelBuildError, match="does not load"):
        load(home)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.KernelBuildError, match=r"no C\+\+ compiler: none of c\+\+, g\+\+"):
        build.load_library()


def test_compiler_command_with_arguments(home, monkeypatch):
    monkeypatch.setenv("CXX", f"{os.environ['CXX']} -DEXTRA=7")
    write_compiler(home, 'echo "got $1"; exit 1')
    with pytest.raises(build.KernelBuildError, match="compiler: got -DEXTRA=7"):
        load(home)


def test_code_is_for_this_cpu_or_the_one_that_was_named(home):
    source = home / "src" / "one.cpp"
    source.write_text("#ifndef CPU\n#define CPU 1\n#endif\n" + SOURCE.replace("%d", "CPU"))
    assert load(home).nanoinfer_answer() == 1
    assert build.load_library(home / "src", machine_flags=("-DCPU=7",)).nanoinfer_answer() == 7
    assert load(home).nanoinfer_answer() == 1
    assert count_builds(home) == len(cached_files(home)) == 2
    source.write_text(SOURCE % 2)  # to be built anew
    write_compiler(home, 'echo "got $*"; exit 1')
    with pytest.raises(build.KernelBuildError, match=r"got .* -m(arch|cpu)=native "):
        load(home)
    with pytest.raises(build.KernelBuildError, match=r"got ((?!native).)*$"):
        build.load_library(home / "src", machine_flags=("-DCPU=7",))


@pytest.mark.parametrize(
    ("vendor", "features", "are_slow"),
    [
        ("GenuineIntel", "avx2 avx512f avx512_bf16", True),
        ("GenuineIntel", "avx2 avx512f", False),  # none at all
        ("AuthenticAMD", "avx2 avx512f avx512_bf16", False),
        ("AnotherVendor", "avx2 avx512f avx512_bf16", False),
        ("", "", False),
    ],
)
def test_pairs_are_avoided_where_they_are_slow(monkeypatch, vendor, features, are_slow):
    cpuinfo = {"vendor_id": vendor, "flags": features}
    monkeypatch.setattr(build, "_cpuinfo", lambda key: cpuinfo.get(key, ""))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert build.has_slow_pairs() == are_slow
    assert build.native_flags() == ("-march=native", "-DHAS_SLOW_PAIRS")[: 1 + are_slow]


@pytest.mark.parametrize("machine", ["native", *MULTIPLYING])
def test_a_library_tells_whether_it_multiplies_pairs(machine):
    library = kernel_library(machine)
    is_native = "avx512_bf16" in build.cpu_features() and not build.has_slow_pairs()
    assert library.nanoinfer_has_pairs() == (
        is_native if machine == "native" else machine == "pairs"
    )


def test_cpu_features_are_names():
    features = build.cpu_features()
    assert all(name and not name.isspace() for name in features)
    if sys.platform == "linux" and os.uname().machine == "x86_64":
        assert "sse2" in features
    elif sys.platform == "linux" and os.uname().machine == "aarch64":
        assert "asimd" in features


def test_threads_follow_torch_or_are_one():
    try:
        library = build.load_library()
    except build.KernelBuildError as error:
        pytest.skip(f"no C++ kernels here: {error}")
    before = torch.get_num_threads()
    assert build.num_threads(library) in (1, before)
    assert torch.get_num_threads() == before


def test_threads_of_a_library_with_another_runtime(home):
    source = 'extern "C" int nanoinfer_omp_max_threads() { return %d; }\n'
    before = torch.get_num_threads()
    (home / "src" / "one.cpp").write_text(source % before)
    library = load(home)
    assert isinstance(library, ctypes.CDLL)
    assert build.num_threads(library) == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [("150000 100000", 1), ("50000 100000", 1), ("max 100000", 3), ("400000 100000", 3)],
)
def test_threads_keep_within_a_containers_quota(tmp_path, monkeypatch, text, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, path = torch.get_num_threads(), tmp_path / "cpu.max"
    path.write_text(text + "\n")
    try:
        torch.set_num_threads(3)
        build.respect_cpu_quota(path)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_a_users_number_of_threads_goes_before_the_quota(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before, path = torch.get_num_threads(), tmp_path / "cpu.max"
    path.write_text("100000 100000")
    try:
        torch.set_num_threads(2)
        build.respect_cpu_quota(path)
        build.respect_cpu_quota(tmp_path / "missing")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
