"""benchmarks/compare.py: every engine is asked for the same, and what it says is what was measured.

vLLM and llama.cpp are not needed: what would be sent to them is looked at before it is sent.
"""

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_gguf import NAMES

from nanoinfer.gguf import _unpermute
from nanoinfer.model_config import ModelConfig

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import compare  # noqa: E402
import engines  # noqa: E402
import history  # noqa: E402
import rounds  # noqa: E402
from limits import Limits, Work, floor_seconds  # noqa: E402
from works import BATCHES, WORKS, Task  # noqa: E402
from write_gguf import write_gguf  # noqa: E402

FAST = Limits(read=1e15, bf16=1e18, fp32=1e18, num_threads=1)  # no round is faster than this


def test_lengths_and_totals():
    sizes = {
        name: (len(w.work.input_lens), sum(w.work.input_lens), w.num_tokens)
        for name, w in WORKS.items()
    }
    mixed_in, mixed_out = sizes.pop("mixed")[1:]
    assert sizes == {
        "latency": (1, 256, 63),  # all tokens but the first
        "prefill": (1, 512, 512),
        "offline": (16, 4096, 2048),
        "long": (16, 16384, 1024),
        "prefix": (32, 33600, 1024),
        "chat": (4, 256, 512),  # one turn's prompts, four turns' answers
    }
    lengths = WORKS["mixed"].work
    assert len(lengths.input_lens) == len(lengths.output_lens) == 64
    assert (min(lengths.input_lens), max(lengths.input_lens)) >= (64, 200)
    assert max(lengths.input_lens) <= 256
    assert 32 <= min(lengths.output_lens) < max(lengths.output_lens) <= 128
    assert (mixed_in, mixed_out) == (sum(lengths.input_lens), sum(lengths.output_lens))
    assert {name for name, task in WORKS.items() if task.has_prefixes} == {"prefix", "chat"}
    assert [len(task.work.input_lens) for task in BATCHES.values()] == list(BATCHES)
    longest = max(t.num_turns * (max(t.work.input_lens) + 128) for t in WORKS.values())
    assert longest <= engines.MAX_MODEL_LEN


def test_ids_depend_on_the_seed_alone():
    for task in WORKS.values():
        first, again, other = task.draw(500, 1), task.draw(500, 1), task.draw(500, 2)
        assert first == again != other
        assert len(first) == task.num_turns
        for prompts in first:
            assert [len(ids) for ids in prompts] == task.work.input_lens
            assert all(0 <= token_id < 500 for ids in prompts for token_id in ids)
            assert len({tuple(ids) for ids in prompts}) == len(prompts)  # no two are equal
    shared = {tuple(ids[:1000]) for ids in WORKS["prefix"].draw(500, 1)[0]}
    assert len(shared) == 1


class Recorder(rounds.Engine):
    """Answers at once, keeps what it was asked; each request takes as long as it has tokens."""

    def __init__(self, answer: int) -> None:
        self.name, self.asked, self._answer = f"answers {answer}", [], answer

    def _ask(self, prompts: list[list[int]], output_lens: list[int]) -> Any:
        self.asked.append((prompts, output_lens))
        num_tokens = sum(map(len, prompts)) + sum(output_lens)
        return float(num_tokens), [[self._answer] * n for n in output_lens]


@pytest.mark.parametrize("name", WORKS)
def test_all_engines_get_the_same(name: str):
    recorders = [Recorder(-1), Recorder(-2)]
    found = rounds.run_rounds(recorders, WORKS[name], vocab_size=500, num_rounds=2)
    assert [len(done) for done in found.values()] == [2, 2]
    first, second = ([[abs(i) for p in a[0] for i in p if i >= 0] for a in r.asked]
                     for r in recorders)  # fmt: skip
    assert first == second  # but for the answers
    assert [a[1] for a in recorders[0].asked] == [a[1] for a in recorders[1].asked]


def test_a_turn_continues_the_one_before():
    task = Task(Work([3, 2], [2, 1]), num_turns=2)
    engine = Recorder(-1)
    engine.run(task, vocab_size=9, seed=1)
    (a, b), (c, d) = task.draw(9, 1)
    expected = [[a, b], [[*a, -1, -1, *c], [*b, -1, *d]]]
    assert [prompts for prompts, _ in engine.asked] == expected


def test_decode_is_the_whole_less_the_first_token():
    engine = Recorder(-1)
    assert engine.run(WORKS["latency"], vocab_size=9, seed=1) == (63, 256 + 64)
    assert [lens for _, lens in engine.asked] == [[1], [64]]
    assert engine.run(WORKS["offline"], vocab_size=9, seed=1) == (6144, 6144)


def test_limits_of_what_counts(tiny_qwen3: Path):
    model = ModelConfig.from_hf(tiny_qwen3)

    def floor(output_len: int, overlap: bool = False) -> float:
        work = Work.equal(1, 256, output_len)
        return floor_seconds(model, work, FAST, torch.bfloat16, overlap=overlap)

    found = compare.find_limits(WORKS["latency"], model, FAST, torch.bfloat16)
    assert found == (floor(64) - floor(1), floor(64, overlap=True))
    assert compare.find_limits(WORKS["chat"], model, FAST, torch.bfloat16) == (None, None)


