"""Break the code one line at a time and see that the tests notice.

In: `MUTATIONS`, a table of (file, a line as it is, the line as it would be wrong, the test that
must go red). Out: a line for each row and "N of N caught"; exit status 1 if any survived.

Each row runs on a copy of the package, in a process of its own; the checkout is never touched.
A row whose line no longer stands in the file exactly once is an error: the table is kept in step.

    python scripts/mutate.py             # all rows, a few minutes
    python scripts/mutate.py scheduler   # rows whose file or test contains the word
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
NUM_WORKERS = 2
TIMEOUT = 120  # seconds; a mutant that hangs is caught too


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    test: str


MUTATIONS: list[Mutation] = []


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [m for m in MUTATIONS if word in m.file or word in m.test]
    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        results = list(pool.map(run, chosen))
    print(f"{sum(results)} of {len(chosen)} caught")
    return 0 if all(results) else 1


def run(mutation: Mutation) -> bool:
    """True if the test fails on the broken copy."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("nanoinfer", "tests", "docs", "benchmarks"):
            shutil.copytree(ROOT / name, tree / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, tree)
        path = tree / "nanoinfer" / mutation.file
        text = path.read_text()
        count = text.count(mutation.old)
        if count != 1:
            raise ValueError(f"{mutation.file}: {mutation.old!r} is there {count} times, need 1")
        path.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*command, mutation.test],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
            is_caught = done.returncode == 1  # 1: tests ran and failed; others: nothing ran
        except subprocess.TimeoutExpired:
            is_caught = True
    verdict = "caught  " if is_caught else "SURVIVED"
    print(f"{verdict} {mutation.file}: {mutation.new.strip()!r:.60} ({mutation.test})", flush=True)
    return is_caught


if __name__ == "__main__":
    sys.exit(main())
