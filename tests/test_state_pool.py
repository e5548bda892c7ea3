"""Recurrent states: who owns a slot, where states are kept, and that nobody sees another's.

The first part has no model; the second runs tiny-qwen3_5 and compares with transformers.
"""

import numpy as np
import pytest
import torch
from oracle import good_prompts, hf_greedy, hf_logprobs, load_model
from test_cuda_graphs import tensors_of

from nanoinfer import LLM, SamplingParams
from nanoinfer.block_manager import BlockManager
from nanoinfer.positions import ImagePositions
from nanoinfer.request import Request
from nanoinfer.scheduler import SampledTokens, Scheduler
from nanoinfer.sequence import Sequence
from nanoinfer.state_pool import StatePool

B = 4
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def make_scheduler(max_num_seqs=4, max_snapshots=4, budget=100, num_blocks=100):
    return Scheduler(
        lambda: BlockManager(num_blocks, B),
        max_num_seqs,
        budget,
        lambda: StatePool(max_num_seqs, max_snapshots, B),
    )


def add(scheduler, prompt, max_tokens=4, name="r"):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    options = {"eos_token_ids": frozenset(), "max_model_len": 100}
    request = Request(name, None, list(prompt), params, **options)
    request.sequences = [Sequence(request, 0, 0, None)]
    scheduler.add(request.sequences[0])
    return request.sequences[0]


def run_step(scheduler):
    """One step: (start, number of tokens, source, slot) of each entry."""
    step = scheduler.schedule()
    shares = [(s.start, s.num_tokens, s.seq.state.source, s.seq.state.slot) for s in step]
    scheduler.commit(step, [SampledTokens([7] if s.is_sampling else []) for s in step])
    return shares


def drain(scheduler):
    while scheduler.has_work:
        run_step(scheduler)


def test_a_prompt_stops_behind_its_last_full_block_and_goes_on_in_another_slot():
    scheduler = make_scheduler()
    add(scheduler, range(10, 20))
    assert run_step(scheduler) == [(0, 8, 0, 1)]
    assert run_step(scheduler) == [(8, 2, 1, 2)]
    assert run_step(scheduler) == [(10, 1, 2, 2)]


def test_a_prompt_of_whole_blocks_stops_before_the_last_one():
    """Its last token is always computed, so that an equal prompt can start no later."""
    scheduler = make_scheduler()
    add(scheduler, range(10, 18))
    assert [n for _, n, *_ in run_step(scheduler)] == [4]
    assert [n for _, n, *_ in run_step(scheduler)] == [4]


def test_without_snapshots_a_state_stays_in_its_slot():
    scheduler = make_scheduler(max_snapshots=0)
    add(scheduler, range(10, 20))
    assert run_step(scheduler) == [(0, 10, 0, 1)]
    assert run_step(scheduler) == [(10, 1, 1, 1)]


def test_an_equal_prompt_starts_from_the_snapshot_and_leaves_it_alone():
    scheduler = make_scheduler()
    add(scheduler, range(10, 20))
    drain(scheduler)
    again = add(scheduler, range(10, 20))
    ((start, n, source, slot),) = run_step(scheduler)
    assert (start, n) == (8, 2)
    assert source not in (0, slot)
    assert again.num_cached_tokens == 8


def test_the_point_where_prompts_part_is_kept_when_it_is_seen_again():
    """The first has none there, the second leaves one for the third."""
    scheduler = make_scheduler(max_snapshots=20)
    shared = list(range(10, 22))
    cached = []
    for i in range(3):
        seq = add(scheduler, [*shared, *[50 + i] * 7])
        drain(scheduler)
        cached.append(seq.num_cached_tokens)
    assert cached == [0, 0, 12]


def test_prompts_that_arrive_together_wait_for_the_point_where_they_part():
    scheduler = make_scheduler(max_num_seqs=8, max_snapshots=20)
    shared = list(range(10, 22))
    seqs = [add(scheduler, [*shared, *[50 + i] * 7], name=str(i)) for i in range(6)]
    drain(scheduler)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 12, 12, 12, 12]


def test_who_waits_for_a_plan_goes_on_when_it_was_given_up():
    """The planner is aborted, or finds no slot to keep its state in."""
    scheduler = make_scheduler(max_num_seqs=8, max_snapshots=20, budget=6)
    shared = list(range(10, 22))
    add(scheduler, [*shared, *[50] * 7])
    drain(scheduler)
    planner, waiter = (add(scheduler, [*shared, *[n] * 7], name=str(n)) for n in (51, 52))
    run_step(scheduler)
    assert (scheduler.running, list(scheduler.waiting)) == ([planner], [waiter])
    scheduler.abort(planner)
    run_step(scheduler)
    assert scheduler.running == [waiter]


