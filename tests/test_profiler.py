"""benchmarks/profiler.py and recorder.py: what is counted is right, and what is timed adds up."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # as when they are run

import profiler
from limits import Limits
from recorder import (
    REST,
    STEP,
    Recorder,
    Span,
    attention_cost,
    recording,
    split_step,
    wrapping_seconds,
)
from shapes import SHAPES, make_checkpoint

import nanoinfer.llm
from nanoinfer import LLM, SamplingParams

SHAPE = SHAPES["qwen3-tiny"]
E, FFN, V, D = (SHAPE[n] for n in ("hidden_size", "intermediate_size", "vocab_size", "head_dim"))
H, KV = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
LAYERS = SHAPE["num_hidden_layers"]
NO_TOKENIZER = {"skip_tokenizer_init": True}
LIMITS = Limits(read=1e9, bf16=1e12, fp32=1e12, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3-tiny", tmp_path_factory.mktemp("shape"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="bfloat16", skip_tokenizer_init=True, num_kv_blocks=64)


def decode(llm: LLM, num_seqs: int = 3, context: int = 20, steps: int = 4) -> tuple:
    recorder = Recorder()
    try:
        with recording(llm.engine, recorder):
            found = profiler.decode_steps(llm.engine, recorder, steps, num_seqs, context)
    finally:
        for request_id in list(llm.engine._requests):
            llm.engine.abort(request_id)
        llm.engine.scheduler.num_preemptions = 0
    return found, recorder.costs


def test_parts_of_a_step_add_up_to_it(llm: LLM) -> None:
    steps, _ = decode(llm)
    assert len(steps) == 4
    for spans in steps:
        seconds = split_step(spans)
        stages = [seconds[stage, ""] for stage in ("schedule", "batch", "forward", "logits")]
        stages += [seconds[stage, ""] for stage in ("sampling", "commit", REST)]
        assert sum(stages) == pytest.approx(seconds[STEP, ""])
        for stage in ("forward", "logits"):
            ops = [x for (name, op), x in seconds.items() if name == stage and op]
            assert sum(ops) == pytest.approx(seconds[stage, ""])
        assert min(seconds.values()) >= 0


def test_every_op_is_seen_in_its_stage(llm: LLM) -> None:
    (spans, *_), _ = decode(llm)
    counts = Counter((span.stage, span.op) for span in spans if span.op)
    per_layer = ("qkv", "norm_rope_store", "paged_attention", "o", "gate_up", "silu_mul", "down")
    expected = {("forward", op): LAYERS for op in per_layer}
    expected |= {("forward", "add_rms_norm"): 2 * LAYERS, ("forward", "rms_norm"): 1}
    expected |= {("forward", "embedding"): 1, ("logits", "lm_head"): 1}
    assert counts == expected


@pytest.mark.parametrize("is_quantized", [False, True], ids=["bf16", "int8"])
def test_bytes_and_operations_of_linears_are_those_of_the_shape(
    folder: Path, is_quantized: bool
) -> None:
    llm = LLM(folder, dtype="bfloat16", skip_tokenizer_init=True, num_kv_blocks=64, kernels="ref")
    sizes = {
        "qkv": (E, (H + 2 * KV) * D),
        "o": (H * D, E),
        "gate_up": (E, 2 * FFN),
        "down": (FFN, E),
    }
    with llm:
        layer = llm.engine._pipeline.runner._model.model.layers[1]
        if is_quantized:
            layer.mlp.down_proj.quantize(torch.int8)
        _, costs = decode(llm, num_seqs=3)
    for op, (K, N) in sizes.items():
        activations = LAYERS * 2 * 3 * (K + N)
        weights = LAYERS * 2 * K * N
        if op == "down" and is_quantized:
            weights += -K * N + 4 * N  # one layer's: a byte each, and a scale for each row
        assert costs["forward", op]["flops"] == LAYERS * 2 * 3 * K * N
        assert costs["forward", op]["bytes"] == activations + weights
    head = costs["logits", "lm_head"]
    assert head["flops"] == 2 * 3 * E * V
    assert head["bytes"] - 2 * E * V - 2 * 3 * E in (2 * 3 * V, 4 * 3 * V)  # bf16 or fp32 sums


def test_packed_weights_count_as_plain_ones(llm: LLM) -> None:
    _, costs = decode(llm, num_seqs=3)
    K, N = E, (H + 2 * KV) * D
    assert costs["forward", "qkv"]["bytes"] == LAYERS * 2 * (K * N + 3 * (K + N))


def test_attention_counts_the_keys_that_are_seen() -> None:
    """A chunk of 3 at the end of 5 tokens sees 3 + 4 + 5 keys, a decoding token of 7 sees 7."""
    q, cache = torch.zeros(4, H, D), torch.zeros(9, 4, KV, D)
    tables = torch.zeros(2, 2, dtype=torch.int32)
    seq_lens, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([5, 7], [0, 3, 4]))
    cost = attention_cost((q, cache, cache, tables, seq_lens, bounds, 1.0), {}, q.clone())
    assert cost["flops"] == 4 * H * D * (3 + 4 + 5 + 7)
    indices = 4 * (4 + 2 + 3)
    assert cost["bytes"] == 4 * (2 * 4 * H * D + 2 * (5 + 7) * KV * D) + indices


def test_counted_step_has_the_context_that_was_asked_for(llm: LLM) -> None:
    _, costs = decode(llm, num_seqs=1, context=24)
    assert costs["forward", "paged_attention"]["flops"] == LAYERS * 4 * H * D * 24


def test_prefill_steps_read_whole_prompts(llm: LLM) -> None:
    recorder = Recorder()
    with recording(llm.engine, recorder):
        steps = profiler.prefill_steps(llm.engine, recorder, 2, 40)
    assert len(steps) == 2
    num_rows = (LAYERS - 1) * 40 + 1  # the last layer goes on with the row that is sampled from
    assert recorder.costs["forward", "o"]["flops"] == 2 * num_rows * H * D * E
    assert recorder.costs["forward", "paged_attention"]["flops"] == LAYERS * 4 * H * D * 40 * 41 / 2


def test_a_pool_that_is_too_small_is_told(llm: LLM) -> None:
    with pytest.raises(RuntimeError, match="do not fit the KV pool"):
        decode(llm, num_seqs=4, context=258)  # 4 x 256 fit


def test_the_engine_is_left_as_it_was(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    with recording(llm.engine, recorder := Recorder()):
        during = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert recorder.take()
    after = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert before == during == after
    assert recorder.take() == []
    assert vars(llm.engine).keys().isdisjoint({"step"})


def test_what_an_op_calls_belongs_to_it() -> None:
    ticks = iter(range(100))
    recorder = Recorder(lambda: next(ticks))
    inner = recorder.wrap(tuple, op="inner")
    stage = recorder.wrap(recorder.wrap(inner, op="outer"), stage="forward")
    stage()
    assert recorder.take() == [Span("forward", "outer", 1, 2), Span("forward", "", 0, 3)]


def test_wrapping_takes_microseconds() -> None:
    assert 0 < wrapping_seconds() < 1e-4


def test_tables_trace_and_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "measure", lambda device: LIMITS)
    trace = tmp_path / "trace.json"
    options = ["--model", str(folder), "--dtype", "bfloat16", "--num-kv-blocks", "64"]
    work = ["--num-seqs", "2", "--context", "20", "--prefill", "30", "--steps", "3"]
    monkeypatch.setattr(profiler, "LLM", lambda **options: LLM(**options | NO_TOKENIZER))
    profiler.main([*options, *work, "--trace", str(trace)])
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    for name in ("prefill", "decode"):
        row = result[name]["forward/qkv"]
        least = max(row["MB"] * 1e6 / LIMITS.read, row["GFLOP"] * 1e9 / LIMITS.bf16)
        assert row["least ms"] == pytest.approx(1e3 * least, abs=1e-3)
        assert row["% reached"] == pytest.approx(100 * row["least ms"] / row["ms"], rel=0.05)
        assert result[name]["step"]["% of step"] == 100
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["name"] == STEP for event in events) == 2 * 3
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    assert {event["cat"] for event in events} >= {"forward", "logits", "sampling"}


def test_host_mode_runs_no_model(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "LLM", lambda **options: LLM(**options | NO_TOKENIZER))
    (folder / "model.safetensors").rename(folder / "away")
    try:
        sizes = ["--num-seqs", "4", "--context", "20", "--waiting", "50", "--steps", "3"]
        profiler.main(["--model", str(folder), "--host", *sizes])
    finally:
        (folder / "away").rename(folder / "model.safetensors")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    for part in (result["alone"], result["queued"]):
        names = ("schedule", "batch", "null model", "commit", REST, "generate's loop")
        assert sum(part[name] for name in names) == pytest.approx(part[STEP], rel=0.5)


def test_null_model_draws_one_token_for_each_sampled_row(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nanoinfer.llm, "ModelRunner", profiler.NullRunner)
        llm = LLM(folder, skip_tokenizer_init=True)
    outputs = llm.generate([[1] * 5, [2] * 3000], SamplingParams(max_tokens=3), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert llm.stats().steps == 4, "a prompt in two chunks, and nothing is drawn after the first"


@pytest.mark.parametrize(
    ("arguments", "prefill", "num_seqs"),
    [([], 512, 16), (["--prefill", "9"], 9, None), (["--context", "9"], None, 16)],
)
def test_what_is_named_is_profiled(
    arguments: list[str], prefill: int | None, num_seqs: int | None
) -> None:
    args = profiler.parse_args(arguments)
    assert (args.prefill, args.num_seqs) == (prefill, num_seqs)
