"""What users of such engines run into, one promise a test, on a tiny random checkpoint.

The order: the policy of each parameter and limit, then scheduling and caching, errors, streams,
log probabilities, processes. Greedy ids are compared with transformers in test_greedy.py, tables of
values and prompt forms are in test_sampling_params.py; here it is what a request does on its way.

LETTERS makes answers of a to z, one token a character, that still vary from token to token.
"""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from oracle import good_prompts, hf_greedy, hf_logprobs
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE

from nanoinfer import LLM, RequestOutput, SamplingParams
from nanoinfer.request import Request

B = 16
MAX_MODEL_LEN = 256  # the checkpoint's
EOS, PAD = 258, 256
LETTERS = dict.fromkeys(range(ord("a"), ord("z") + 1), 100.0)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SPELL = GREEDY.clone(logit_bias=LETTERS, max_tokens=24)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny operations only wait for other threads, for whole time slices on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared(tiny_qwen3):
    return LLM(tiny_qwen3, dtype="float32")


@pytest.fixture
def llm(shared):
    """An engine that several tests use: each must leave it without work and with all blocks."""
    yield shared
    check_idle(shared)


@pytest.fixture
def make(tiny_qwen3):
    """A new engine; at the end of the test it must have no work and all its blocks."""
    made = []

    def make_llm(folder=tiny_qwen3, **options) -> LLM:
        made.append(LLM(folder, **{"dtype": "float32", **options}))
        return made[-1]

    yield make_llm
    for engine in made:
        check_idle(engine)


@pytest.fixture
def copy(tiny_qwen3, tmp_path):
    """A copy of the checkpoint, to change."""
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "copy"))


@pytest.fixture(scope="module")
def prompts(tiny_qwen3):
    """length -> prompt whose greedy answer is fit to compare with."""
    return good_prompts(tiny_qwen3, [1, B - 1, B, B + 1, 2 * B + 1, 100], 12)


def check_idle(llm):
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.total_blocks


def generate(llm, prompts, params=GREEDY) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def ids_of(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def answer_of(llm, prompt, params):
    (output,) = generate(llm, prompt, params)
    (answer,) = output.outputs
    return answer


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def collect(stream):
    """(request id, index) -> [token ids, text, finish reason, stop reason] put together again."""
    found = defaultdict(lambda: [[], "", None, None])
    for item in stream:
        for part in item.outputs:
            answer = found[item.request_id, part.index]
            is_news = part.token_ids or part.text or part.finish_reason != answer[2]
            assert answer[2] is None or not is_news, "news after the last one"
            answer[0] += part.token_ids
            answer[1] += part.text
            answer[2:] = part.finish_reason, part.stop_reason
    return found


def whole(outputs):
    """The same of generate's outputs, in order."""
    return [
        [answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason]
        for output in outputs
        for answer in output.outputs
    ]


# Lengths


@pytest.mark.parametrize("excess", [0, 1, 100])
def test_prompt_of_max_model_len_is_refused_naming_both_numbers(llm, excess):
    length = MAX_MODEL_LEN + excess
    with pytest.raises(ValueError, match=rf"^prompt: .*\b{length}\b.*\b{MAX_MODEL_LEN}\b"):
        generate(llm, [[5] * length])
    with pytest.raises(ValueError, match=rf"^prompt: .*\b{length}\b.*\b{MAX_MODEL_LEN}\b"):
        generate(llm, "a" * length)


@pytest.mark.parametrize("max_tokens", [1, 16, None])
def test_prompt_one_token_under_max_model_len_gives_one_token(llm, max_tokens):
    answer = answer_of(llm, [5] * (MAX_MODEL_LEN - 1), GREEDY.clone(max_tokens=max_tokens))
    assert len(answer.token_ids) == 1
    assert answer.finish_reason == "length"


def test_prompt_and_max_tokens_over_max_model_len_end_there_with_length(make, prompts):
    llm = make(max_model_len=40)
    answer = answer_of(llm, prompts[2 * B + 1], GREEDY.clone(max_tokens=1000))
    assert len(answer.token_ids) == 40 - (2 * B + 1)
    assert answer.finish_reason == "length"


def test_max_tokens_none_goes_on_to_max_model_len(llm):
    answer = answer_of(llm, "Hello", GREEDY.clone(max_tokens=None))
    assert len(answer.token_ids) == MAX_MODEL_LEN - 5
    assert answer.finish_reason == "length"


def test_max_tokens_is_16_by_default(llm):
    assert len(answer_of(llm, "Hello", SamplingParams(ignore_eos=True)).token_ids) == 16


def test_max_model_len_over_the_models_is_refused(tiny_qwen3):
    with pytest.raises(ValueError, match=r"^max_model_len: .*\b257\b.*\b256\b"):
        LLM(tiny_qwen3, max_model_len=257)


@pytest.mark.parametrize("pool", [{"num_kv_blocks": 3}, {"kv_cache_memory": 4 * 16384}])
def test_small_pool_lowers_max_model_len_and_says_so_once(make, caplog, pool):
    """Two layers, keys and values, 2 heads of 32 in fp32: 16 tokens take 16384 bytes."""
    with caplog.at_level(logging.INFO, "nanoinfer"):
        llm = make(**pool, max_num_seqs=4)
    capacity = llm.stats().total_blocks * B
    assert capacity < MAX_MODEL_LEN
    said = [r.message for r in caplog.records if "max_model_len" in r.message]
    assert len(said) == 1
    assert str(capacity) in said[0]
    with pytest.raises(ValueError, match=rf"\b{capacity}\b"):
        generate(llm, [[5] * capacity])
    # Whatever is let in can run alone, to its end.
    answer = answer_of(llm, [5] * (capacity - 10), GREEDY.clone(max_tokens=None))
    assert len(answer.token_ids) == 10


def test_pool_smaller_than_an_explicit_max_model_len_is_refused_with_both_sizes(tiny_qwen3):
    with pytest.raises(ValueError, match=r"^max_model_len: .*\b7\b.* blocks .*\b3\b"):
        LLM(tiny_qwen3, max_model_len=100, num_kv_blocks=3)


def test_pool_of_just_max_model_len_is_accepted(make):
    llm = make(max_model_len=100, num_kv_blocks=7)
    assert len(answer_of(llm, "a", GREEDY.clone(max_tokens=None)).token_ids) == 99


def test_too_little_memory_is_refused_with_numbers_and_the_setting(tiny_qwen3, monkeypatch):
    with pytest.raises(ValueError, match=r"\b1,000\b.*\b16,384\b.*kv_cache_memory"):
        LLM(tiny_qwen3, dtype="float32", kv_cache_memory=1000)
    monkeypatch.setattr("nanoinfer.cache_sizes.available_memory", lambda: 10_000)
    with pytest.raises(ValueError, match=r"\b3,000\b.*\b16,384\b.*kv_cache_memory"):
        LLM(tiny_qwen3, dtype="float32")


# What is refused, and when


@pytest.mark.parametrize("prompt", ["", [[]], {"prompt_token_ids": []}], ids=repr)
def test_empty_prompt_is_refused(llm, prompt):
    with pytest.raises(ValueError, match="no tokens"):
        generate(llm, prompt)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**6])
