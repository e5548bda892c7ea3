"""benchmarks/perplexity.py against transformers, and what its shares mean."""

import math
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))  # as when it is run

import perplexity

from nanoinfer import LLM


def test_perplexity_is_transformers(tiny_qwen3: Path) -> None:
    """Five windows, of which the last is short; the first token of each is not predicted."""
    ids = random.Random(0).choices(range(256), k=4 * 24 + 7)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()
    losses = []
    for start in range(0, len(ids), 24):
        window = torch.tensor(ids[start : start + 24])
        with torch.no_grad():
            logprobs = model(window[None]).logits[0, :-1].double().log_softmax(-1)
        losses += (-logprobs.gather(-1, window[1:, None])).flatten().tolist()
    assert len(losses) == len(ids) - 5
    with LLM(tiny_qwen3, dtype="float32") as llm:
        found = perplexity.Quality(perplexity.logprobs(llm, ids, 24), [])
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_agreement_ends_at_the_first_difference() -> None:
    expected = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    found = [[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, 3, 4]]
    same = perplexity.agreement(expected, found)
    assert same == (pytest.approx((1 + 0.25 + 0) / 3), pytest.approx(1 / 3))


def test_both_runs_answer_the_same_prompts(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "NUM_PROMPTS", 4)
    monkeypatch.setattr(perplexity, "ANSWER_LEN", 8)
    ids = random.Random(1).choices(range(256), k=200)
    qualities = [
        perplexity.measure(tiny_qwen3, ids, dtype="float32", kernels=k, max_model_len=256)
        for k in ("auto", "ref")
    ]
    first, second = qualities
    assert first.perplexity == pytest.approx(second.perplexity, rel=1e-4)
    assert [len(answer) for answer in first.answers] == [8] * 4
    assert perplexity.agreement(first.answers, second.answers).same_tokens > 0.9
    section = perplexity.describe("tiny", "weights", "--x", first, {"int8": second})
    assert f"| int8 | {second.perplexity:.4f} |" in section


@pytest.mark.network
def test_text_is_downloaded_and_long_enough() -> None:
    assert "def has_close_elements" in perplexity.code_text()
    assert "Are you sentient?" in perplexity.talk_text()
    assert min(len(perplexity.code_text()), len(perplexity.talk_text())) > 60_000
