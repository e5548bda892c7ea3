"""Greedy ids equal transformers' in fp32, whatever the batch, chunks, prefix cache or preemption.

Every checkpoint of tiny.py meets every token budget, with both kernel sets. Prompts have the
lengths at which blocks and chunks begin and end; their continuations vary from token to token and
lead by a margin that rounding cannot bridge (oracle.py), so any difference is a fault.
"""

import pytest
import torch
from oracle import good_prompts, hf_greedy
from tiny import TINY_NAMES

from nanoinfer import LLM, RequestOutput, SamplingParams

B = 16
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 2 * B + 1, 100]
BUDGETS = [1, 3, B, B + 1, 64]
KERNELS = ["ref", "auto"]
NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONGEST = LENGTHS[-1] + NUM_TOKENS


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny operations only wait for other threads, for whole time slices on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=TINY_NAMES)
def folder(request, tiny):
    return tiny(request.param)


def make_llm(folder, **options):
    return LLM(folder, dtype="float32", max_model_len=LONGEST, **options)


def prompts_of(folder):
    return list(good_prompts(folder, LENGTHS, NUM_TOKENS).values())


def generate(llm, prompts, params=PARAMS) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def check(folder, prompts, outputs):
    """Each output is its own prompt's, is right and whole."""
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.token_ids == hf_greedy(folder, prompt, NUM_TOKENS), len(prompt)
        assert answer.finish_reason == "length"
        assert 0 <= output.num_cached_tokens < len(prompt)


def check_idle(llm):
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.free_blocks == stats.total_blocks


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_cold_and_warm_batches_equal_transformers(folder, budget, kernels):
    prompts = prompts_of(folder)
    llm = make_llm(folder, max_num_batched_tokens=budget, kernels=kernels)
    cold = generate(llm, prompts)
    check(folder, prompts, cold)
    assert [output.num_cached_tokens for output in cold] == [0] * len(prompts)
    warm = generate(llm, prompts)
    check(folder, prompts, warm)
    # All whole blocks, but the one whose last token must be computed for its logits.
    cached = [(length - 1) // B * B for length in LENGTHS]
    assert [output.num_cached_tokens for output in warm] == cached
    assert llm.stats().prefix_hit_tokens == sum(cached) > 0
    assert llm.stats().preemptions == 0
    check_idle(llm)


@pytest.mark.parametrize("kernels", KERNELS)
def test_prompts_alone_equal_transformers(folder, kernels):
    prompts = prompts_of(folder)
    llm = make_llm(folder, kernels=kernels)
    check(folder, prompts, [generate(llm, [prompt])[0] for prompt in prompts])
    # A warm prefix, alone: backwards, so that the last prompt computed is not the next one asked.
    check(folder, prompts[::-1], [generate(llm, [prompt])[0] for prompt in prompts[::-1]])
    check_idle(llm)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("budget", [3, 64])
def test_without_prefix_cache_nothing_is_cached(folder, budget, kernels):
    prompts = prompts_of(folder)
    llm = make_llm(
        folder, max_num_batched_tokens=budget, kernels=kernels, enable_prefix_caching=False
    )
    for _ in range(2):
        outputs = generate(llm, prompts)
        check(folder, prompts, outputs)
        assert not any(output.num_cached_tokens for output in outputs)
    assert llm.stats().prefix_hit_tokens == 0
    check_idle(llm)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_continuation_of_a_warm_answer_equals_transformers(tiny_qwen3, budget, kernels):
    """As in a chat: prompt, answer and more; blocks that decoding filled are found, too."""
    (prompt,) = good_prompts(tiny_qwen3, [2 * B + 1], 2 * B).values()
    expected = hf_greedy(tiny_qwen3, prompt, 2 * B)
    params = PARAMS.clone(max_tokens=B)
    llm = make_llm(tiny_qwen3, max_num_batched_tokens=budget, kernels=kernels)
    (first,) = generate(llm, prompt, params)
    assert first.outputs[0].token_ids == expected[:B]
    (second,) = generate(llm, prompt + expected[:B], params)
    assert second.outputs[0].token_ids == expected[B:]
    assert second.num_cached_tokens == 3 * B


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize(("budget", "num_kv_blocks"), [(B + 1, 9), (64, 7)])
def test_preemption_is_invisible(folder, budget, num_kv_blocks, is_caching, kernels):
    """A pool for little more than the longest prompt; twins take turns in losing their blocks."""
    prompts = prompts_of(folder) + prompts_of(folder)[::-1]
    llm = make_llm(
        folder,
        max_num_batched_tokens=budget,
        num_kv_blocks=num_kv_blocks,
        enable_prefix_caching=is_caching,
        kernels=kernels,
    )
    for _ in range(2):  # the second time beside what the cache still holds
        check(folder, prompts, generate(llm, prompts))
        check_idle(llm)
    assert 0 < llm.stats().preemptions < 2 * len(prompts) * NUM_TOKENS
    assert llm.stats().total_blocks == num_kv_blocks


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("budget", [3, 5, B, 64])
def test_preemption_amid_long_answers_is_invisible(tiny_qwen3, budget, is_caching, kernels):
    """Each ends with 4 blocks of a pool of 7: what was generated is computed again, in chunks."""
    num_tokens = 3 * B - 1
    prompts = list(good_prompts(tiny_qwen3, [B - 1, B, B + 1], num_tokens).values())
    llm = make_llm(
        tiny_qwen3,
        max_num_batched_tokens=budget,
        num_kv_blocks=7,
        enable_prefix_caching=is_caching,
        kernels=kernels,
    )
    outputs = generate(llm, prompts, PARAMS.clone(max_tokens=num_tokens))
    expected = [hf_greedy(tiny_qwen3, prompt, num_tokens) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert 0 < llm.stats().preemptions < 3 * num_tokens
    check_idle(llm)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 6, 7, 8])
def test_every_max_num_seqs_equals_transformers(tiny_qwen3, max_num_seqs):
    prompts = prompts_of(tiny_qwen3)
    llm = make_llm(tiny_qwen3, max_num_seqs=max_num_seqs)
    check(tiny_qwen3, prompts, generate(llm, prompts))
    check_idle(llm)


@pytest.mark.parametrize("block_size", [1, 2, 5, 32, 128])
def test_every_block_size_equals_transformers(tiny_qwen3, block_size):
    prompts = prompts_of(tiny_qwen3)
    llm = make_llm(tiny_qwen3, block_size=block_size, max_num_batched_tokens=17)
    check(tiny_qwen3, prompts, generate(llm, prompts))
    warm = generate(llm, prompts)
    check(tiny_qwen3, prompts, warm)
    cached = [(length - 1) // block_size * block_size for length in LENGTHS]
    assert [output.num_cached_tokens for output in warm] == cached
    check_idle(llm)