def test_id_outside_the_models_vocabulary_is_refused_naming_id_and_size(llm, token_id):
    with pytest.raises(ValueError, match=rf"^prompt: .*{token_id}\b.*\b{VOCAB_SIZE}\b"):
        generate(llm, [[1, token_id, 2]])


def test_id_of_the_models_vocabulary_without_a_token_is_accepted(llm):
    assert len(answer_of(llm, [VOCAB_SIZE - 1], GREEDY).token_ids) == 12


@pytest.mark.parametrize(
    "bad",
    ["", [300], [5] * 256, {"text": "a"}, ("a", SamplingParams(stop_token_ids=[300]))],
    ids=["empty", "vocabulary", "too long", "key", "stop id"],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_call_with_one_bad_prompt_is_refused_before_anything_is_queued(llm, bad, position):
    prompt, params = bad if isinstance(bad, tuple) else (bad, GREEDY)
    prompts, all_params = ["a", "b"], [GREEDY, GREEDY]
    prompts.insert(position, prompt)
    all_params.insert(position, params)
    before = llm.stats()
    with pytest.raises(ValueError):
        llm.generate(prompts, all_params, use_tqdm=False)
    with pytest.raises(ValueError):
        llm.stream(prompts, all_params)  # already here, not at the first item
    assert llm.stats() == before
    assert len(generate(llm, "a")) == 1


def test_unknown_keyword_of_llm_is_a_type_error(tiny_qwen3):
    with pytest.raises(TypeError, match="max_modellen"):
        LLM(tiny_qwen3, max_modellen=100)


def test_unknown_keyword_of_sampling_params_is_a_type_error():
    with pytest.raises(TypeError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=5)


def test_vllms_common_keywords_are_accepted(make, tiny_qwen3):
    llm = make(
        tokenizer=str(tiny_qwen3),
        skip_tokenizer_init=False,
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="float32",
        seed=1,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        block_size=8,
        enable_prefix_caching=True,
        disable_log_stats=True,
        generation_config="auto",
    )
    assert len(generate(llm, ["a", "b", "c"])) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("trust_remote_code", True), ("tensor_parallel_size", 2)]
)
def test_vllms_keyword_that_cannot_be_honoured_is_refused_by_name(tiny_qwen3, name, value):
    with pytest.raises(ValueError, match=name):
        LLM(tiny_qwen3, **{name: value})


def test_impossible_request_fails_alone(llm, prompts, tiny_qwen3):
    """Others that are under way when it is refused do not notice."""
    stream = llm.stream(prompts[B], GREEDY)
    tokens = next(stream).outputs[0].token_ids
    with pytest.raises(ValueError):
        generate(llm, [[5] * MAX_MODEL_LEN])
    tokens += [i for item in stream for i in item.outputs[0].token_ids]
    assert tokens == hf_greedy(tiny_qwen3, prompts[B], 12)


# Ends


@pytest.mark.parametrize("in_generation_config", [11, [11], [11, 12]])
def test_end_of_sequence_is_the_union_of_three_files(make, copy, in_generation_config):
    edit_json(copy / "config.json", eos_token_id=10)
    edit_json(copy / "generation_config.json", eos_token_id=in_generation_config)
    llm = make(copy)  # the tokenizer's is 258
    ends = {10, 11, EOS} | ({12} if in_generation_config == [11, 12] else set())
    for token_id in (10, 11, 12, EOS, PAD, 13):
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token_id: 100})
        answer = answer_of(llm, "Hello", params)
        if token_id in ends:
            assert answer.token_ids == [token_id]
            assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        else:
            assert answer.token_ids == [token_id] * 3
            assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_ends_of_config_json_work_without_the_other_files(make, copy):
    edit_json(copy / "config.json", eos_token_id=[10, 11])
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        (copy / name).unlink()
    llm = make(copy)
    for token_id, count in ((10, 1), (11, 1), (EOS, 3)):
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias={token_id: 100})
        assert answer_of(llm, [5], params).token_ids == [token_id] * count


def test_ends_of_generation_config_count_even_when_its_sampling_is_ignored(make):
    llm = make(generation_config="ignore")
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={PAD: 100})
    assert answer_of(llm, "Hello", params).finish_reason == "stop"


def test_ignore_eos_gives_exactly_max_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias={EOS: 100})
    answer = answer_of(llm, "Hello", params)
    assert answer.token_ids == [EOS] * 5
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_users_stop_ids_stop_despite_ignore_eos(llm):
    params = GREEDY.clone(logit_bias={EOS: 100}, stop_token_ids=[EOS])
    answer = answer_of(llm, "Hello", params)
    assert answer.token_ids == [EOS]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", EOS)


def test_stop_token_is_in_token_ids_and_not_in_text(llm):
    free = answer_of(llm, "Hello", SPELL)
    at = 5
    while free.token_ids[at] in free.token_ids[:at]:
        at += 1
    stop_id = free.token_ids[at]
    answer = answer_of(llm, "Hello", SPELL.clone(stop_token_ids=[stop_id]))
    assert answer.token_ids == free.token_ids[: at + 1]
    assert answer.text == free.text[:at]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop_id)
    params = SPELL.clone(stop_token_ids=[stop_id], include_stop_str_in_output=True)
    assert answer_of(llm, "Hello", params).text == free.text[: at + 1]


def test_eos_is_in_token_ids_and_not_in_text(llm):
    params = SamplingParams(temperature=0, logit_bias={EOS: 100}, skip_special_tokens=False)
    answer = answer_of(llm, "Hello", params)
    assert (answer.token_ids, answer.text) == ([EOS], "")


def test_min_tokens_holds_every_end_back(llm):
    """Eos, a stop id and a stop string would each come at once, and do after min_tokens."""
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=4)
    for token_id, stops in ((EOS, {}), (ord("q"), {"stop_token_ids": [ord("q")]})):
        answer = answer_of(llm, "Hello", params.clone(logit_bias={token_id: 100}, **stops))
        assert token_id not in answer.token_ids[:4]
        assert answer.token_ids[4:] == [token_id]
        assert answer.finish_reason == "stop"
    answer = answer_of(llm, "Hello", params.clone(logit_bias={ord("q"): 100}, stop="q"))
    assert (answer.text, answer.finish_reason) == ("qqq", "stop")


