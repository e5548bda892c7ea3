"""Sampler: the draws have the distribution that the filters leave, and depend on nothing else.

What takes `kernels` is tested with the reference and with its C++ twin, built for two CPUs.
"""

import dataclasses
import functools
import math
import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from conftest import kernel_library
from torch import Tensor

from nanoinfer import sampler
from nanoinfer.batch import Batch, SamplingBatch
from nanoinfer.kernels import Kernels, draw, gumbel, select_kernels
from nanoinfer.kernels.draw import draw_ref, make_draw_cpu
from nanoinfer.launched import collect
from nanoinfer.outputs import Logprob
from nanoinfer.request import Request
from nanoinfer.sampler import top_logprobs
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.scheduler import ScheduledSequence
from nanoinfer.sequence import Sequence

CPU = torch.device("cpu")
EOS = 2
NUM_DRAWS = 50_000
MIN_P_VALUE = 1e-3
ROUNDING = 1e-6  # of probabilities in fp32


class SamplerOutput(NamedTuple):
    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]


def sample(
    logits: Tensor,
    sampling: SamplingBatch,
    kernels: Kernels = Kernels(),  # noqa: B008
) -> SamplerOutput:
    drawn = sampler.sample(logits, sampling, kernels)
    ids = drawn.token_ids.tolist()
    return SamplerOutput(ids, collect(drawn, ids))