def test_nobody_waits_for_what_cannot_be_resumed():
    """Without snapshots an equal prompt gains nothing by waiting for the first one."""
    scheduler = make_scheduler(max_snapshots=0, budget=8)
    for name in "ab":
        add(scheduler, range(10, 14), name=name)
    assert len(run_step(scheduler)) == 2


def test_a_snapshot_lives_on_with_the_copy_of_its_block():
    """Prompts that part compute shared blocks again; when the first copies go, theirs stay."""
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=12, max_snapshots=8)
    shared = list(range(10, 22))
    add(scheduler, [*shared, *[50] * 5], max_tokens=1)
    drain(scheduler)
    holder = add(scheduler, [*shared, *[51] * 5], max_tokens=60)
    run_step(scheduler)
    run_step(scheduler)
    first = scheduler.block_manager.find_prefix(add(scheduler, [*shared, 1], name="x"))
    assert not set(first) & set(holder.block_table), "the holder's are copies"
    scheduler.abort(scheduler.waiting[-1])
    other = add(scheduler, range(100, 128), max_tokens=1)  # takes all that is free
    while not other.is_finished:
        run_step(scheduler)
    third = add(scheduler, [*shared, *[52] * 3], max_tokens=1)
    assert scheduler.caches.find_prefix(third).blocks == holder.block_table[:3]


def test_the_next_turn_of_a_chat_starts_behind_the_answer():
    scheduler = make_scheduler()
    first = add(scheduler, range(10, 20), max_tokens=8)
    drain(scheduler)
    second = add(scheduler, [*first.token_ids, 90, 91])
    drain(scheduler)
    assert second.num_cached_tokens == 16


def test_an_answer_keeps_one_state_and_takes_nobody_elses_place():
    scheduler = make_scheduler(max_snapshots=2)
    seq = add(scheduler, range(10, 20), max_tokens=30)
    run_step(scheduler)
    counts = set()
    while scheduler.has_work:
        run_step(scheduler)
        counts.add(scheduler.caches.states.num_snapshots)
    assert counts == {1, 2}
    again = add(scheduler, range(10, 20))
    drain(scheduler)
    assert again.num_cached_tokens == 8, "the prompt's snapshot is still there"
    longer = add(scheduler, seq.token_ids)
    drain(scheduler)
    assert longer.num_cached_tokens == 36


def test_the_least_recently_used_snapshot_goes_first():
    scheduler = make_scheduler(max_snapshots=2)

    def ask(first):
        seq = add(scheduler, range(first, first + 6), max_tokens=1)
        drain(scheduler)
        return seq.num_cached_tokens

    assert [ask(100), ask(200), ask(100), ask(300)] == [0, 0, 4, 0]
    assert [ask(100), ask(200)] == [4, 0]


def test_a_snapshot_dies_with_the_block_that_leads_to_it():
    scheduler = make_scheduler(num_blocks=4)
    states = scheduler.caches.states
    add(scheduler, range(10, 16), max_tokens=1)
    drain(scheduler)
    assert states.num_snapshots == 1
    add(scheduler, range(100, 114), max_tokens=1)
    drain(scheduler)
    assert scheduler.caches.find_prefix(add(scheduler, range(10, 16))).blocks == []
    assert states.num_snapshots == 1
    assert states.num_free_slots == states.num_slots - 1


def test_a_slot_is_not_free_while_somebody_is_about_to_read_it():
    """Even when nobody can find it any more: its block was evicted."""
    scheduler = make_scheduler()
    states = scheduler.caches.states
    seq = add(scheduler, range(10, 20))
    run_step(scheduler)
    assert seq.state.source == 1
    states.forget(seq.chain_id)
    assert 1 not in states._free
    ((_, _, source, slot),) = run_step(scheduler)
    assert (source, slot) == (1, 2)
    assert 1 in states._free


def test_abort_preemption_and_reset_give_slots_back():
    scheduler = make_scheduler()
    states = scheduler.caches.states
    seq = add(scheduler, range(10, 20))
    run_step(scheduler)
    scheduler.abort(seq)
    assert states.num_free_slots + states.num_snapshots == states.num_slots
    seq = add(scheduler, range(30, 50))
    run_step(scheduler)
    scheduler.reset([seq])
    assert scheduler.caches.states.num_free_slots == states.num_slots
    assert (seq.state.source, seq.state.slot) == (0, 0)
    drain(scheduler)