def stop_of(text, start, stop):
    """text[start:stop], checked to be a stop string that ends in the middle of the text."""
    found = text[start:stop]
    assert text.find(found) >= 1, "choose another place: the answer repeats itself"
    return found


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_string_across_tokens_cuts_the_text_before_it(llm, length):
    free = answer_of(llm, "Hello", SPELL)
    stop = stop_of(free.text, 12 - length, 12)
    answer = answer_of(llm, "Hello", SPELL.clone(stop=stop))
    at = free.text.find(stop)
    assert answer.text == free.text[:at]
    assert answer.token_ids == free.token_ids[: at + length]  # no token is taken back
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_include_stop_str_in_output_cuts_the_text_behind_it(llm):
    free = answer_of(llm, "Hello", SPELL)
    stop = stop_of(free.text, 8, 11)
    params = SPELL.clone(stop=[stop], include_stop_str_in_output=True)
    answer = answer_of(llm, "Hello", params)
    assert answer.text == free.text[: free.text.find(stop) + 3]
    assert answer.stop_reason == stop


def test_first_of_several_stop_strings_wins_and_is_the_stop_reason(llm):
    free = answer_of(llm, "Hello", SPELL)
    first, second = stop_of(free.text, 6, 9), stop_of(free.text, 13, 16)
    answer = answer_of(llm, "Hello", SPELL.clone(stop=[second, "####", first]))
    assert answer.text == free.text[: free.text.find(first)]
    assert answer.stop_reason == first


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("ending", ["", "#"])
@pytest.mark.parametrize("start", [4, 9, 20])
def test_nothing_of_a_stop_string_is_streamed_and_no_more_is_held_back(
    llm, start, ending, is_included
):
    """With "#" behind it the stop string never comes whole: what was held back must come later."""
    free = answer_of(llm, "Hello", SPELL)
    stop = stop_of(free.text, start, start + 4) + ending
    params = SPELL.clone(stop=stop, include_stop_str_in_output=is_included)
    text, num_tokens = "", 0
    for item in llm.stream("Hello", params):
        (part,) = item.outputs
        text += part.text
        num_tokens += len(part.token_ids)
        so_far = free.text[:num_tokens]  # one character a token
        if part.finish_reason is None:
            held = max(h for h in range(len(stop)) if so_far.endswith(stop[:h]))
            assert text == so_far[: len(so_far) - held]
    if ending:
        assert (text, part.finish_reason, part.stop_reason) == (free.text, "length", None)
    else:
        end = free.text.find(stop) + is_included * len(stop)
        assert (text, part.finish_reason, part.stop_reason) == (free.text[:end], "stop", stop)


def test_tail_that_repeats_is_held_back_only_as_far_as_the_stop_string_goes(llm):
    params = GREEDY.clone(logit_bias={ord("q"): 100}, stop="qqq#")
    shown = [len(item.outputs[0].text) for item in llm.stream("Hello", params)]
    assert shown == [0] * 3 + [1] * 8 + [4]


def test_held_back_tail_is_flushed_at_every_kind_of_end(llm):
    free = answer_of(llm, "Hello", SPELL)
    stop = free.text[8:12] + "#"
    for params in (SPELL.clone(max_tokens=12), SPELL.clone(stop_token_ids=[free.token_ids[12]])):
        plain = answer_of(llm, "Hello", params)
        with_stop = answer_of(llm, "Hello", params.clone(stop=stop))
        assert with_stop == plain
        ((_, text, *_),) = collect(llm.stream("Hello", params.clone(stop=stop))).values()
        assert text == plain.text
    stream = llm.stream("Hello", SPELL.clone(stop=stop))
    text, num_tokens = "", 0
    for item in stream:
        text += item.outputs[0].text
        num_tokens += len(item.outputs[0].token_ids)
        if num_tokens == 12:
            llm.abort(item.request_id)
    assert text == free.text[:12]


# Temperature, filters, seeds


def test_greedy_ties_go_to_the_lowest_id(make, copy):
    """Rows 136.. of the head repeat rows 0..: their ids always tie, and must never be drawn."""
    weights = load_file(copy / "model.safetensors")
    half = VOCAB_SIZE // 2
    weights["lm_head.weight"][half : 2 * half] = weights["lm_head.weight"][:half].clone()
    weights["lm_head.weight"][2 * half :] = 0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    llm = make(copy)
    outputs = generate(llm, ["Hello", "World", "!"], GREEDY.clone(max_tokens=20))
    assert max(i for ids in ids_of(outputs) for i in ids) < half
    assert len({i for ids in ids_of(outputs) for i in ids}) > 10


def test_greedy_rows_mix_with_sampling_and_masked_rows(llm, prompts, tiny_qwen3):
    others = [
        SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=12),
        SamplingParams(temperature=0.5, top_k=3, top_p=0.8, min_p=0.1, max_tokens=12),
        SamplingParams(temperature=0, min_tokens=12, stop_token_ids=[*range(250)], max_tokens=12),
        SamplingParams(temperature=1.0, min_tokens=12, stop_token_ids=[*range(250)], max_tokens=12),
    ]
    each = list(prompts.values())
    mixed, params = [], []
    for i, prompt in enumerate(each):
        mixed += [prompt, [i + 1]]
        params += [GREEDY, others[i % 4]]
    outputs = llm.generate(mixed, params, use_tqdm=False)
    assert ids_of(outputs[::2]) == [hf_greedy(tiny_qwen3, prompt, 12) for prompt in each]
    masked = [ids for ids, p in zip(ids_of(outputs), params, strict=True) if p.min_tokens]
    assert all(min(ids) >= 250 for ids in masked)


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-45, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_tiny_temperatures_are_greedy_and_never_nan(llm, prompts, temperature, filters):
    params = GREEDY.clone(temperature=temperature, seed=1, logprobs=1, **filters)
    (output,) = generate(llm, [prompts[B]], params)
    assert ids_of([output]) == ids_of(generate(llm, [prompts[B]]))
    assert all(c.logprob <= 0 for row in output.outputs[0].logprobs for c in row.values())


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_narrowest_filters_leave_the_greedy_token(llm, prompts, params):
    greedy = ids_of(generate(llm, [prompts[B]]))
    assert ids_of(generate(llm, [prompts[B]], GREEDY.clone(temperature=1.5, **params))) == greedy


def test_top_k_of_0_and_minus_1_and_the_vocabulary_are_off(llm):
    params = GREEDY.clone(temperature=1.5, seed=3)
    values = (0, -1, VOCAB_SIZE, 10 * VOCAB_SIZE)
    found = [ids_of(generate(llm, "Hello", params.clone(top_k=k))) for k in values]
    assert found == [found[0]] * 4
    assert found[0] != ids_of(generate(llm, "Hello", params.clone(top_k=2)))