@pytest.fixture(params=["ref", "native", "x86-64-v3"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(draw=body(request.param))


@functools.cache
def body(name: str) -> draw.Draw:
    return draw_ref if name == "ref" else make_draw_cpu(kernel_library(name), 2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def no_endless_loop() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError("a search that does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_sequence(
    params: SamplingParams, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()
) -> Sequence:
    request = Request(
        "0", None, list(prompt), params, eos_token_ids=frozenset({EOS}), max_model_len=1 << 30
    )
    request.sequences = [Sequence(request, 0, params.seed or 0, None)]
    request.sequences[0].token_ids += output
    return request.sequences[0]


def make_batch(*sequences: Sequence) -> SamplingBatch:
    """As the engine does it: every sequence samples."""
    for seq in sequences:
        seq.block_table = [1]
    step = [ScheduledSequence(seq, len(seq) - 1, 1, True) for seq in sequences]
    sampling = Batch.build(step, 1 << 30, CPU).sampling
    assert sampling is not None
    return sampling


def make_rows(num_rows: int, seed: int = 0, **params: object) -> SamplingBatch:
    """`num_rows` positions of one sequence."""
    one = make_batch(make_sequence(SamplingParams(**params, seed=seed)))
    repeated = {
        name: value.repeat(num_rows) if isinstance(value, Tensor) else value * num_rows
        for name, value in vars(one).items()
        if isinstance(value, Tensor | list)
    }
    return dataclasses.replace(one, **repeated | {"positions": torch.arange(num_rows)})


def noise_hashes(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """24 random bits for each (seed, position, id); seeds and positions as many as ids, or one."""
    keys = gumbel.row_keys(seeds, positions)
    return gumbel.hash_ids(keys, ids.to(torch.int32)).to(torch.int64)


def filters_of(sampling: SamplingBatch) -> tuple[Tensor, Tensor, Tensor]:
    return sampling.top_k, sampling.top_p, sampling.min_p


def kept_by_sort(
    scores: Tensor, top_k: int, top_p: float, min_p: float, slack: float = 0.0
) -> Tensor:
    """The filters' definition, by a full sort in fp64: which of the scores [V] are kept.

    `slack` > 0 keeps a little less, < 0 a little more: the two sides of rounding.
    """
    probs = scores.double().softmax(-1)
    kept = probs >= min(min_p * (1 + slack), 1.0) * probs.max()
    if 0 < top_k < kept.sum():
        kept &= probs >= probs[kept].sort(descending=True).values[top_k - 1]
    if top_p < 1:
        ordered = probs[kept].sort(descending=True).values
        before = ordered.cumsum(0) - ordered  # the crossing token stays
        is_in = before < max(top_p - slack, 1e-12) * ordered.sum()
        kept &= probs >= ordered[is_in].min()
    return kept


def chi_square_p_value(counts: Tensor, expected: Tensor) -> float:
    """Probability of a fit as bad as this, by chance; cells with few expected are merged."""
    counts, expected = counts.double(), expected.double()
    few = expected < 5
    if few.any():
        counts = torch.cat([counts[~few], counts[few].sum().view(1)])
        expected = torch.cat([expected[~few], expected[few].sum().view(1)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, statistic / 2))


# The draws fit the distribution


FILTERS = {
    "temperature": (12, {"temperature": 0.7}),
    "temperature, any id may win": (100, {"temperature": 3.0}),
    "top_k": (100, {"top_k": 70}),
    "top_p": (12, {"top_p": 0.8}),
    "min_p": (100, {"min_p": 0.1}),
    "all": (100, {"temperature": 1.5, "min_p": 0.05, "top_k": 10, "top_p": 0.9}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_fit_the_filtered_distribution(name: str, kernels: Kernels):
    vocab_size, filters = FILTERS[name]
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 1.5 * torch.randn(vocab_size, generator=generator)
    params = SamplingParams(**filters)
    scores = logits / params.temperature
    kept = kept_by_sort(scores, params.top_k, params.top_p, params.min_p)
    probs = scores.double().masked_fill(~kept, -math.inf).softmax(-1)
    assert name.startswith("temperature") == bool(kept.all())
    sampling = make_rows(NUM_DRAWS, **filters)
    ids = sample(logits.repeat(NUM_DRAWS, 1), sampling, kernels).token_ids
    counts = torch.bincount(torch.tensor(ids), minlength=vocab_size)
    assert counts[~kept].sum() == 0
    assert chi_square_p_value(counts, probs * NUM_DRAWS) > MIN_P_VALUE


def test_flat_draws_are_uniform(kernels: Kernels):
    """The path where any id may win: high and low parts of the ids."""
    num_draws = 5_000
    flat = sample(torch.zeros(num_draws, 2_500), make_rows(num_draws, 5), kernels)
    ids = torch.tensor(flat.token_ids)
    for buckets in (ids // 50, ids % 50):
        counts = torch.bincount(buckets, minlength=50)
        assert chi_square_p_value(counts, torch.full((50,), num_draws / 50)) > MIN_P_VALUE


def test_chi_square_sees_a_small_error():
    """The yardstick itself: a known value, and 8% more on one of ten ids is found."""
    values = chi_square_p_value(torch.tensor([44, 56]), torch.tensor([50.0, 50.0]))
    assert values == pytest.approx(0.2301, abs=1e-4)
    expected = torch.full((10,), NUM_DRAWS / 10)
    skewed = expected.clone()
    skewed[0] *= 1.08
    skewed[1:] -= (skewed[0] - expected[0]) / 9
    assert chi_square_p_value(skewed, expected) < MIN_P_VALUE
    assert chi_square_p_value(expected, expected) == 1


# Filters: equal to a full sort


def _cases(vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(vocab_size)
    noise = torch.randn(vocab_size, generator=generator)
    yield "random", 2 * noise
    yield "flat", torch.zeros(vocab_size)
    yield "nearly flat", 0.1 * noise
    yield "peaked", 20 * noise
    # Those below the cliff are many: together they win a fifth of the draws at 50,000.
    yield "cliff", torch.where(torch.arange(vocab_size) % (vocab_size // 63 + 1) == 0, 0.0, -8.0)
    # Means of many equal scores round to either side of them.
    for level in (-0.0137, -0.0411, -1.3):
        yield (
            f"one above {level}",
            torch.full((vocab_size,), level).index_fill(0, torch.tensor(2), 0.0),
        )
    yield "tied", (2 * noise).round()
    masked = torch.rand(vocab_size, generator=generator) < 0.3
    masked[int(noise.argmax())] = False
    yield "masked", noise.masked_fill(masked, -math.inf)
    yield "nearly flat and masked", (0.1 * noise).masked_fill(masked, -math.inf)
    yield "one allowed", torch.full((vocab_size,), -math.inf).index_fill(0, torch.tensor(3), 1.0)


CASE_NAMES = [name for name, _ in _cases(5)]
FILTER_VALUES = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k in (0, 2000, 1, 3, 64, 65, 10**9)
    for top_p, min_p in ((1.0, 0.0), (1e-6, 0.0), (0.5, 0.0), (0.95, 0.2), (0.999, 0.0), (1.0, 1.0))
    if (top_k, top_p, min_p) != (0, 1.0, 0.0)
]


@pytest.mark.parametrize("vocab_size", [5, 100, 1000, 50_000])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_thresholds_equal_a_full_sort(name: str, vocab_size: int):
    logits = dict(_cases(vocab_size))[name]
    sequences = [make_sequence(SamplingParams(**values)) for values in FILTER_VALUES]
    scores = logits - logits.max()

    def thresholds(*sequences: Sequence) -> Tensor:
        rows = scores.repeat(len(sequences), 1)
        values = rows.topk(min(64, vocab_size)).values
        return draw._thresholds(rows, values, *filters_of(make_batch(*sequences)))

    # A wide top_k widens the search of its neighbours, so each row is alone and among all.
    for filters, seq, among_all in zip(
        FILTER_VALUES, sequences, thresholds(*sequences), strict=True
    ):
        least, most = (
            kept_by_sort(scores, **filters, slack=slack) & (scores > -math.inf)
            for slack in (ROUNDING, -ROUNDING)
        )
        for threshold in (thresholds(seq)[0], among_all):
            kept = (scores >= threshold) & (scores > -math.inf)
            assert not (least & ~kept).any(), (filters, int(kept.sum()), int(least.sum()))
            assert not (kept & ~most).any(), (filters, int(kept.sum()), int(most.sum()))


def kept_and_nearly_kept(scores: Tensor, **filters: float) -> tuple[Tensor, Tensor]:
    """What is left on either side of rounding. A body may leave any set between the two."""
    least, most = (
        kept_by_sort(scores, **filters, slack=slack) & (scores > -math.inf)
        for slack in (ROUNDING, -ROUNDING)
    )
    return least, most


def assert_is_best_of_kept(
    token_id: int, scores: Tensor, noise: Tensor, least: Tensor, most: Tensor, *what: object
) -> None:
    """The definition, without candidates, bounds on the noise or a wide path."""
    best = int((scores + noise).masked_fill(~least, -math.inf).argmax())
    allowed = {best, *(most & ~least).nonzero().flatten().tolist()}
    assert token_id in allowed, (what, token_id, best)


@pytest.mark.parametrize("vocab_size", [5, 100, 1000, 50_000])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_draw_is_the_best_noisy_score_of_all_that_is_kept(
    name: str, vocab_size: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
):
    num_wide = 0

    def counted(*arguments: Tensor) -> Tensor:
        nonlocal num_wide
        num_wide += 1
        return gumbel.draw_wide(*arguments)

    monkeypatch.setattr(draw, "draw_wide", counted)
    logits = dict(_cases(vocab_size))[name]
    filters = [{}, {"top_p": 0.5}, {"top_k": 2000}, {"min_p": 0.9}, {"temperature": 0.5}]
    filters += [{"top_p": 0.95, "top_k": 70, "min_p": 0.01, "temperature": 1.5}]
    sequences = [
        make_sequence(SamplingParams(**chosen, seed=seed), prompt=(1,) * (1 + seed))
        for chosen in filters
        for seed in range(20)
    ]
    sampling = make_batch(*sequences)
    ids = sample(logits.repeat(len(sequences), 1), sampling, kernels).token_ids
    ids_of_row = torch.arange(vocab_size)
    for i, seq in enumerate(sequences):
        p = seq.params
        scores = (logits - logits.max()) / p.temperature
        key = gumbel.row_keys(sampling.seeds[i : i + 1], sampling.positions[i : i + 1])
        noise = gumbel.gumbel(gumbel.hash_ids(key, ids_of_row.to(torch.int32)))
        if i % 20 == 0:
            kept = kept_and_nearly_kept(scores, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p)
        assert_is_best_of_kept(ids[i], scores, noise, *kept, p)
    if vocab_size == 50_000 and name in ("flat", "nearly flat") and kernels.draw is draw_ref:
        assert num_wide >= 0.8 * len(sequences)


def key_of(token_id: int, wanted: int) -> int:
    """The int32 row key that gives this id the hash `wanted`: murmur3's finaliser backwards."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        return x ^ (x >> 16)

    x = wanted ^ (wanted >> 16)
    x = x * pow(0xC2B2AE35, -1, 2**32) % 2**32
    x ^= (x >> 13) ^ (x >> 26)
    x = x * pow(0x85EBCA6B, -1, 2**32) % 2**32
    key = x ^ (x >> 16) ^ mix(token_id)
    return key - (key >> 31 << 32)


def test_key_of_gives_an_id_the_noise_that_is_wanted():
    for token_id, wanted in ((0, 2**24 - 1), (49_999, 2**24 - 1), (7, 123_456), (151_935, 0)):
        keys, ids = (
            torch.tensor([key_of(token_id, wanted)], dtype=torch.int32),
            torch.tensor([token_id], dtype=torch.int32),
        )
        assert int(gumbel.hash_ids(keys, ids)) == wanted


@pytest.mark.parametrize("vocab_size", [5, 100, 1000, 50_000])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_the_last_id_that_is_kept_can_be_drawn_and_the_next_one_cannot(
    name: str, vocab_size: int, kernels: Kernels
):
    """With the largest noise that there is for that very id: this shows the threshold itself."""
    logits = dict(_cases(vocab_size))[name]
    scores = logits - logits.max()
    rows = []
    for filters in FILTER_VALUES:
        least, most = kept_and_nearly_kept(scores, **filters)
        last = scores.masked_fill(~least, math.inf).argmin()
        rows.append((filters, least, most, int(last)))
        if not most.all():
            rows.append((filters, least, most, int(scores.masked_fill(most, -math.inf).argmax())))
    sampling = make_batch(*[make_sequence(SamplingParams(**row[0])) for row in rows])
    keys = torch.tensor([key_of(row[3], 2**24 - 1) for row in rows], dtype=torch.int32)
    arguments = (sampling.temperatures, *filters_of(sampling), keys)
    ids = kernels.draw(logits.repeat(len(rows), 1), *arguments).tolist()
    num_drawn = num_last = 0
    for key, token_id, (filters, least, most, target) in zip(keys, ids, rows, strict=True):
        noise = gumbel.gumbel(gumbel.hash_ids(key, torch.arange(vocab_size, dtype=torch.int32)))
        assert_is_best_of_kept(token_id, scores, noise, least, most, filters, target)
        num_drawn += token_id == target
        num_last += bool(least[target])
        assert least[target] or token_id != target
    if name != "peaked":  # there the last one is too far below even for that noise
        assert num_drawn >= 0.8 * num_last


# The noise


def _vary(what: str, count: int, seed: int, position: int, token_id: int) -> Tensor:
    """Hashes of `count` neighbours in one of the three inputs."""
    start = {"seeds": seed, "positions": position, "ids": token_id}
    inputs = {name: torch.full((count,), value) for name, value in start.items()}
    inputs[what] = inputs[what] + torch.arange(count)
    return noise_hashes(**inputs)


STARTS = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (42, 77, 0), (2**40 + 3, 5, 100), (2**63 - 70_000, 9, 7)]


@pytest.mark.parametrize("what", ["ids", "positions", "seeds"])
@pytest.mark.parametrize("start", STARTS, ids=str)
def test_noise_is_uniform_and_neighbours_are_independent(what: str, start: tuple[int, int, int]):
    count = 1 << 16
    hashes = _vary(what, count, *start)
    assert 0 <= int(hashes.min()) <= int(hashes.max()) < 1 << 24
    for buckets in (hashes >> 16, hashes & 0xFF, (hashes >> 8) & 0xFF):
        counts = torch.bincount(buckets, minlength=256)
        assert chi_square_p_value(counts, torch.full((256,), count / 256)) > MIN_P_VALUE
    for lag in (1, 2, 3, 4, 8, 64):
        pairs = (hashes[:-lag] >> 20) * 16 + (hashes[lag:] >> 20)
        counts = torch.bincount(pairs, minlength=256)
        assert chi_square_p_value(counts, torch.full((256,), len(pairs) / 256)) > MIN_P_VALUE
        noise = gumbel.gumbel(hashes)
        correlation = torch.corrcoef(torch.stack([noise[:-lag], noise[lag:]]))[0, 1]
        assert abs(float(correlation)) < 4 / math.sqrt(count)


@pytest.mark.parametrize("what", ["positions", "seeds"])
def test_rows_of_neighbouring_positions_or_seeds_are_unrelated(what: str):
    """All ids' noise in one row against the same ids' in the next."""
    count = 1 << 16
    ids = torch.arange(count)
    rows = []
    for i in range(4):
        seed, position = (7, 30 + i) if what == "positions" else (7 + i, 30)
        rows.append(noise_hashes(torch.tensor([seed]), torch.tensor([position]), ids))
    for a in range(4):
        for b in range(a):
            counts = torch.bincount((rows[a] >> 20) * 16 + (rows[b] >> 20), minlength=256)
            assert chi_square_p_value(counts, torch.full((256,), count / 256)) > MIN_P_VALUE
            assert int((rows[a] == rows[b]).sum()) < 5


@pytest.mark.parametrize(("what", "num_bits"), [("seeds", 63), ("positions", 24), ("ids", 20)])
def test_every_input_bit_changes_half_of_the_noise_bits(what: str, num_bits: int):
    generator = torch.Generator().manual_seed(6)
    limits = {"seeds": 2**62, "positions": 2**24, "ids": 2**20}
    inputs = {
        name: torch.randint(limit, (4096,), generator=generator) for name, limit in limits.items()
    }
    before = noise_hashes(**inputs)
    for flipped in range(num_bits):
        changed = before ^ noise_hashes(**inputs | {what: inputs[what] ^ (1 << flipped)})
        rates = ((changed.unsqueeze(-1) >> torch.arange(24)) & 1).double().mean(0)
        assert (rates - 0.5).abs().max() < 0.04


def test_row_keys_do_not_collide_and_use_all_bits_of_a_seed():
    seeds = torch.tensor([0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]).repeat_interleave(99)
    keys = gumbel.row_keys(seeds, torch.arange(99).repeat(8))
    assert len(set(keys.tolist())) == len(keys)


def test_gumbel_is_finite_and_bounded_by_what_the_shortcut_assumes():
    extremes = gumbel.gumbel(torch.tensor([0, 1, (1 << 24) - 1]))
    assert extremes.isfinite().all()
    assert float(extremes[2]) == pytest.approx(gumbel.MAX_NOISE, abs=1e-12)
    assert float(extremes[2]) <= gumbel.MAX_NOISE + 1e-12
    assert list(extremes) == sorted(extremes)
    noise = gumbel.gumbel(torch.arange(0, 1 << 24, 16))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=1e-3)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=1e-2)


# A row depends on itself only


def test_draws_depend_on_neither_row_nor_neighbours(kernels: Kernels):
    generator = torch.Generator().manual_seed(0)
    options = [
        {},
        {"temperature": 0},
        {"top_k": 3},
        {"top_k": 500},
        {"top_p": 0.7},
        {"temperature": 5.0, "top_p": 0.99},
        {"min_p": 0.3},
        {"presence_penalty": 1.0, "logit_bias": {5: 3.0}},
        {"repetition_penalty": 1.3, "min_tokens": 3},
    ]
    sequences = [
        make_sequence(SamplingParams(**chosen, seed=i % 7), (1, 5), tuple(range(i % 4)))
        for i, chosen in enumerate(options * 4)
    ]
    logits = torch.randn(len(sequences), 1000, generator=generator)
    alone = [
        sample(row.clone()[None], make_batch(seq), kernels).token_ids[0]
        for row, seq in zip(logits, sequences, strict=True)
    ]
    assert sample(logits.clone(), make_batch(*sequences), kernels).token_ids == alone
    order = torch.randperm(len(sequences), generator=generator).tolist()
    for part in (order, order[:5], order[7:20]):
        mixed = sample(logits[part], make_batch(*(sequences[i] for i in part)), kernels).token_ids
        assert mixed == [alone[i] for i in part]


def test_seed_and_position_both_matter(kernels: Kernels):
    logits = torch.zeros(1, 1000)

    def draw(seed: int, length: int) -> int:
        seq = make_sequence(SamplingParams(seed=seed), (1,) * length)
        return sample(logits.clone(), make_batch(seq), kernels).token_ids[0]

    assert draw(1, 3) == draw(1, 3)
    assert len({draw(1, length) for length in range(1, 21)}) > 15
    assert len({draw(seed, 3) for seed in range(20)}) > 15


# Extremes


def test_tiny_temperature_is_greedy_and_huge_is_uniform(kernels: Kernels):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, 20, generator=generator)
    logits[:, 4] = -math.inf
    for temperature in (1e-30, 1e-46, 1e-42):
        tiny = sample(logits.clone(), make_rows(500, temperature=temperature), kernels)
        assert tiny.token_ids == logits.argmax(-1).tolist()
    draws = 20_000
    hot = sample(logits[:1].repeat(draws, 1), make_rows(draws, temperature=1e30), kernels).token_ids
    counts = torch.bincount(torch.tensor(hot), minlength=20)
    assert counts[4] == 0
    expected = torch.full((20,), draws / 19)
    expected[4] = 0
    assert chi_square_p_value(counts, expected) > MIN_P_VALUE


def test_tiny_temperature_draws_among_equals(kernels: Kernels):
    logits = torch.tensor([1.0, 3.0, 3.0, -math.inf]).repeat(4000, 1)
    counts = torch.bincount(
        torch.tensor(sample(logits, make_rows(4000, temperature=1e-30), kernels).token_ids)
    )
    assert chi_square_p_value(counts[1:], torch.tensor([2000.0, 2000.0])) > MIN_P_VALUE
    assert counts[0] == 0


def test_filters_beside_a_temperature_that_is_zero_in_fp32(kernels: Kernels):
    """SamplingParams takes 1e-46, which no fp32 holds: the row is greedy, filters or not."""
    sequences = [make_sequence(SamplingParams(temperature=1e-46, top_k=3))]
    assert sample(torch.tensor([[0.0, 2.0, 1.0]]), make_batch(*sequences), kernels).token_ids == [1]


@pytest.mark.parametrize("top_k", [2**31, 2**63 - 1, 2**63, 2**70])
def test_top_k_of_any_size_is_off_or_refused(top_k: int, kernels: Kernels):
    """Beyond the vocabulary it is off; a number that no tensor holds must not fail the step."""
    try:
        params = SamplingParams(top_k=top_k, temperature=1e-3)
    except ValueError:
        return
    assert sample(
        torch.tensor([[0.0, 2.0, 1.0]]), make_batch(make_sequence(params)), kernels
    ).token_ids == [1]


def test_masked_rows_beside_greedy_rows(kernels: Kernels):
    """-inf logits, one allowed id or none, in greedy and drawn rows: nothing else changes."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(2))
    logits[1] = -math.inf
    logits[1, 17] = -5.0
    logits[2] = -math.inf
    logits[3, :199] = -math.inf
    logits[4] = -math.inf
    params = [{"temperature": t, "logprobs": 1} for t in (0, 0, 0, 1, 1, 1)]
    sampling = make_batch(*(make_sequence(SamplingParams(**p)) for p in params))
    ids, logprobs = sample(logits.clone(), sampling, kernels)
    assert ids[0] == int(logits[0].argmax())
    assert ids[1] == 17
    assert ids[3] == 199
    assert all(0 <= token_id < 200 for token_id in ids)
    last = make_batch(make_sequence(SamplingParams(**params[5])))
    assert ids[5] == sample(logits[5:].clone(), last, kernels).token_ids[0]
    for row in (0, 1, 3, 5):
        assert all(
            math.isfinite(found.logprob) for i, found in logprobs[row].items() if i == ids[row]
        )
    assert logprobs[1][17].logprob == 0


def test_masked_ids_are_never_drawn(kernels: Kernels):
    """A mask beside top_p in a large vocabulary at a high temperature."""
    logits = torch.randn(30_000, generator=torch.Generator().manual_seed(3))
    logits[::2] = -math.inf
    for params in ({}, {"top_p": 0.6}, {"top_k": 20_000}, {"temperature": 1e30}):
        ids = sample(
            logits.repeat(20, 1), make_rows(20, **{"temperature": 4.0, **params}), kernels
        ).token_ids
        assert all(token_id % 2 for token_id in ids)


def test_greedy_ties_go_to_the_lowest_id(kernels: Kernels):
    for vocab_size in (3, 100, 5000, 151_936):
        logits = torch.zeros(3, vocab_size)
        logits[1, vocab_size // 3 :: 2] = 1.0
        logits[2, -1] = 1.0
        sampling = make_batch(*[make_sequence(SamplingParams(temperature=0))] * 3)
        assert sample(logits, sampling, kernels).token_ids == [0, vocab_size // 3, vocab_size - 1]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5, "top_k": 70}]
)
def test_rows_without_a_largest_logit_draw_some_id_of_the_vocabulary(
    value: float, filters: dict, kernels: Kernels
):
    """A model that overflows must not end in an id that no embedding has, nor beyond a row."""
    logits = torch.randn(3, 1001, generator=torch.Generator().manual_seed(8))
    sequences = [make_sequence(SamplingParams(**filters, seed=i)) for i in range(3)]
    healthy = sample(logits.clone(), make_batch(*sequences), kernels).token_ids
    logits[1] = value
    found = sample(logits, make_batch(*sequences), kernels).token_ids
    assert found[::2] == healthy[::2]
    assert 0 <= found[1] < 1001


def test_a_large_row_of_equals_takes_no_longer_than_others(kernels: Kernels):
    """All tie with the threshold, and so all are kept: work must not grow with their square."""
    flat = torch.zeros(2, 1 << 20)
    assert len(set(sample(flat, make_rows(2, top_k=20), kernels).token_ids)) == 2


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_twin_draws_the_same_with_any_number_of_threads_and_strided_rows(threads: int):
    """It writes scores over the logits, and nothing between rows."""
    options = [{}, {"temperature": 0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3, "top_p": 0.9}]
    sequences = [
        make_sequence(SamplingParams(**options[i % 5], seed=i), (1,) * (1 + i)) for i in range(17)
    ]
    for vocab_size in (1, 3, 16, 1001):
        logits = 3 * torch.randn(17, vocab_size + 5, generator=torch.Generator().manual_seed(9))
        rows, beside = logits[:, 2:-3], (logits[:, :2].clone(), logits[:, -3:].clone())
        expected = sample(rows.clone(), make_batch(*sequences)).token_ids
        drawn = make_draw_cpu(kernel_library("native"), threads)
        assert sample(rows, make_batch(*sequences), Kernels(draw=drawn)).token_ids == expected
        assert torch.equal(logits[:, :2], beside[0])
        assert torch.equal(logits[:, -3:], beside[1])


ROWS = {
    "logits": torch.zeros(2, 8),
    "temperatures": torch.ones(2),
    "top_k": torch.zeros(2, dtype=torch.int64),
    "top_p": torch.ones(2),
    "min_p": torch.zeros(2),
    "keys": torch.zeros(2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logits", torch.zeros(2, 8).double(), r"logits: got torch.float64 \(2, 8\)"),
        ("logits", torch.zeros(2, 8).bfloat16(), "logits: got torch.bfloat16"),
        ("logits", torch.zeros(8), r"logits: got torch.float32 \(8,\)"),
        ("logits", torch.zeros(8, 2).T, r"strides \(1, 2\), need \[R, V\] of float32"),
        ("temperatures", torch.ones(3), r"got torch.float32 \(3,\), need torch.float32 \[2\]"),
        ("temperatures", torch.ones(2).double(), "got torch.float64"),
        ("top_k", torch.zeros(2, dtype=torch.int32), "got torch.int32 .* need torch.int64"),
        ("top_p", torch.ones(4)[::2], "contiguous"),
        ("min_p", torch.zeros(2, 1), r"got torch.float32 \(2, 1\)"),
        ("keys", torch.zeros(2, dtype=torch.int64), "got torch.int64 .* need torch.int32"),
    ],
)
def test_twin_refuses_what_it_would_misread(name: str, value: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        body("native")(*(ROWS | {name: value}).values())


def test_engine_draws_with_the_twin():
    body("native")
    assert select_kernels(CPU, "auto", False).draw is not draw_ref
    assert select_kernels(CPU, "ref", False).draw is draw_ref


# Penalties, biases, forbidden ids


def test_penalties_equal_the_plain_formulas():
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(5, 30, generator=generator)
    cases = [
        ({}, (1, 2, 3), (4, 4, 4)),
        ({"presence_penalty": 0.5, "frequency_penalty": -0.25}, (1, 2, 3), (4, 4, 5, 3)),
        ({"repetition_penalty": 1.7}, (1, 1, 2), (9, 9)),
        ({"logit_bias": {0: 2.5, 29: -100.0}}, (1,), ()),
        (
            {
                "presence_penalty": -2.0,
                "frequency_penalty": 2.0,
                "repetition_penalty": 0.6,
                "logit_bias": {4: 7.0, 5: -7.0},
                "min_tokens": 4,
                "stop_token_ids": [4, 11],
            },
            (5, 6, 7),
            (4, 4, 8),
        ),
    ]
    sequences = [make_sequence(SamplingParams(**p), prompt, out) for p, prompt, out in cases]
    found = logits.clone()
    sampler._adjust(found, make_batch(*sequences))
    for row, (chosen, prompt, output) in enumerate(cases):
        p = SamplingParams(**chosen)
        for token_id in range(30):
            value = float(logits[row, token_id]) + (p.logit_bias or {}).get(token_id, 0.0)
            if len(output) < p.min_tokens and token_id in (EOS, *p.stop_token_ids):
                value = -math.inf
            if token_id in prompt + output:
                value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
            value -= p.frequency_penalty * output.count(token_id)
            value -= p.presence_penalty * (token_id in output)
            assert float(found[row, token_id]) == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_min_tokens_forbids_every_end_until_then():
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 7], logits[0, 5] = 9.0, 8.0, 7.0

    def pick(num_output: int, **params: object) -> int:
        p = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7], **params)
        seq = make_sequence(p, (1,), (3,) * num_output)
        return sample(logits.clone(), make_batch(seq)).token_ids[0]

    assert [pick(n) for n in (0, 1, 2, 3)] == [5, 5, EOS, EOS]
    assert pick(0, ignore_eos=True) == EOS, "an end that is ignored need not be forbidden"
    assert pick(0, logit_bias={EOS: 100.0}) == 5


# Log probabilities


def test_logprobs_are_raw():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    chosen = {"temperature": 0.3, "top_k": 2, "presence_penalty": 1.0, "logit_bias": {3: 50.0}}
    sequences = [
        make_sequence(SamplingParams(logprobs=3, **chosen), (1,), (3, 4)),
        make_sequence(SamplingParams(temperature=0)),
    ]
    ids, logprobs = sample(logits.clone(), make_batch(*sequences))
    expected = logits.double().log_softmax(-1)
    assert ids[0] == 3, "the bias decides, and is not seen below"
    assert logprobs[1] is None
    for token_id, found in logprobs[0].items():
        assert found.logprob == pytest.approx(float(expected[0, token_id]), abs=1e-5)
        assert found.rank == int((expected[0] > expected[0, token_id]).sum()) + 1
    assert set(logprobs[0]) == {3, *expected[0].topk(3).indices.tolist()}


def test_top_logprobs_counts_and_ranks():
    logprobs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(4, 1)
    found = top_logprobs(logprobs, [0, 0, 1, 2], [0, 2, 1, -1])
    ranks = [{token_id: value.rank for token_id, value in row.items()} for row in found]
    assert ranks == [{0: 4}, {0: 4, 1: 1, 3: 2}, {1: 1}, {0: 4, 1: 1, 2: 3, 3: 2}]
    assert next(iter(found[3])) == 2, "the sampled one comes first"
    assert found[1][3].logprob == pytest.approx(math.log(0.3))
    assert [len(row) for row in top_logprobs(logprobs, [0] * 4, [9, 4, 3, 2])] == [4, 4, 4, 3]


def test_ties_in_top_logprobs():
    logprobs = torch.tensor([[0.1, 0.3, 0.3, 0.3]]).log()
    for k in (1, 2, 3):
        found = top_logprobs(logprobs, [0], [k])[0]
        assert set(found) - {0} <= {1, 2, 3}
        assert len(found) == k + 1
        assert found[0].rank == 4
        assert sorted(value.rank for i, value in found.items() if i) == list(range(1, k + 1))
    for token_id in (1, 2, 3):
        assert top_logprobs(logprobs, [token_id], [0])[0][token_id].rank == 1