# -- with a model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tiny):
    return tiny("tiny-qwen3_5")


def make_llm(folder, **options):
    options = {"block_size": B, "num_kv_blocks": 400, **options}
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, **options)


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def add_request(llm, prompt):
    request = llm.engine.make_request(prompt, GREEDY)
    llm.engine.add_request(request)
    return request


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def poison(llm):
    """NaN in every slot that nobody owns: who reads it shows."""
    states = llm.engine.scheduler.caches.states
    for cache in llm.engine._pipeline.runner._caches:
        if hasattr(cache, "state"):
            for slot in (0, *states._free):
                cache.state[slot] = torch.nan
                cache.conv[slot] = torch.nan


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-qwen3-moe-dense", "tiny-qwen3_5-moe"])
def test_lengths_around_chunks_of_mixtures_equal_transformers(tiny, name):
    folder = tiny(name)
    prompts = list(good_prompts(folder, [1, 2, 3, 4, 63, 64, 65, 200], NUM_TOKENS).values())
    with make_llm(folder, max_num_batched_tokens=70) as llm:
        for _ in range(2):
            expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
            assert tokens_of(generate(llm, prompts)) == expected


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"block_size": 1}, {"kernels": "ref"}])
def test_children_and_prompt_logprobs_are_right(folder, options):
    (prompt,) = good_prompts(folder, [21], NUM_TOKENS).values()
    params = GREEDY.clone(n=3, prompt_logprobs=0)
    with make_llm(folder, **options) as llm:
        (output,) = generate(llm, [prompt], params)
    expected = hf_greedy(folder, prompt, NUM_TOKENS)
    assert [answer.token_ids for answer in output.outputs] == [expected] * 3
    right = hf_logprobs(folder, prompt)
    rows = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    found = [row[token].logprob for row, token in rows]
    assert found == pytest.approx([float(right[t, i]) for t, i in enumerate(prompt[1:])], abs=1e-4)


@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("budget", [1, 3, 7, 64, 2048])
def test_lengths_around_taps_and_chunks_equal_transformers(folder, budget, kernels):
    prompts = list(good_prompts(folder, [1, 2, 3, 4, 63, 64, 65, 200], NUM_TOKENS).values())
    expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
    with make_llm(folder, max_num_batched_tokens=budget, kernels=kernels) as llm:
        poison(llm)
        assert tokens_of(generate(llm, prompts)) == expected
        poison(llm)
        assert tokens_of(generate(llm, prompts[::-1])) == expected[::-1]
        assert llm.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("kernels", ["ref", "auto"])
def test_a_prefix_hit_at_every_block_equals_transformers(folder, kernels):
    (prompt,) = good_prompts(folder, [10 * B], NUM_TOKENS).values()
    with make_llm(folder, kernels=kernels) as llm:
        for n in range(1, 10):
            generate(llm, prompt[: n * B + 1], GREEDY.clone(max_tokens=1))
            tail = [(token + 1) % 256 for token in prompt[n * B : n * B + 3]]
            (output,) = generate(llm, [*prompt[: n * B], *tail])
            assert output.num_cached_tokens == n * B
            expected = hf_greedy(folder, [*prompt[: n * B], *tail], NUM_TOKENS)
            assert output.outputs[0].token_ids == expected


def test_states_that_are_reused_do_not_bleed(folder):
    """One slot, one request after the other; the slot keeps what the last one left."""
    prompts = list(good_prompts(folder, [5, 30, 6, 17], NUM_TOKENS).values())
    with make_llm(folder, max_num_seqs=1, enable_prefix_caching=False) as llm:
        assert llm.engine.scheduler.caches.states.num_slots == 1
        for prompt in prompts * 2:
            (found,) = tokens_of(generate(llm, [prompt]))
            assert found == hf_greedy(folder, prompt, NUM_TOKENS)


@pytest.mark.parametrize("is_caching", [True, False])
def test_preemption_and_abort_leave_the_others_right(folder, is_caching):
    prompts = list(good_prompts(folder, [9, 14, 21, 33], NUM_TOKENS).values())
    options = {"num_kv_blocks": 14, "enable_prefix_caching": is_caching}
    with make_llm(folder, max_num_batched_tokens=16, **options) as llm:
        requests = [add_request(llm, prompt) for prompt in (*prompts, prompts[0][::-1])]
        for _ in range(5):
            llm.engine.step()
        assert llm.engine.abort(requests[-1].request_id)
        while llm.engine.scheduler.has_work:
            poison(llm)
            llm.engine.step()
        expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
        assert [r.sequences[0].output_token_ids for r in requests[:-1]] == expected
        assert llm.stats().preemptions > 0
        states = llm.engine.scheduler.caches.states
        assert states.num_free_slots + states.num_snapshots == states.num_slots