@pytest.mark.parametrize(
    "filters", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9}], ids=str
)
def test_filters_keep_what_they_say(llm, filters):
    """At temperature 1 the raw log probabilities are those of the filters."""
    params = SamplingParams(n=8, max_tokens=40, ignore_eos=True, logprobs=-1, seed=0, **filters)
    (output,) = generate(llm, "Hello", params)
    seen = set()
    for answer in output.outputs:
        for token_id, row in zip(answer.token_ids, answer.logprobs, strict=True):
            chosen = row[token_id].logprob
            seen.add(row[token_id].rank)
            larger = [c.logprob for c in row.values() if c.logprob > chosen]
            assert len(larger) < filters.get("top_k", VOCAB_SIZE)
            best = max(c.logprob for c in row.values())
            assert torch.tensor(chosen - best).exp() >= filters.get("min_p", 0) - 1e-5
            mass = torch.tensor(larger, dtype=torch.float64).exp().sum()
            assert mass < filters.get("top_p", 1.0) + 1e-5
    assert len(seen) > 1


def seeded(llm, prompts, seeds, **params):
    base = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True).clone(**params)
    return ids_of(llm.generate(prompts, [base.clone(seed=s) for s in seeds], use_tqdm=False))


@pytest.mark.parametrize("kernels", ["ref", "auto"])
def test_seed_gives_the_same_tokens_whatever_runs_beside_it(make, prompts, kernels):
    prompt, others = prompts[B + 1], [prompts[n] for n in (1, B - 1, B, 2 * B + 1, 100)]
    llm = make(kernels=kernels)
    (alone,) = seeded(llm, [prompt], [7])
    assert len(set(alone)) > 5
    assert seeded(llm, [prompt], [8]) != [alone]
    assert seeded(llm, [prompt], [7]) == [alone]  # again, with a warm prefix
    for row in (0, 3, 7):
        batch, seeds = [*others, prompt, prompt], list(range(100, 107))
        batch.insert(row, prompt)
        seeds.insert(row, 7)
        assert seeded(llm, batch, seeds)[row] == alone
    for budget in (1, 3, B):
        assert seeded(make(kernels=kernels, max_num_batched_tokens=budget), [prompt], [7]) == [
            alone
        ]
    small = make(kernels=kernels, num_kv_blocks=9, max_model_len=144)
    found = seeded(small, [*others, prompt, prompt], [*range(5), 7, 7])
    assert small.stats().preemptions > 0
    assert found[-2:] == [alone, alone]


def test_child_i_of_n_draws_with_seed_plus_i(llm, prompts):
    params = SamplingParams(n=4, seed=40, temperature=1.0, max_tokens=20, ignore_eos=True)
    (output,) = generate(llm, [prompts[2 * B + 1]], params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    alone = [generate(llm, [prompts[2 * B + 1]], params.clone(n=1, seed=40 + i)) for i in range(4)]
    assert ids_of([output]) == [ids for outputs in alone for ids in ids_of(outputs)]
    assert len({tuple(ids) for ids in ids_of([output])}) == 4


def test_without_a_seed_requests_differ_and_a_program_repeats_itself(make):
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    runs = [ids_of(generate(make(seed=seed), ["Hello"] * 3, params)) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 3


# Tokenizer, chat, generation_config


MESSAGES = [{"role": "user", "content": "Hi"}]


def with_bos(folder):
    """Make the tokenizer put <|endoftext|> before each text, and the template, too."""
    path = folder / "tokenizer.json"
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    edit_json(
        path,
        post_processor={
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {
                "id": "<|endoftext|>", "ids": [PAD], "tokens": ["<|endoftext|>"]}},
        },
    )  # fmt: skip
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    template = "<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}"
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    return folder


def test_chat_template_places_special_tokens_alone(make, tiny, tmp_path):
    llm = make(with_bos(Path(shutil.copytree(tiny("tiny-llama"), tmp_path / "llama"))))
    (plain,) = generate(llm, "Hi")
    assert plain.prompt_token_ids == [PAD, ord("H"), ord("i")]
    (chat,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert chat.prompt_token_ids == [PAD, ord("H"), ord("i")]
    assert chat.prompt == "<|endoftext|>Hi"


def test_chat_renders_its_template_and_options(llm):
    head = "<|im_start|>user\nHi<|im_end|>\n"
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert output.prompt == head + "<|im_start|>assistant\n"
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == head
    kwargs = {"enable_thinking": False}
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)
    assert output.prompt.endswith("<think>\n\n</think>\n\n")
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template="{{ messages|length }}")
    assert output.prompt == "1"
    outputs = llm.chat([MESSAGES, MESSAGES * 2], GREEDY, use_tqdm=False)
    assert [output.prompt.count("Hi") for output in outputs] == [1, 2]


def test_missing_chat_template_is_named_and_completion_still_works(make, copy):
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(copy / "tokenizer_config.json", chat_template=None)
    llm = make(copy)
    with pytest.raises(ValueError, match="chat_template"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    assert len(generate(llm, "Hello")) == 1
    (output,) = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template="a template")
    assert output.prompt == "a template"


@pytest.mark.parametrize("how", ["no files", "skip_tokenizer_init"])
def test_without_tokenizer_ids_work_and_text_is_refused_naming_the_file(make, copy, how, prompts):
    if how == "no files":
        for name in TOKENIZER_FILES:
            (copy / name).unlink()
    llm = make(copy, skip_tokenizer_init=how != "no files")
    (output,) = generate(llm, [prompts[B]], GREEDY.clone(logprobs=1, stop_token_ids=[0]))
    assert output.outputs[0].token_ids
    assert output.outputs[0].text == ""
    before = llm.stats()
    for call in (
        lambda: generate(llm, "Hello"),
        lambda: generate(llm, [prompts[B], "Hello"]),
        lambda: generate(llm, [prompts[B]], GREEDY.clone(stop="a")),
        lambda: llm.chat(MESSAGES, GREEDY, use_tqdm=False),
        llm.get_tokenizer,
    ):
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            call()
    assert llm.stats() == before


def test_tokenizer_of_another_folder(make, copy, tiny_qwen3):
    for name in TOKENIZER_FILES:
        (copy / name).unlink()
    llm = make(copy, tokenizer=str(tiny_qwen3))
    assert len(answer_of(llm, "Hello", SPELL).text) == 24


