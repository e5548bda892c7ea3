"""Fixtures of all tests, and the environment that the default run needs: no network.

Tests marked `network` are run with HF_HUB_OFFLINE=0 in the environment, which wins over the default
below.
"""

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


@pytest.fixture(scope="session")
def tiny_qwen3(tiny: Callable[[str], Path]) -> Path:
    return tiny("tiny-qwen3")
