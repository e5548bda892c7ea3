"""Steps that are launched before the results of those before them are there: the same answers.

On a CPU a launch is the whole step, so that the order of things is a GPU's without its haste.
test_scheduler_machine.py has random operations ("ahead").
"""

import pytest
import torch
from oracle import good_prompts, hf_greedy

from nanoinfer import LLM, EngineConfig, SamplingParams
from nanoinfer.batch import Batch
from nanoinfer.launched import Launched
from nanoinfer.model_runner import ModelRunner
from nanoinfer.pipeline import on_device, with_index

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def prompts(tiny_qwen3):
    return list(good_prompts(tiny_qwen3, [1, 3, 16, 17, 64, 100], NUM_TOKENS).values())


def make(folder, **options):
    defaults = {"dtype": "float32", "max_model_len": 144, "async_scheduling": True}
    return LLM(folder, **(defaults | options))


def outputs(llm, prompts, params):
    """Token ids, text, reasons, and which candidates each token had."""
    answers = [
        answer
        for output in llm.generate(prompts, params, use_tqdm=False)
        for answer in output.outputs
    ]
    return [
        (x.token_ids, x.text, x.finish_reason, x.stop_reason, [*map(sorted, x.logprobs or ())])
        for x in answers
    ]


@pytest.fixture
def log(monkeypatch):
    """Names of steps in the order in which they are launched and waited for."""
    events, numbers = [], {}
    launch, tokens = Launched.__init__, Launched.tokens

    def launching(self, *args):
        numbers[id(self)] = len(numbers)
        events.append(f"launch {numbers[id(self)]}")
        launch(self, *args)

    def waiting(self):
        events.append(f"take {numbers[id(self)]}")
        return tokens(self)

    monkeypatch.setattr(Launched, "__init__", launching)
    monkeypatch.setattr(Launched, "tokens", waiting)
    return events


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 7}, {"num_kv_blocks": 10}, {"enforce_eager": True},
     {"max_num_seqs": 2}, {"enable_prefix_caching": False}, {"kernels": "ref"}],
    ids=str,
)  # fmt: skip
def test_greedy_ids_equal_transformers(tiny_qwen3, prompts, options):
    expected = [hf_greedy(tiny_qwen3, prompt, NUM_TOKENS) for prompt in prompts]
    with make(tiny_qwen3, **options) as llm:
        for _ in range(2):  # cold, and from the prefix cache
            assert [ids for ids, *_ in outputs(llm, prompts, GREEDY)] == expected
        if "num_kv_blocks" in options:
            assert llm.stats().preemptions > 0
        stats = llm.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.free_blocks == stats.total_blocks


ASKED = [
    GREEDY,
    SamplingParams(temperature=1, seed=1, max_tokens=20, logprobs=3),
    SamplingParams(temperature=1, seed=2, max_tokens=9, n=3, top_k=20),
    SamplingParams(temperature=0, max_tokens=15, repetition_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=1, seed=3, max_tokens=30, min_tokens=10, top_p=0.9),
    SamplingParams(temperature=1, seed=4, max_tokens=1),
]


@pytest.mark.parametrize("params", [*ASKED, ASKED], ids=[*range(len(ASKED)), "each its own"])
def test_answers_do_not_depend_on_it(tiny_qwen3, prompts, params):
    """Penalties hold a step up, and all that are in it."""
    with make(tiny_qwen3, async_scheduling=False) as llm:
        expected = outputs(llm, prompts, params)
    with make(tiny_qwen3) as llm:
        assert outputs(llm, prompts, params) == expected


def test_min_tokens_counts_what_is_pending(tiny_qwen3, prompts):
    """The end may come with the first token that is not forbidden, and not one later."""
    ids = hf_greedy(tiny_qwen3, prompts[3], NUM_TOKENS)
    for i in range(1, NUM_TOKENS):
        if ids.index(ids[i]) == i:
            params = GREEDY.clone(min_tokens=i, stop_token_ids=[ids[i]])
            with make(tiny_qwen3) as llm:
                ((found, *_),) = outputs(llm, prompts[3:4], params)
            assert found == ids[: i + 1]