def test_generation_config_is_used_as_a_whole_only_without_sampling_params(make):
    """Each engine's first request draws with the same seed."""
    theirs = SamplingParams(temperature=0.7, top_k=20, top_p=0.9)
    assert make().get_default_sampling_params() == theirs
    by_default = whole(generate(make(), "Hello", None))
    assert by_default == whole(generate(make(), "Hello", theirs))
    plain = whole(generate(make(), "Hello", SamplingParams()))
    assert by_default != plain
    ignoring = make(generation_config="ignore")
    assert ignoring.get_default_sampling_params() == SamplingParams()
    assert whole(generate(ignoring, "Hello", None)) == plain
    # One given value, and nothing of theirs is mixed in.
    hot = SamplingParams(temperature=5.0, ignore_eos=True)
    found = [whole(generate(make(generation_config=g), "Hello", hot)) for g in ("auto", "ignore")]
    assert found[0] == found[1]


def test_generation_configs_sampling_values_are_said_once_in_the_log(make, caplog):
    with caplog.at_level(logging.INFO, "nanoinfer"):
        llm = make()
        for _ in range(3):
            generate(llm, "Hello", None)
        list(llm.stream("Hello"))
    said = [r.message for r in caplog.records if "generation_config" in r.message]
    assert len(said) == 1
    assert "0.7" in said[0]


# Steps


def count_computed(llm, monkeypatch):
    """A list that gets the number of tokens of each step."""
    counts, launch = [], llm.engine._pipeline.runner.launch

    def counting(batch, before):
        counts.append(len(batch.input_ids))
        return launch(batch, before)

    monkeypatch.setattr(llm.engine._pipeline.runner, "launch", counting)
    return counts


@pytest.mark.parametrize("budget", [1, 3, B, B + 1, 64])
def test_prompt_longer_than_the_token_budget_is_chunked(make, prompts, monkeypatch, budget):
    llm = make(max_num_batched_tokens=budget)
    counts = count_computed(llm, monkeypatch)
    generate(llm, [prompts[100]], GREEDY.clone(max_tokens=1))
    assert counts == [budget] * (100 // budget) + [100 % budget] * (100 % budget > 0)
    assert llm.stats().steps == len(counts)


def test_long_prompts_do_not_starve_decoding(make):
    """Each running sequence gets a token on each step while prompts of 200 tokens are computed."""
    llm = make(max_num_batched_tokens=8)
    engine, params = llm.engine, GREEDY.clone(max_tokens=None)
    decoding = [engine.make_request([i], params) for i in range(3)]
    for request in decoding:
        engine.add_request(request)
    engine.step()
    long = [engine.make_request([10 + i] * 200, params) for i in range(3)]
    for request in long:
        engine.add_request(request)
    for num_steps in range(2, 42):
        engine.step()
        lengths = [request.sequences[0].num_output_tokens for request in decoding]
        assert lengths == [num_steps] * 3
    assert long[0].sequences[0].num_output_tokens == 1  # 200 tokens in 40 steps of 8 - 3
    for request in (*decoding, *long):
        engine.abort(request.request_id)


def test_step_that_can_run_nothing_raises_with_queue_sizes_and_free_blocks(
    make, prompts, monkeypatch
):
    llm = make(num_kv_blocks=20)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler.block_manager, "can_allocate", lambda *_: False)
        with pytest.raises(RuntimeError, match=r"0 running, 2 waiting, 20 of 20 blocks free"):
            generate(llm, [prompts[1], prompts[B]])
    check_idle(llm)
    assert len(generate(llm, [prompts[1]])) == 1