def test_chats_go_on_from_their_answers(folder):
    (prompt,) = good_prompts(folder, [2 * B + 1], 4 * B).values()
    with make_llm(folder) as llm:
        history = list(prompt)
        for turn in range(3):
            (output,) = generate(llm, [history], GREEDY.clone(max_tokens=B + 1))
            assert output.num_cached_tokens == ((turn * (B + 1) + 2 * B) // B * B if turn else 0)
            assert output.outputs[0].token_ids == hf_greedy(folder, history, B + 1)
            history += output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"kv_cache_memory": 30_000}, r"states: .* bytes left, but one sequence takes .*; raise"),
        ({"state_snapshot_memory": -1}, r"state_snapshot_memory: got -1, need"),
    ],
)
def test_too_little_memory_is_named(folder, options, match):
    with pytest.raises(ValueError, match=match):
        make_llm(folder, **options)


def test_few_states_mean_few_sequences_at_once(folder):
    """The number that runs at once is lowered to what memory holds; all are answered."""
    prompts = list(good_prompts(folder, [5, 6, 7, 9], NUM_TOKENS).values())
    options = {"num_kv_blocks": 30, "kv_cache_memory": 200_000, "state_snapshot_memory": 0}
    with make_llm(folder, **options) as llm:
        sizes = llm.engine._pipeline.runner.cache_sizes
        assert 1 < sizes.max_num_seqs < 10
        assert sizes.max_snapshots == 0
        expected = [hf_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]
        assert tokens_of(generate(llm, prompts)) == expected


def test_memory_of_caches_is_within_the_budget(folder):
    with LLM(folder, kv_cache_memory=3_000_000, skip_tokenizer_init=True) as llm:
        caches = llm.engine._pipeline.runner._caches
        used = sum(t.numel() * t.itemsize for t in tensors_of(caches))
        assert 2_500_000 < used <= 3_000_000


# -- positions with three axes --------------------------------------------------------------------


def image_positions(num_before, height, width, num_after):
    """[3, T] as a picture between text gives them: its patches share a time."""
    before = np.tile(np.arange(num_before), (3, 1))
    h, w = np.divmod(np.arange(height * width), width)
    picture = np.stack([np.zeros_like(h), h, w]) + num_before
    start = num_before + max(height, width)
    after = np.tile(np.arange(start, start + num_after), (3, 1))
    return np.concatenate((before, picture, after), 1).astype(np.int64)


def hf_greedy_at(folder, ids, positions, num_tokens):
    """transformers' greedy tokens, with these positions and then one more on all axes each."""
    model, ids = load_model(folder), list(ids)
    for _ in range(num_tokens):
        more = len(ids) - positions.shape[1]
        tail = np.tile(positions.max() + 1 + np.arange(more), (3, 1))
        axes = torch.from_numpy(np.concatenate((positions, tail), 1))[:, None]
        with torch.no_grad():
            logits = model(torch.tensor([ids]), position_ids=axes, use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[-num_tokens:]


@pytest.mark.parametrize("kernels", ["ref", "auto"])
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_three_axis_positions_equal_transformers(tiny, budget, kernels):
    folder = tiny("tiny-qwen3_5-positions")
    positions = image_positions(5, 3, 4, 6)
    (ids,) = good_prompts(folder, [positions.shape[1]], NUM_TOKENS).values()
    (text,) = good_prompts(folder, [10], NUM_TOKENS).values()
    expected = hf_greedy_at(folder, ids, positions, NUM_TOKENS)
    assert expected != hf_greedy(folder, ids, NUM_TOKENS), "positions change the tokens"
    with make_llm(folder, max_num_batched_tokens=budget, kernels=kernels) as llm:
        for num_cached in (0, 20):  # cold, then from the cache
            image, plain, other = (add_request(llm, prompt) for prompt in (ids, ids, text))
            image.sequences[0].image_positions = ImagePositions(positions)
            while llm.engine.scheduler.has_work:
                llm.engine.step()
            assert image.sequences[0].output_token_ids == expected
            assert plain.sequences[0].output_token_ids == hf_greedy(folder, ids, NUM_TOKENS)
            assert other.sequences[0].output_token_ids == hf_greedy(folder, text, NUM_TOKENS)
            assert image.output().num_cached_tokens == num_cached
            assert plain.output().num_cached_tokens == num_cached
