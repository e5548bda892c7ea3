"""What was measured before: one JSON line a run, and what has become slower since.

In: a file of lines and a new one. Out: the file with the line appended, and a sentence for each of
nanoinfer's shares and ratios that is more than 5% lower than in the last line of the same model,
work, dtype, cpu and number of threads that has it.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).parent.parent / "docs" / "benchmarks" / "history.jsonl"
_SAME = ("model", "work", "dtype", "cpu", "threads")
_TOLERANCE = 0.05


def record(path: Path, summary: dict[str, Any]) -> list[str]:
    """Append `summary`, and say what is slower than before."""
    lines = path.read_text().splitlines() if path.exists() else []
    slower = find_slower([json.loads(line) for line in lines], summary)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(summary) + "\n")
    return slower


def find_slower(earlier: list[dict[str, Any]], summary: dict[str, Any]) -> list[str]:
    """Compare with the last line that has the same key; other engines' shares are not ours."""
    alike = [line for line in earlier if all(line.get(k) == summary[k] for k in _SAME)]
    found = []
    for key, now in summary.items():
        is_ours = key.startswith(("share_nanoinfer", "ratio_")) and "ratio_nanoinfer" not in key
        before = next((line for line in reversed(alike) if key in line), None)
        if is_ours and before is not None and now < (1 - _TOLERANCE) * before[key]:
            found.append(f"slower than on {before['date']}: {key} {now:.3f}, was {before[key]:.3f}")
    return found


def commit() -> str | None:
    """The checkout's commit, marked where files differ from it; None outside of git."""
    command = ["git", "-C", str(Path(__file__).parent), "describe"]
    options = ["--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
