"""Engines in processes of their own, and rounds that alternate between them.

In: names from `ENGINES`, interpreters, a task. Out: seconds by engine and round. A line of JSON
goes to an engine's process and one comes back (engines.py); while one engine works, the others
sleep. An engine that did other work than was asked, or with other threads, is an error.
"""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engines import Settings
from works import Task

_PAUSE = 0.2  # seconds: threads of the engine that has just worked fall asleep


class Variant(NamedTuple):
    """An engine of engines.py, and how it is set."""

    engine: str
    quantization: str | None = None
    caches_prefixes: bool = True  # where the work has any


ENGINES = {
    "nanoinfer": Variant("nanoinfer"),
    "nanoinfer_int8": Variant("nanoinfer", "int8"),
    "nanoinfer_no_cache": Variant("nanoinfer", caches_prefixes=False),
    "vllm": Variant("vllm"),
    "llama_cpp": Variant("llama_cpp"),
    "llama_cpp_q8_0": Variant("llama_cpp", "q8_0"),
    "transformers": Variant("transformers"),
}


class Round(NamedTuple):
    seconds: float  # for the tokens that count
    whole: float  # for all that was asked


class Engine:
    """The parent's end of an engine's process."""

    def __init__(self, name: str, python: str, settings: Settings) -> None:
        self.name = name
        script = str(Path(__file__).with_name("engines.py"))
        self._command = [python, script, json.dumps(settings._asdict())]
        self._num_threads = settings.num_threads

    def __enter__(self) -> "Engine":
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(self._num_threads)},
        )
        about = self._read()
        self.versions: dict[str, str] = about["versions"]
        got, need = about["num_threads"], self._num_threads
        if got != need:
            raise RuntimeError(f"{self.name}: got {got} threads, need {need}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def run(self, task: Task, vocab_size: int, seed: int) -> Round:
        """One round. RuntimeError where the engine failed or did other work."""
        output_lens, whole, first = task.work.output_lens, 0.0, 0.0
        texts: list[list[int]] = [[] for _ in output_lens]
        for new_ids in task.draw(vocab_size, seed):
            prompts = [text + ids for text, ids in zip(texts, new_ids, strict=True)]
            if task.counted == "decode":
                first += self._ask(prompts, [1] * len(prompts))[0]
            seconds, outputs = self._ask(prompts, output_lens)
            texts = [prompt + ids for prompt, ids in zip(prompts, outputs, strict=True)]
            whole += seconds
        return Round(whole - first, whole)

    def _ask(
        self, prompts: list[list[int]], output_lens: list[int]
    ) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None, "opened with a pipe"
        with contextlib.suppress(BrokenPipeError):  # then there is no reply either
            request = {"prompts": prompts, "output_lens": output_lens}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        reply = self._read()
        num_tokens = [len(ids) for ids in reply["outputs"]]
        if num_tokens != output_lens:
            raise RuntimeError(f"{self.name}: got {num_tokens} new tokens, need {output_lens}")
        time.sleep(_PAUSE)
        return reply["seconds"], reply["outputs"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened with a pipe"
        reply = self._process.stdout.readline()
        if not reply:
            raise RuntimeError(f"{self.name}: its process ended; its last words are above")
        return json.loads(reply)


def make_engines(
    names: list[str], pythons: dict[str, str], folder: Path, dtype: str, tasks: list[Task]
) -> list[Engine]:
    """The engines for a model and tasks; a process starts where its engine is entered."""
    has_prefixes = any(task.has_prefixes for task in tasks)
    is_prefill = all(task.counted == "prompt" for task in tasks)
    engines = []
    for name in names:
        variant, model = ENGINES[name], folder
        if variant.engine == "llama_cpp":
            from write_gguf import write_gguf

            model = write_gguf(folder, variant.quantization or dtype)
        settings = Settings(
            engine=variant.engine,
            model=str(model),
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            enable_prefix_caching=has_prefixes and variant.caches_prefixes,
            quantization=variant.quantization,
            is_prefill=is_prefill,
        )
        engines.append(Engine(name, pythons[variant.engine], settings))
    return engines


def run_rounds(
    engines: list[Engine], task: Task, vocab_size: int, num_rounds: int
) -> dict[str, list[Round]]:
    """All engines' counted rounds, by name."""
    for engine in engines:
        engine.run(task, vocab_size, seed=0)
    rounds: dict[str, list[Round]] = {engine.name: [] for engine in engines}
    for i in range(1, num_rounds + 1):
        for engine in engines if i % 2 else reversed(engines):
            rounds[engine.name].append(engine.run(task, vocab_size, seed=i))
        latest = ", ".join(f"{name} {done[-1].whole:.2f} s" for name, done in rounds.items())
        print(f"{task}: round {i} of {num_rounds}: {latest}", flush=True)
    return rounds