def test_ratios_and_shares():
    names = ("nanoinfer", "nanoinfer_int8", "vllm", "llama_cpp_q8_0")
    seconds = ([2.0, 4.0, 5.0], [1.0, 2.0, 2.0], [4.0, 4.0, 15.0], [3.0, 8.0, 6.0])
    table = zip(names, seconds, strict=True)
    found = {name: [rounds.Round(t, t) for t in times] for name, times in table}
    task = Task(Work([5], [10]))
    results = {name: compare.judge(name, task, found, 2.0, 1.0) for name in names}
    assert [results[name].ratio for name in names] == [None, 0.5, 2.0, 3.0]  # the last to int8
    assert results["vllm"].rates == [2.5, 2.5, 10 / 15]
    assert [results[name].share for name in names] == [0.5, None, 0.5, None]
    assert results["nanoinfer"].share_of_roofline == 0.25
    with pytest.raises(ValueError, match="limits"):
        compare.judge("vllm", task, found, 2.0, 4.5)
    assert compare.judge("nanoinfer_int8", task, found, 2.0, 4.5).share is None  # not bounded


def settings_for(work: str, folder: Path) -> dict[str, engines.Settings]:
    """What each engine's process would be told."""
    pythons = dict.fromkeys(engines.LOADERS, "python")
    made = rounds.make_engines(list(rounds.ENGINES), pythons, folder, "bfloat16", [WORKS[work]])
    return {e.name: engines.Settings(**json.loads(e._command[2])) for e in made}


def test_settings(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for work in WORKS:
        found = settings_for(work, tiny_qwen3)
        cached = {name for name, settings in found.items() if settings.enable_prefix_caching}
        assert "nanoinfer_no_cache" not in cached
        assert ({"nanoinfer", "nanoinfer_int8", "vllm"} <= cached) is (work in ("prefix", "chat"))
        assert cached == set() or work in ("prefix", "chat")
        assert {settings.is_prefill for settings in found.values()} == {work == "prefill"}
    quantized = {name: s.quantization for name, s in found.items() if s.quantization}
    assert quantized == {"nanoinfer_int8": "int8", "llama_cpp_q8_0": "q8_0"}
    assert "bfloat16" in Path(found["llama_cpp"].model).name
    assert "q8_0" in Path(found["llama_cpp_q8_0"].model).name
    assert found["vllm"].model == found["nanoinfer_int8"].model == str(tiny_qwen3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engines", "vllm"], "need --vllm-python"),
        (["--engines", "llama_cpp_q8_0", "--work", "latency"], "need --llama-cpp-python"),
        (["--engines", "llama_cpp", "--llama-cpp-python", "p"], "one sequence at a time"),
        (["--plot", "a.png", "--work", "latency", "--engines", "llama_cpp",
          "--llama-cpp-python", "p"], "one sequence at a time"),
        (["--engines", "nanoinfer_no_cache"], "the cache is off anyway"),
        (["--engines", "tgi"], "invalid choice"),
        (["--work", "chess"], "invalid choice"),
        (["--rounds", "0"], "--rounds: got 0, need at least 1"),
        (["--shape", "qwen3-tiny", "--model", "m"], "not allowed with"),
    ],
)  # fmt: skip
def test_errors_of_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        compare.parse_args(arguments)
    assert message in capsys.readouterr().err