@pytest.mark.parametrize("budget", [B // 2, B, 64, 2048])
@pytest.mark.parametrize("shared_length", [2 * B, 3 * B, 3 * B + 5])
def test_shared_prefix_that_arrives_together_is_computed_once(
    make, prompts, monkeypatch, shared_length, budget
):
    prefix = prompts[100][:shared_length]
    together = [prefix + tail for tail in ([1, 2, 3], [4], [5, 6], [1, 2, 3])]
    solo = [ids_of(generate(make(), [prompt])) for prompt in together]
    llm = make(max_num_batched_tokens=budget)
    counts = count_computed(llm, monkeypatch)
    outputs = generate(llm, together)
    assert [[ids] for ids in ids_of(outputs)] == solo
    num_shared = shared_length // B * B
    assert [output.num_cached_tokens for output in outputs] == [0] + [num_shared] * 3
    assert llm.stats().prefix_hit_tokens == 3 * num_shared
    num_decoded = 4 * (GREEDY.max_tokens - 1)
    assert sum(counts) == sum(map(len, together)) - 3 * num_shared + num_decoded


def test_children_of_one_request_compute_their_prompt_once(make, prompts, monkeypatch):
    llm = make()
    counts = count_computed(llm, monkeypatch)
    (output,) = generate(llm, [prompts[2 * B + 1]], GREEDY.clone(n=3))
    assert sum(counts) == 2 * B + 1 + 2 + 3 * (GREEDY.max_tokens - 1)
    assert ids_of([output]) == 3 * ids_of(generate(make(), [prompts[2 * B + 1]]))


@pytest.mark.parametrize("hash_block", [None, lambda content: 7], ids=["real", "constant"])
@pytest.mark.parametrize("num_kv_blocks", [8, 13, 40])
def test_blocks_that_change_hands_are_never_stale_hits(
    make, monkeypatch, num_kv_blocks, hash_block
):
    """Prompts that share and do not share blocks, in pools that evict; every hash may collide."""
    draw = random.Random(num_kv_blocks)
    pieces = [[draw.randrange(256) for _ in range(B)] for _ in range(3)]
    requests = []
    for _ in range(40):
        prompt = [i for _ in range(draw.randrange(6)) for i in draw.choice(pieces)]
        requests.append(prompt + [draw.randrange(4)] * draw.randrange(1, 6))
    params = GREEDY.clone(max_tokens=4)
    expected = ids_of(generate(make(enable_prefix_caching=False), requests, params))
    if hash_block is not None:
        monkeypatch.setattr("nanoinfer.block_manager._hash_block", hash_block)
    llm = make(num_kv_blocks=num_kv_blocks, max_model_len=7 * B)
    outputs = generate(llm, requests[:20], params)
    for request in requests[20:]:
        outputs += generate(llm, [request], params)
    assert ids_of(outputs) == expected
    assert llm.stats().prefix_hit_tokens > 0


def test_tail_of_a_cached_prompt_is_evicted_before_its_head(make, prompts):
    llm = make(num_kv_blocks=8, max_model_len=7 * B)
    generate(llm, [prompts[100]], GREEDY.clone(max_tokens=1))  # 6 full blocks and a part
    generate(llm, [[3] * 4 * B], GREEDY.clone(max_tokens=1))  # 4 blocks: 2 that were free, 2 more
    (output,) = generate(llm, [prompts[100]], GREEDY.clone(max_tokens=1))
    assert output.num_cached_tokens == 4 * B


def test_outputs_are_in_the_order_of_inputs(make, prompts):
    """Short and long ones, which end in another order than they came, preempted, too."""
    each = list(prompts.values())
    params = [GREEDY.clone(max_tokens=m) for m in (30, 1, 20, 2, 10, 3)]
    for options in ({}, {"num_kv_blocks": 9, "max_model_len": 144}, {"max_num_seqs": 2}):
        outputs = make(**options).generate(each, params, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == each
        assert [len(ids) for ids in ids_of(outputs)] == [30, 1, 20, 2, 10, 3]
        assert all(output.finished for output in outputs)
        numbers = [int(output.request_id) for output in outputs]
        assert numbers == sorted(numbers)


def test_counters_tell_what_runs_and_waits(make, prompts):
    llm = make(max_num_seqs=2, num_kv_blocks=20)
    assert llm.stats().steps == 0
    stream = llm.stream([prompts[B + 1]] * 3 + [prompts[1]], GREEDY)
    next(stream)
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (2, 2)
    assert stats.steps >= 1
    assert stats.total_blocks == 20
    # 18 tokens in two blocks; the second request shares the first of them or still waits for it.
    assert stats.free_blocks in (17, 18)
    assert len(list(stream)) > 12
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, 20)
    assert stats.preemptions == 0
    assert stats.prefix_hit_tokens == 2 * B


def test_metrics_are_in_order(llm):
    (output,) = generate(llm, "Hello")
    metrics = output.metrics
    times = (metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time)
    assert list(times) == sorted(times)
    assert metrics.first_token_time <= metrics.finished_time


# Exceptions


def fail_once(monkeypatch, owner, name, error, on_call, after=False):
    """Let `owner.name` raise `error` on its n-th call, before or after it did its work."""
    original, num_calls = getattr(owner, name), 0

    def flaky(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        if num_calls != on_call:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, flaky)


PLACES = {
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "prefix": lambda engine: (engine.scheduler.block_manager, "find_prefix"),
    "allocate": lambda engine: (engine.scheduler.block_manager, "allocate"),
    "run": lambda engine: (engine._pipeline.runner, "launch"),
    "register": lambda engine: (engine.scheduler.block_manager, "register"),
    "commit": lambda engine: (engine.scheduler, "commit"),
    "free": lambda engine: (engine.scheduler.block_manager, "free"),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("on_call", [1, 2, 5])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=repr)
def test_next_generate_is_clean_after_an_exception_in_a_step(
    make, prompts, tiny_qwen3, monkeypatch, error, place, on_call, after
):
    llm = make(num_kv_blocks=9, max_model_len=144, max_num_batched_tokens=40)
    each = list(prompts.values())
    owner, name = PLACES[place](llm.engine)
    with monkeypatch.context() as patch:
        fail_once(patch, owner, name, error, on_call, after)
        with pytest.raises(type(error)):
            generate(llm, each)
    check_idle(llm)
    outputs = generate(llm, each[::-1])
    assert [output.prompt_token_ids for output in outputs] == each[::-1]
    assert ids_of(outputs) == [hf_greedy(tiny_qwen3, prompt, 12) for prompt in each[::-1]]


@pytest.mark.parametrize("place", ["prefix", "run", "commit"])
@pytest.mark.parametrize("on_call", [1, 2, 3])
def test_stream_under_way_survives_an_exception_in_anothers_step(
    make, prompts, tiny_qwen3, monkeypatch, place, on_call
):
    llm = make()
    stream = llm.stream([prompts[2 * B + 1], prompts[B]], GREEDY)
    items = [next(stream)]
    owner, name = PLACES[place](llm.engine)
    with monkeypatch.context() as patch:
        fail_once(patch, owner, name, RuntimeError("broken"), on_call)
        with pytest.raises(RuntimeError, match="broken"):
            generate(llm, [prompts[1], prompts[100], prompts[100]])
    found = collect([*items, *stream])
    expected = [hf_greedy(tiny_qwen3, prompts[length], 12) for length in (2 * B + 1, B)]
    assert [answer[0] for _, answer in sorted(found.items())] == expected


def test_interrupt_from_the_keyboard_at_any_time_leaves_a_clean_engine(make, prompts, tiny_qwen3):
    """Ctrl-C at each of many lines of one run, as a trace function that raises."""
    llm = make(num_kv_blocks=9, max_model_len=144, max_num_batched_tokens=40)
    each = [prompts[length] for length in (2 * B + 1, 1, 2 * B + 1)]
    expected = [hf_greedy(tiny_qwen3, prompt, 4) for prompt in each]
    params = GREEDY.clone(max_tokens=4)

    def interrupt_after(num_lines):
        def trace(frame, event, arg):
            nonlocal num_lines
            name = Path(frame.f_code.co_filename)
            if name.parent.name != "nanoinfer" or frame.f_code.co_name in ("abort", "_abort_all"):
                return None
            inside = frame
            while inside is not None and inside.f_code.co_name != "step":
                inside = inside.f_back
            if inside is None or name.name not in ("scheduler.py", "block_manager.py", "llm.py"):
                return trace
            if event == "line":
                num_lines -= 1
                if num_lines == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        return trace

    before = sys.gettrace()
    num_interrupted = 0
    for num_lines in range(1, 3000, 17):
        try:
            sys.settrace(interrupt_after(num_lines))
            generate(llm, each, params)
        except KeyboardInterrupt:
            num_interrupted += 1
        else:
            break
        finally:
            sys.settrace(before)
        check_idle(llm)
        assert ids_of(generate(llm, each, params)) == expected, num_lines
    assert num_interrupted > 20


# Several engines, threads, closing


def test_two_engines_at_once_do_not_mix(make, tiny, prompts, tiny_qwen3):
    other_folder = tiny("tiny-llama")
    others = good_prompts(other_folder, [B + 1, 2 * B + 1], 12)
    one, two = make(), make(other_folder, kernels="ref")
    streams = one.stream(prompts[2 * B + 1], GREEDY), two.stream(others[2 * B + 1], GREEDY)
    tokens = [[], []]
    for items in zip(*streams, strict=True):
        for item, ids in zip(items, tokens, strict=True):
            ids += item.outputs[0].token_ids
    for stream in streams:
        stream.close()
    assert tokens[0] == hf_greedy(tiny_qwen3, prompts[2 * B + 1], 12)
    assert tokens[1] == hf_greedy(other_folder, others[2 * B + 1], 12)


def test_engines_one_after_the_other_work(tiny_qwen3, prompts):
    expected = hf_greedy(tiny_qwen3, prompts[B], 12)
    for _ in range(3):
        with LLM(tiny_qwen3, dtype="float32") as llm:
            assert ids_of(generate(llm, [prompts[B]])) == [expected]


def test_engine_serves_several_threads(make, prompts, tiny_qwen3):
    llm = make(num_kv_blocks=20)
    found: dict[int, list[list[int]]] = {}

    def work(length):
        found[length] = [ids for _ in range(3) for ids in ids_of(generate(llm, [prompts[length]]))]

    threads = [threading.Thread(target=work, args=(length,)) for length in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for length, prompt in prompts.items():
        assert found[length] == [hf_greedy(tiny_qwen3, prompt, 12)] * 3


def test_use_after_with_is_a_runtime_error(tiny_qwen3):
    with LLM(tiny_qwen3, dtype="float32") as llm:
        unfinished = llm.stream("Hello", GREEDY)
        next(unfinished)
    with pytest.raises(RuntimeError, match="closed"):
        generate(llm, "Hello")
    with pytest.raises(RuntimeError, match="closed"):
        list(llm.stream("Hello"))
    with pytest.raises(RuntimeError, match="closed"):
        llm.chat(MESSAGES, GREEDY, use_tqdm=False)
    ((*_, finish_reason, _),) = collect(unfinished).values()
    assert finish_reason == "abort"
    llm.close()  # again: harmless
    check_idle(llm)


# Streams


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 9, "max_model_len": 144}], ids=str)
def test_stream_items_concatenate_to_what_generate_returns(make, prompts, options, temperature, n):
    """Random bytes: half characters, too. Some answers end early, at eos or a stop."""
    each = [prompts[B], "Hello", prompts[2 * B + 1], "né"]
    params = SamplingParams(
        n=n, temperature=temperature, seed=5, max_tokens=30, stop=["\ufffd\ufffd", "e"], logprobs=2
    )
    outputs = generate(make(**options), each, params)
    llm = make(**options)
    found, logprobs = defaultdict(list), defaultdict(list)
    items = list(llm.stream(each, params))
    for item in items:
        assert [part.index for part in item.outputs] == list(range(n))
        assert any(part.token_ids or part.text or part.finish_reason for part in item.outputs)
        for part in item.outputs:
            logprobs[int(item.request_id), part.index] += part.logprobs
    found = {(int(r), i): answer for (r, i), answer in collect(items).items()}
    assert [found[key] for key in sorted(found)] == whole(outputs)
    assert [logprobs[key] for key in sorted(logprobs)] == [
        answer.logprobs for output in outputs for answer in output.outputs
    ]
    last = {item.request_id: item for item in items}
    assert all(item.finished for item in last.values())
    assert [item.finished for item in items].count(True) == len(each)


