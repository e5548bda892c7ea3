"""How long a user waits for the first token, and how much memory a loaded engine holds.

In: how often; a shape for the memory. Out: seconds from the start of a new process of
`python example.py --prompt ...` to the first character of its answer, all imports and loading
included; and, in another new process, the anonymous memory (not backed by a file, so neither code
nor a mapped checkpoint) after loading, against the weights' own bytes. Linux only.

What must be there already (the demo model, compiled kernels) is made by a run that is not counted;
--cold counts that one alone, with an empty cache of kernels.

    python benchmarks/startup.py
    python benchmarks/startup.py --cold
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shapes import SHAPES, make_checkpoint

from nanoinfer.demo import demo_model
from nanoinfer.kernels.build import cache_home

ROOT = Path(__file__).parent.parent
PROMPT = "Once upon a time"
_MEMORY = """
import sys
from pathlib import Path
from nanoinfer import LLM
llm = LLM(sys.argv[1], skip_tokenizer_init=True, kv_cache_memory=int(sys.argv[2]))
rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
print(next(line.split()[1] for line in rollup if line.startswith("Anonymous:")))
"""


def seconds_to_first_token(environment: dict[str, str]) -> float:
    """Until the first character behind the prompt is there."""
    command = [sys.executable, str(ROOT / "example.py"), "--prompt", PROMPT]
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None, "opened with a pipe"
        shown = ""
        while not shown.partition(PROMPT)[2]:
            character = process.stdout.read(1)
            if not character:
                raise RuntimeError("example.py ended without an answer; run it to see why")
            shown += character
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def seconds_cold() -> float:
    """The same with nothing compiled; the demo model is converted, but not downloaded, anew."""
    with tempfile.TemporaryDirectory() as cache:
        source, target = cache_home() / "demo", Path(cache, "nanoinfer", "demo")
        target.mkdir(parents=True)
        for file in source.glob("*.gguf"):
            shutil.copy(file, target)
        return seconds_to_first_token(os.environ | {"XDG_CACHE_HOME": cache})


def anonymous_bytes(folder: Path, kv_cache_memory: int) -> int:
    command = [sys.executable, "-c", _MEMORY, str(folder), str(kv_cache_memory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return int(done.stdout) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description="Start-up time and memory of a loaded engine.")
    parser.add_argument("--runs", type=int, default=5, help="new processes")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="for the memory")
    parser.add_argument("--cold", action="store_true", help="the first run after an installation")
    args = parser.parse_args()
    demo_model()
    if args.cold:
        seconds = seconds_cold()
        print(f"first token after {seconds:.1f} s, kernels built and the model converted")
        print(json.dumps({"cold_seconds_to_first_token": round(seconds, 2)}))
        return
    seconds_to_first_token(dict(os.environ))
    waits = [seconds_to_first_token(dict(os.environ)) for _ in range(args.runs)]
    folder, cache = make_checkpoint(args.shape), 1 << 28
    weights = (folder / "model.safetensors").stat().st_size
    anonymous = anonymous_bytes(folder, cache)
    share = anonymous / (weights + cache)
    print(f"first token after {statistics.median(waits):.2f} s, median of {args.runs} processes")
    print(
        f"{args.shape}: {anonymous / 1e6:,.0f} MB anonymous after loading, {share:.2f} of weights"
    )
    print(f"({weights / 1e6:,.0f} MB) and KV cache ({cache / 1e6:,.0f} MB)")
    result = {"seconds_to_first_token": [round(wait, 2) for wait in waits]}
    print(json.dumps({**result, "anonymous_bytes": anonymous, "share": round(share, 3)}))


if __name__ == "__main__":
    main()