def test_a_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        compare.parse_args(["--plot", "a.png"])
    assert "needs matplotlib; try pip install 'nanoinfer[bench]'" in capsys.readouterr().err


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(compare, "measure", lambda: FAST)
    monkeypatch.setattr(compare, "BATCHES", {n: Task(Work.equal(n, 5, 3)) for n in (1, 2)})
    path = tmp_path / "new" / "plot.png"
    options = ["--shape", "qwen3-tiny", "--rounds", "1", "--engines", "nanoinfer"]
    compare.main([*options, "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["batch_sizes"] == [1, 2]
    assert len(line["tokens_per_second"]["nanoinfer"]) == len(line["limit"]) == 2


def test_default_engines():
    peers = ["--vllm-python", "v", "--llama-cpp-python", "l"]
    alone = ["nanoinfer", "transformers"]
    assert compare.parse_args([]).engines == alone
    assert compare.parse_args(peers).engines == ["nanoinfer", "vllm", "transformers"]
    found = compare.parse_args([*peers, "--work", "prefill"])
    assert found.engines == ["nanoinfer", "vllm", "llama_cpp", "transformers"]
    assert (found.pythons["vllm"], found.pythons["llama_cpp"]) == ("v", "l")
    assert found.history == history.DEFAULT
    assert compare.parse_args(["--no-history"]).history is None


LINE = {"date": "2026-11-01", "model": "m", "work": "w", "dtype": "d", "cpu": "c", "threads": 2}


def test_slower_than_the_last_line_that_is_alike(tmp_path: Path):
    path = tmp_path / "new" / "history.jsonl"
    before = {"share_nanoinfer": 0.5, "ratio_vllm": 1.2, "share_vllm": 0.4}
    assert history.record(path, LINE | before) == []
    for other in ({"model": "n"}, {"work": "x"}, {"dtype": "e"}, {"cpu": "k"}, {"threads": 4}):
        assert history.record(path, LINE | other | {"share_nanoinfer": 0.9}) == []
    ours = LINE | {"date": "2026-11-03"}
    # A little slower, a peer slower, int8 faster: nothing to say.
    fine = {"share_nanoinfer": 0.48, "share_vllm": 0.1, "ratio_nanoinfer_int8": 0.5}
    assert history.record(path, ours | fine) == []
    assert history.record(path, ours | {"ratio_nanoinfer_int8": 0.2}) == []
    found = history.record(path, ours | {"share_nanoinfer": 0.45, "ratio_vllm": 1.1})
    assert found == [
        "slower than on 2026-11-03: share_nanoinfer 0.450, was 0.480",
        "slower than on 2026-11-01: ratio_vllm 1.100, was 1.200",
    ]
    assert len(path.read_text().splitlines()) == 9


def test_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compare, "measure", lambda: FAST)
    mixed = Task(Work([5, 9], [3, 4]))
    monkeypatch.setitem(compare.WORKS, "mixed", mixed)
    path, out = tmp_path / "history.jsonl", tmp_path / "out.md"
    options = ["--history", str(path), "--out", str(out)]
    compare.main(["--shape", "qwen3-tiny", "--work", "mixed", "--rounds", "1", *options])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(path.read_text()) == line
    assert (line["model"], line["work"], line["rounds"]) == ("qwen3-tiny", "mixed", 1)
    ours, theirs = (line[f"tokens_per_second_{e}"] for e in ("nanoinfer", "transformers"))
    assert line["ratio_transformers"] == pytest.approx(ours / theirs, rel=0.01)
    assert 0 < line["share_of_roofline_nanoinfer"] + 1e-9 < line["share_nanoinfer"] + 2e-9
    assert line["versions"]["transformers"].keys() == {"python", "transformers", "torch"}
    assert {"date", "commit", "cpu", "threads", "limits"} <= line.keys()
    text = out.read_text()
    assert "2 x (5..9 in, 3..4 out)" in text
    assert text.count("| nanoinfer |") == 1


def test_an_engine_that_ends_is_named(tmp_path: Path):
    settings = engines.Settings("nanoinfer", str(tmp_path), "bfloat16", 1, False, None, False)
    with pytest.raises(RuntimeError, match="mine: its process ended"):
        rounds.Engine("mine", sys.executable, settings).__enter__()


def test_peers_need_only_the_standard_library():
    tree = ast.parse((BENCHMARKS / "engines.py").read_text())
    modules = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    assert modules <= sys.stdlib_module_names


def gguf_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-tied", "tiny-llama"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "q8_0"])
def test_gguf_holds_the_folder(name: str, kind: str, tiny: Callable[[str], Path], tmp_path: Path):
    folder = tiny(name)
    tensors = gguf.GGUFReader(write_gguf(folder, kind, tmp_path)).tensors
    found = {tensor.name: tensor for tensor in tensors}
    for hf_name, weight in load_file(folder / "model.safetensors").items():
        tensor = found.pop(gguf_name(hf_name))
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if name == "tiny-llama" and ("attn_q." in tensor.name or "attn_k." in tensor.name):
            values = _unpermute(values, head_dim=32)
        if kind == "q8_0" and weight.ndim == 2:
            # Rounded to half a step; and the step to fp16, which 127 steps show as 127 / 2**11.
            step = weight.view(-1, 32).abs().amax(1, keepdim=True) / 127
            assert ((values - weight).view(-1, 32).abs() <= 0.57 * step).all(), hf_name
        else:
            is_short = kind == "bfloat16" and weight.ndim == 2
            assert torch.equal(values, weight.bfloat16().float() if is_short else weight), hf_name
    assert found == {}


def test_gguf_holds_the_facts(tiny_qwen3: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_qwen3, tmp_path / "copy"))
    path = write_gguf(folder, "bfloat16", tmp_path)
    fields = gguf.GGUFReader(path).fields
    facts = {key.removeprefix("qwen3."): field.contents() for key, field in fields.items()}
    model = ModelConfig.from_hf(folder)
    expected = {
        "general.architecture": "qwen3",
        "tokenizer.ggml.model": "no_vocab",
        "vocab_size": model.vocab_size,
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": np.float32(model.rms_norm_eps),
    }
    assert {key: facts.get(key) for key in expected} == expected
    written = path.stat().st_mtime_ns
    assert write_gguf(folder, "bfloat16", tmp_path).stat().st_mtime_ns == written  # kept
    (folder / "config.json").touch()
    assert write_gguf(folder, "bfloat16", tmp_path) != path  # what may have changed is written


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-llama-llama3rope"])
def test_gguf_of_others_is_refused(name: str, tiny: Callable[[str], Path], tmp_path: Path):
    with pytest.raises(ValueError, match="with default rope"):
        write_gguf(tiny(name), "bfloat16", tmp_path)