def test_text_is_the_one_shot_decode_of_the_ids(llm):
    """Of all but the end; random bytes and ids that have no token."""
    params = SamplingParams(n=8, temperature=2.0, seed=1, max_tokens=60)
    tokenizer = llm.get_tokenizer()
    (output,) = generate(llm, "Hello", params)
    for answer in output.outputs:
        ids = answer.token_ids[: -1 if answer.finish_reason == "stop" else None]
        assert answer.text == tokenizer.decode(ids, skip_special_tokens=True)
    (output,) = generate(llm, "Hello", params.clone(skip_special_tokens=False, ignore_eos=True))
    for answer in output.outputs:
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=False)


def test_detokenize_false_gives_ids_without_text(llm, prompts, tiny_qwen3):
    answer = answer_of(llm, [prompts[B]], GREEDY.clone(detokenize=False))
    assert (answer.token_ids, answer.text) == (hf_greedy(tiny_qwen3, prompts[B], 12), "")


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 1}], ids=["running", "waiting"])
@pytest.mark.parametrize("victim", [0, 1])
def test_abort_from_inside_a_stream_ends_that_request_alone(
    make, prompts, tiny_qwen3, options, victim
):
    llm = make(**options)
    each = [prompts[B + 1], prompts[2 * B + 1]]
    items, ids, is_aborted = [], [], False
    for item in llm.stream(each, GREEDY):
        items.append(item)
        if item.request_id not in ids:
            ids.append(item.request_id)
        if not is_aborted and len(items) == 4:
            is_aborted = True
            target = str(min(map(int, ids)) + victim)
            assert llm.abort(target)
            assert not llm.abort(target)
            stats = llm.stats()
            assert stats.running + stats.waiting == 1
    found = [answer for _, answer in sorted(collect(items).items(), key=lambda kv: int(kv[0][0]))]
    assert [answer[2] for answer in found][victim] == "abort"
    expected = [hf_greedy(tiny_qwen3, prompt, 12) for prompt in each]
    assert found[1 - victim][0] == expected[1 - victim]
    assert found[1 - victim][2] == "length"
    num_tokens = len(found[victim][0])
    assert num_tokens < 12
    assert found[victim][0] == expected[victim][:num_tokens]
    assert not llm.abort("unknown")


def test_a_streams_text_is_read_while_no_other_thread_steps(llm, prompts, monkeypatch):
    """Reading makes the text; a step of another thread may append to it."""
    was_free = []
    delta = Request.delta

    def try_lock() -> None:
        was_free.append(llm.engine.lock.acquire(blocking=False))
        if was_free[-1]:
            llm.engine.lock.release()

    def observed(request: Request) -> RequestOutput | None:
        thread = threading.Thread(target=try_lock)
        thread.start()
        thread.join()
        return delta(request)

    monkeypatch.setattr(Request, "delta", observed)
    assert list(llm.stream(prompts[B], GREEDY))
    assert was_free
    assert not any(was_free)


def test_stream_closed_early_frees_its_blocks_at_once(llm, prompts):
    for num_items in (1, 2, 7):
        stream = llm.stream(list(prompts.values()), GREEDY.clone(n=2))
        for _ in range(num_items):
            next(stream)
        assert llm.stats().running > 0
        stream.close()
        check_idle(llm)
    for _ in llm.stream("Hello", GREEDY):
        break
    check_idle(llm)
    llm.stream("Hello", GREEDY)  # never begun
    check_idle(llm)