def test_stop_strings_end_where_they_did(tiny_qwen3, prompts):
    with make(tiny_qwen3, async_scheduling=False) as llm:
        texts = [text for _, text, *_ in outputs(llm, prompts, GREEDY)]
        params = [GREEDY.clone(stop=[text[len(text) // 2 :][:2]]) for text in texts]
        expected = outputs(llm, prompts, params)
    assert all(reason == "stop" for _, _, reason, *_ in expected)
    with make(tiny_qwen3) as llm:
        assert outputs(llm, prompts, params) == expected


def test_a_step_is_launched_before_the_one_before_is_waited_for(tiny_qwen3, prompts, log):
    with make(tiny_qwen3) as llm:
        outputs(llm, prompts[:2], GREEDY.clone(max_tokens=3))
    assert log == ["launch 0", "launch 1", "take 0", "launch 2", "take 1", "take 2"]


def test_a_sequence_that_ends_unexpectedly_runs_once_more(tiny_qwen3, prompts, log):
    ids = hf_greedy(tiny_qwen3, prompts[1], NUM_TOKENS)
    last = next(i for i in range(1, NUM_TOKENS) if ids.index(ids[i]) == i)
    with make(tiny_qwen3) as llm:
        ((found, *_),) = outputs(llm, prompts[1:2], GREEDY.clone(stop_token_ids=[ids[last]]))
        assert found == ids[: last + 1]
        assert log[-2:] == [f"launch {last + 1}", f"take {last}"]  # and nobody takes the last one
        assert llm.stats().free_blocks == llm.stats().total_blocks
        assert outputs(llm, prompts, GREEDY)[1][0] == ids


@pytest.mark.parametrize(
    "options", [{"async_scheduling": False}, {"async_scheduling": None}], ids=str
)
def test_on_a_cpu_steps_wait_unless_told(tiny_qwen3, prompts, log, options):
    with make(tiny_qwen3, **options) as llm:
        outputs(llm, prompts[:1], GREEDY.clone(max_tokens=2))
    assert log == ["launch 0", "take 0", "launch 1", "take 1"]


@pytest.mark.parametrize("name", ["frequency_penalty", "logprobs", "prompt_logprobs"])
def test_penalties_and_logprobs_are_waited_for(tiny_qwen3, prompts, log, name):
    with make(tiny_qwen3) as llm:
        outputs(llm, prompts[:1], GREEDY.clone(max_tokens=2, **{name: 1}))
    assert log == ["launch 0", "take 0", "launch 1", "take 1"]


def test_nothing_stays_in_flight(tiny_qwen3, prompts):
    ids = hf_greedy(tiny_qwen3, prompts[1], NUM_TOKENS)
    with make(tiny_qwen3) as llm:
        outputs(llm, prompts[1:2], GREEDY.clone(stop_token_ids=[ids[1]]))
        assert not llm.engine._pipeline._in_flight


def test_a_prefix_in_flight_is_not_computed_twice(tiny_qwen3, prompts):
    """The first sequence is at its last token and not in the step that admits the second."""
    counts = {}
    for is_async in (False, True):
        with make(tiny_qwen3, async_scheduling=is_async, max_num_batched_tokens=104) as llm:
            asked = [prompts[5] + [i] for i in range(4)]
            outputs(llm, asked, GREEDY.clone(max_tokens=1))
            counts[is_async] = llm.stats().prefix_hit_tokens
    assert counts[True] == counts[False] == 3 * 96


def test_states_are_waited_for(tiny, prompts, log):
    folder = tiny("tiny-qwen3_5")
    with make(folder) as llm:
        ((ids, *_),) = outputs(llm, [[5, 6, 7]], GREEDY.clone(max_tokens=2))
    assert ids == hf_greedy(folder, [5, 6, 7], 2)
    assert log == ["launch 0", "take 0", "launch 1", "take 1"]


@pytest.mark.parametrize("name", ["launch", "commit"])
@pytest.mark.parametrize("on_call", [1, 2, 4])
def test_after_an_exception_the_engine_starts_clean(
    tiny_qwen3, prompts, monkeypatch, name, on_call
):
    with make(tiny_qwen3) as llm:
        owner = llm.engine.scheduler if name == "commit" else llm.engine._pipeline.runner
        original, calls = getattr(owner, name), []

        def failing(*args):
            calls.append(name)
            if len(calls) == on_call:
                raise RuntimeError("broken")
            return original(*args)

        monkeypatch.setattr(owner, name, failing)
        with pytest.raises(RuntimeError, match="broken"):
            outputs(llm, prompts, GREEDY)
        expected = [hf_greedy(tiny_qwen3, prompt, NUM_TOKENS) for prompt in prompts]
        assert [ids for ids, *_ in outputs(llm, prompts, GREEDY)] == expected


def test_leaving_a_stream_drops_what_is_in_flight(tiny_qwen3, prompts):
    with make(tiny_qwen3) as llm:
        for item in llm.stream(prompts[2], GREEDY):
            assert item.outputs[0].token_ids == hf_greedy(tiny_qwen3, prompts[2], NUM_TOKENS)[:1]
            break
        assert llm.stats().free_blocks == llm.stats().total_blocks
        expected = [hf_greedy(tiny_qwen3, prompt, NUM_TOKENS) for prompt in prompts]
        assert [ids for ids, *_ in outputs(llm, prompts, GREEDY)] == expected


def test_pending_ids_go_from_output_to_input(tiny_qwen3, prompts):
    """The host has not seen the id that the second step reads."""
    with make(tiny_qwen3) as llm:
        runner, seen = llm.engine._pipeline.runner, []
        launch = runner.launch

        def watching(batch, before):
            known = batch.input_ids.clone()
            launched = launch(batch, before)
            seen.append((known, batch.pending, batch.input_ids.clone()))
            return launched

        runner.launch = watching
        outputs(llm, prompts[1:2], GREEDY.clone(max_tokens=2))
    ids = hf_greedy(tiny_qwen3, prompts[1], 2)
    (_, none, _), (known, pending, used) = seen
    assert none is None
    assert pending.tolist() == [[0], [0]]
    assert (known.tolist(), used.tolist()) == ([0], [ids[0]])
    assert torch.equal(used, torch.tensor(ids[:1]))


class Where:
    """torch.cuda.device, without a GPU: which device is this thread's?"""

    now: torch.device | None = None

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        Where.now, self.before = self.device, Where.now

    def __exit__(self, *exception):
        Where.now = self.before


def test_all_work_is_done_on_the_engines_device(tiny_qwen3, prompts, monkeypatch):
    """Of several GPUs; it is a thread's setting, and any thread may step the engine."""
    gpu, places = torch.device("cuda:1"), []
    make_runner, launch, build = ModelRunner.__init__, ModelRunner.launch, Batch.build

    def making(self, *args):
        places.append(Where.now)
        with monkeypatch.context() as patch:
            patch.setattr(EngineConfig, "torch_device", torch.device("cpu"))
            make_runner(self, *args)

    def launching(self, batch, before):
        places.append(Where.now)
        return launch(self, batch, before)

    def building(step, block_size, device):
        places.append(device)
        return build(step, block_size, torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "device", Where)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(EngineConfig, "torch_device", gpu)
    monkeypatch.setattr(ModelRunner, "__init__", making)
    monkeypatch.setattr(ModelRunner, "launch", launching)
    monkeypatch.setattr(Batch, "build", building)
    with make(tiny_qwen3) as llm:
        outputs(llm, prompts[:1], GREEDY.clone(max_tokens=2))
    assert places == [gpu] * 5  # made, then uploaded and launched twice
    assert Where.now is None


def test_a_gpu_without_a_number_is_this_threads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert with_index(torch.device("cuda")) == torch.device("cuda:3")
    assert with_index(torch.device("cuda:1")) == torch.device("cuda:1")
    assert with_index(torch.device("cpu")) == torch.device("cpu")


def test_a_cpu_has_no_device_to_set():
    with on_device(torch.device("cpu")) as nothing:
        assert nothing is None
