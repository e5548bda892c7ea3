"""Every field of SamplingParams and every form of a prompt, by table: what is taken, what refused.

A refusal is a ValueError that names the field (or "prompt") before anything is queued.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.outputs import RequestOutput

NAN, INF = math.nan, math.inf
VOCAB_SIZE = 273

# field: (values that are taken, values that are refused)
NOT_AN_INT = [1.0, 1.5, "1", [1], True, NAN]
NOT_A_NUMBER = ["1", [1.0], True, NAN, INF, -INF, 1j]
NOT_A_FLAG = [None, 0, 1, "yes"]
FIELDS: dict[str, tuple[list, list]] = {
    "n": ([1, 2, 20], [None, 0, -1, *NOT_AN_INT]),
    "temperature": ([0, 0.0, 1e-30, 0.7, 1, 2.0, 100], [None, -1e-9, -1, *NOT_A_NUMBER]),
    "top_k": ([-1, 0, 1, 50, VOCAB_SIZE, 10**6], [None, -2, *NOT_AN_INT]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [None, 0, 0.0, -0.1, 1.0001, *NOT_A_NUMBER]),
    "min_p": ([0, 0.0, 0.5, 1, 1.0], [None, -0.1, 1.0001, *NOT_A_NUMBER]),
    "presence_penalty": ([-2, 0, 0.5, 2.0], [None, -2.1, 2.1, *NOT_A_NUMBER]),
    "frequency_penalty": ([-2, 0, 0.5, 2.0], [None, -2.1, 2.1, *NOT_A_NUMBER]),
    "repetition_penalty": ([0.01, 1, 1.5, 2], [None, 0, 0.0, -1, *NOT_A_NUMBER]),
    "logit_bias": (
        [None, {}, {5: 1}, {0: -100, VOCAB_SIZE - 1: 100.0}],
        [5, "5", [5], {-1: 1.0}, {"5": 1.0}, {1.5: 1.0}, {5: 101}, {5: -100.5}, {5: NAN},
         {5: None}, {5: "1"}, {True: 1.0}],
    ),
    "seed": ([None, 0, 1, -1, 2**31, 2**63 - 1, -(2**63)], NOT_AN_INT),
    "stop": (
        [None, [], "a", "###", ["a"], ["a", "bc"], ("a", "bc"), ["é", "你好"], ["\n"]],
        ["", [""], ["a", ""], [1], ["a", None], [b"a"], b"ab", 5, True, [["a"]]],
    ),
    "stop_token_ids": (
        [None, [], [5], (5, 6), [0, VOCAB_SIZE - 1]],
        [[-1], [1.0], ["5"], [None], [True], "5", 5, True, [[5]]],
    ),
    "include_stop_str_in_output": ([True, False], NOT_A_FLAG),
    "ignore_eos": ([True, False], NOT_A_FLAG),
    "min_tokens": ([0, 1, 16], [None, -1, *NOT_AN_INT]),
    "max_tokens": ([None, 1, 16, 10**9], [0, -1, *NOT_AN_INT]),
    "logprobs": ([None, -1, 0, 1, 20, VOCAB_SIZE, 10**6], [-2, *NOT_AN_INT]),
    "prompt_logprobs": ([None, -1, 0, 1, 20, VOCAB_SIZE, 10**6], [-2, *NOT_AN_INT]),
    "skip_special_tokens": ([True, False], NOT_A_FLAG),
    "detokenize": ([True, False], NOT_A_FLAG),
}  # fmt: skip
ACCEPTED = [(name, value) for name, (taken, _) in FIELDS.items() for value in taken]
REFUSED = [(name, value) for name, (_, refused) in FIELDS.items() for value in refused]

IDS = [72, 101, 108, 108, 111]  # what the tiny tokenizer makes of "Hello": one id a byte
ONE_PROMPT = {
    "text": "Hello",
    "ids": IDS,
    "tuple": tuple(IDS),
    "range": range(5),
    "numpy": np.array(IDS),
    "numpy int32": np.array(IDS, np.int32),
    "list of numpy ids": list(np.array(IDS)),
    "dict of text": {"prompt": "Hello"},
    "dict of ids": {"prompt_token_ids": IDS},
    "dict of a tuple": {"prompt_token_ids": tuple(IDS)},
    "dict of numpy": {"prompt_token_ids": np.array(IDS)},
    "dict of both": {"prompt": "anything", "prompt_token_ids": IDS},
    "one id": [0],
    "largest id": [VOCAB_SIZE - 1],
}
SEVERAL_PROMPTS = {
    "texts": ["Hello", "Hello"],
    "tuple of texts": ("Hello", "Hello"),
    "lists of ids": [IDS, IDS],
    "tuple of tuples": (tuple(IDS), tuple(IDS)),
    "numpy arrays": [np.array(IDS), np.array(IDS)],
    "numpy matrix": np.array([IDS, IDS]),
    "dicts": [{"prompt": "Hello"}, {"prompt_token_ids": IDS}],
    "a mix": ["Hello", IDS, tuple(IDS), np.array(IDS), {"prompt": "Hello"}],
    "mix, ids first": [IDS, "Hello"],
    "one in a list": ["Hello"],
    "generator": (ids for ids in (IDS, IDS)),
}
REFUSED_PROMPTS = {
    "None": None,
    "number": 5,
    "float": 1.5,
    "empty text": "",
    "empty ids": [[]],
    "empty tuple in a list": [()],
    "empty numpy": [np.array([], int)],
    "empty dict": {},
    "unknown key": {"text": "Hello"},
    "misspelt key beside a known one": {"prompt": "Hello", "prompt_tokens_ids": IDS},
    "keys that cannot be sorted": {"prompt": "Hello", 1: 2},
    "dict of None": {"prompt": None},
    "dict of no ids": {"prompt_token_ids": []},
    "dict of ids that are None": {"prompt_token_ids": None},
    "dict of a number": {"prompt": 5},
    "dict of text as ids": {"prompt_token_ids": "Hello"},
    "dict of a number as ids": {"prompt_token_ids": 5},
    "dict of bytes": {"prompt": b"Hello"},
    "list of None": [None],
    "None among prompts": ["Hello", None],
    "floats": [1.0, 2.0],
    "floats in a list": [[1.0, 2.0]],
    "numpy floats": [np.array([1.0, 2.0])],
    "bools": [True, False],
    "bools in a list": [[True]],
    "bytes": b"Hello",
    "text among ids": [1, "Hello"],
    "id among texts": ["Hello", 1],
    "texts in a list of lists": [["Hello"]],
    "lists of lists of ids": [[IDS]],
    "negative id": [1, -1],
    "id beyond the vocabulary": [1, VOCAB_SIZE],
    "id beyond 64 bits": [2**70],
    "text that is not Unicode": "\ud800",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny operations only wait for other threads, for whole time slices on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llm(tiny_qwen3):
    return LLM(tiny_qwen3, dtype="float32")


def generate(llm, prompts, **params) -> list[RequestOutput]:
    sampling_params = SamplingParams(**{"temperature": 0, "max_tokens": 2, **params})
    return llm.generate(prompts, sampling_params, use_tqdm=False)


def test_tables_cover_every_field():
    assert list(FIELDS) == [field.name for field in dataclasses.fields(SamplingParams)]


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=repr)
def test_accepted_value_is_kept(name, value):
    kept = getattr(SamplingParams(**{name: value}), name)
    if name == "stop":
        value = [value] if isinstance(value, str) else list(value or [])
    elif name == "stop_token_ids":
        value = list(value or [])
    assert kept == value


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=repr)
def test_accepted_value_runs(llm, name, value):
    (output,) = generate(llm, IDS, **{"temperature": 0.8, "max_tokens": 16, name: value})
    limit = 251 if value is None or value == 10**9 else 16
    for answer in output.outputs:
        assert 1 <= len(answer.token_ids) <= limit
        assert answer.finish_reason in ("length", "stop")


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_refused_value_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: got .*, need "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=repr)
def test_refused_value_set_later_is_named_and_nothing_is_queued(llm, name, value):
    params = SamplingParams()
    setattr(params, name, value)
    before = llm.stats()
    with pytest.raises(ValueError, match=rf"^{name}: got .*, need "):
        llm.generate([IDS, IDS], [SamplingParams(), params], use_tqdm=False)
    assert llm.stats() == before


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens) == (1, 1.0, 16)
    assert (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    assert params.stop == params.stop_token_ids == []
    assert params.skip_special_tokens
    assert params.detokenize
    assert params.seed is params.logprobs is params.prompt_logprobs is None


def test_lists_are_not_shared_between_instances():
    SamplingParams().stop.append("a")
    assert SamplingParams().stop == []


def test_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=0)


def test_min_tokens_over_max_tokens_is_refused():
    with pytest.raises(ValueError, match="min_tokens: got 3, need at most max_tokens = 2"):
        SamplingParams(min_tokens=3, max_tokens=2)
    assert SamplingParams(min_tokens=3, max_tokens=None).min_tokens == 3


def test_stop_string_without_text_is_refused():
    with pytest.raises(ValueError, match=r"^stop: got .* detokenize=False"):
        SamplingParams(stop="a", detokenize=False)


def test_fields_may_be_set_and_a_clone_is_checked():
    params = SamplingParams(temperature=0)
    params.max_tokens = 3
    assert params.clone(top_k=5) == SamplingParams(temperature=0, max_tokens=3, top_k=5)
    with pytest.raises(ValueError, match="top_k"):
        params.clone(top_k=-5)


def test_params_changed_after_the_call_do_not_matter(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    stream = llm.stream(IDS, params)
    params.max_tokens = 1
    assert sum(len(item.outputs[0].token_ids) for item in stream) == 5


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_ids_beyond_the_vocabulary_are_refused_by_the_engine(llm, name):
    value = [5, VOCAB_SIZE] if name == "stop_token_ids" else {5: 1.0, VOCAB_SIZE: 1.0}
    before = llm.stats()
    with pytest.raises(ValueError, match=f"{VOCAB_SIZE} is outside the vocabulary"):
        generate(llm, [IDS, IDS], **{name: value})
    assert llm.stats() == before


@pytest.mark.parametrize("form", ONE_PROMPT)
def test_one_prompt_of_every_form(llm, form):
    prompt = ONE_PROMPT[form]
    own_ids = {"one id": [0], "largest id": [VOCAB_SIZE - 1], "range": [0, 1, 2, 3, 4]}
    for prompts in (prompt, [prompt]):
        (output,) = generate(llm, prompts)
        assert output.prompt_token_ids == own_ids.get(form, IDS)
        assert {type(i) for i in output.prompt_token_ids} == {int}
        assert len(output.outputs[0].token_ids) == 2
        text = {"text": "Hello", "dict of text": "Hello", "dict of both": "anything"}
        assert output.prompt == text.get(form)


@pytest.mark.parametrize("form", SEVERAL_PROMPTS)
def test_several_prompts_of_every_form(llm, form):
    prompts = list(SEVERAL_PROMPTS[form])
    outputs = generate(llm, prompts)
    assert [output.prompt_token_ids for output in outputs] == [IDS] * len(prompts)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_no_prompts_give_no_outputs(llm):
    assert generate(llm, []) == []
    assert list(llm.stream([])) == []


@pytest.mark.parametrize("form", REFUSED_PROMPTS)
def test_refused_prompt_is_named_and_nothing_is_queued(llm, form):
    before = llm.stats()
    with pytest.raises(ValueError, match=r"^prompts?: "):
        generate(llm, REFUSED_PROMPTS[form])
    assert llm.stats() == before


@pytest.mark.parametrize("form", REFUSED_PROMPTS)
def test_refused_prompt_refuses_its_whole_call_before_a_stream_starts(llm, form):
    before = llm.stats()
    with pytest.raises(ValueError, match=r"^prompts?: "):
        llm.stream(["Hello", REFUSED_PROMPTS[form]], SamplingParams())
    assert llm.stats() == before


@pytest.mark.parametrize("value", ["greedy", 0, {"temperature": 0}, ["x"], [None]], ids=repr)
def test_sampling_params_of_another_type_are_refused(llm, value):
    before = llm.stats()
    with pytest.raises((ValueError, TypeError), match="sampling_params"):
        llm.generate("Hello", value, use_tqdm=False)
    assert llm.stats() == before


@pytest.mark.parametrize("count", [0, 1, 3])
def test_sampling_params_are_one_or_one_for_each(llm, count):
    with pytest.raises(ValueError, match=f"sampling_params: got {count} for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()] * count, use_tqdm=False)


def test_each_prompt_has_its_own_params(llm):
    params = [SamplingParams(max_tokens=i, ignore_eos=True) for i in (3, 1, 2)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 2]