def test_exception_in_the_loop_over_a_stream_frees_its_blocks(llm):
    def consume():
        for _ in llm.stream("Hello", GREEDY):
            raise RuntimeError("the user's")

    with pytest.raises(RuntimeError, match="the user's"):
        consume()
    check_idle(llm)


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 9, "max_model_len": 144}], ids=str)
def test_stream_beside_generate_gives_what_each_gives_alone(make, prompts, tiny_qwen3, options):
    llm = make(**options)
    streamed = [prompts[2 * B + 1], prompts[100]]
    params = GREEDY.clone(max_tokens=12)
    items = []
    for item in llm.stream(streamed, params):
        items.append(item)
        if len(items) in (1, 3, 9):
            beside = [prompts[B], prompts[2 * B + 1], prompts[1]]
            outputs = generate(llm, beside, GREEDY.clone(max_tokens=2))
            assert ids_of(outputs) == [hf_greedy(tiny_qwen3, prompt, 2) for prompt in beside]
    found = [answer for _, answer in sorted(collect(items).items(), key=lambda kv: int(kv[0][0]))]
    assert [answer[0] for answer in found] == [
        hf_greedy(tiny_qwen3, prompt, 12) for prompt in streamed
    ]


def test_two_streams_interleave(llm, prompts, tiny_qwen3):
    streams = [llm.stream(prompts[length], GREEDY) for length in (B, 2 * B + 1)]
    items = [next(streams[1]), *streams[0], *streams[1]]
    found = {tuple(answer[0]) for answer in collect(items).values()}
    assert found == {tuple(hf_greedy(tiny_qwen3, prompts[n], 12)) for n in (B, 2 * B + 1)}


# Log probabilities


def check_row(row, expected, token_id, count, decode):
    """One position's candidates against transformers' [V] log-softmax."""
    top = expected.topk(count).indices.tolist() if count else []
    assert set(row) == {token_id, *top}
    for candidate_id, candidate in row.items():
        assert candidate.logprob == pytest.approx(float(expected[candidate_id]), abs=1e-4)
        rank = int((expected > expected[candidate_id]).sum()) + 1
        assert candidate.rank == rank
        assert candidate.decoded_token == decode([candidate_id])


@pytest.mark.parametrize("count", [0, 1, 5, -1])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(
            temperature=0.3, top_k=10, top_p=0.9, min_p=0.01, seed=2, repetition_penalty=1.3,
            presence_penalty=1.0, frequency_penalty=0.5, logit_bias={5: 20.0}, min_tokens=3,
        ),
    ],
    ids=["greedy", "sampled"],
)  # fmt: skip
def test_logprobs_are_transformers_and_raw(llm, tiny_qwen3, prompts, params, count):
    prompt, decode = prompts[2 * B + 1], llm.get_tokenizer().decode
    (output,) = generate(llm, [prompt, "neighbour"], params.clone(logprobs=count))[:1]
    answer = output.outputs[0]
    expected = hf_logprobs(tiny_qwen3, prompt + answer.token_ids)[len(prompt) - 1 :]
    assert len(answer.logprobs) == len(answer.token_ids)
    for i, (token_id, row) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        check_row(row, expected[i], token_id, VOCAB_SIZE if count < 0 else count, decode)
    total = sum(row[i].logprob for i, row in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_logprobs_are_none_unless_asked_for(llm):
    (output,) = generate(llm, "Hello")
    answer = output.outputs[0]
    assert answer.logprobs is answer.cumulative_logprob is output.prompt_logprobs is None


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("how", ["cold", "warm", "budget 3", "budget 17", "preempted"])
def test_prompt_logprobs_are_transformers(make, tiny_qwen3, prompts, how, kernels, count):
    options = {"kernels": kernels}
    if how.startswith("budget"):
        options["max_num_batched_tokens"] = int(how.split()[1])
    if how == "preempted":
        options |= {"num_kv_blocks": 9, "max_model_len": 144, "max_num_batched_tokens": 30}
    llm = make(**options)
    each = [prompts[length] for length in (2 * B + 1, B, 100, 1, 2 * B + 1)]
    if how == "warm":
        generate(llm, each)
    params = GREEDY.clone(prompt_logprobs=count, max_tokens=30, n=2)
    outputs = generate(llm, each, params)
    assert (how == "preempted") == (llm.stats().preemptions > 0)
    decode = llm.get_tokenizer().decode
    for prompt, output in zip(each, outputs, strict=True):
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        expected = hf_logprobs(tiny_qwen3, prompt)
        for t in range(1, len(prompt)):
            check_row(output.prompt_logprobs[t], expected[t - 1], prompt[t], count, decode)
        for ids in ids_of([output]):
            assert ids[:12] == hf_greedy(tiny_qwen3, prompt, 12)


def test_prompt_logprobs_are_whole_after_preemption_amid_the_prompt(make, tiny_qwen3, prompts):
    """The first request's answer grows and takes the blocks that the second's prompt needs."""
    llm = make(num_kv_blocks=9, max_model_len=144, max_num_batched_tokens=3)
    params = [GREEDY.clone(max_tokens=120), GREEDY.clone(prompt_logprobs=0, n=2)]
    prompt, num_preempted = prompts[100], 0
    for last in llm.stream([prompts[B], prompt], params):
        if last.prompt_token_ids == prompts[B]:  # the other has no token yet
            num_preempted = llm.stats().preemptions
    assert num_preempted > 0
    assert len(last.prompt_logprobs) == len(prompt)
    expected = hf_logprobs(tiny_qwen3, prompt)
    for t in range(1, len(prompt)):
        row = last.prompt_logprobs[t]
        assert list(row) == [prompt[t]]
        assert row[prompt[t]].logprob == pytest.approx(float(expected[t - 1, prompt[t]]), abs=1e-4)


# Processes


PROGRAM = """
import sys
from nanoinfer import LLM, SamplingParams
llm = LLM({folder!r}, dtype="float32")
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
print([o.outputs[0].token_ids for o in llm.generate({prompts!r}, params, use_tqdm=False)])
print(llm.stats().kernels)
other = LLM({folder!r}, dtype="float32", kernels="ref")
unfinished = other.stream("Hello", params)
next(unfinished)
import torch.distributed
assert not torch.distributed.is_initialized()
"""


def run_program(tiny_qwen3, prompts, **environment):
    each = [prompts[B], prompts[2 * B + 1]]
    code = PROGRAM.format(folder=str(tiny_qwen3), prompts=each)
    root = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ids, kernels = done.stdout.splitlines()
    assert json.loads(ids) == [hf_greedy(tiny_qwen3, prompt, 12) for prompt in each]
    return kernels, done.stderr


def test_leaving_the_interpreter_is_clean_and_silent(tiny_qwen3, prompts):
    """With two engines and a stream that is still open."""
    _, stderr = run_program(tiny_qwen3, prompts)
    assert stderr == ""


def test_without_a_compiler_ids_are_the_same_after_one_warning(tiny_qwen3, prompts, tmp_path):
    environment = {"CXX": "/bin/false", "XDG_CACHE_HOME": str(tmp_path)}
    kernels, stderr = run_program(tiny_qwen3, prompts, **environment)
    assert kernels == "ref"
    (line,) = stderr.splitlines()
    assert "C++" in line
    assert "/bin/false" in line
