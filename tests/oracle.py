"""What is right, according to transformers: plain, fp32, one sequence, no cache, no batch.

In: a checkpoint folder and token ids. Out: greedy continuations, log-probabilities, and prompts
fit for comparing engines with: those whose continuation varies (a model that repeats one token
agrees with anything) and whose best token leads by a margin that rounding cannot bridge.

A loaded model stays in memory for its folder's path: do not rewrite a folder between two calls.

Shapes: T tokens of the sequence, V vocabulary.
"""

import functools
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

MIN_MARGIN = 1e-3
MIN_DISTINCT = 5
MAX_SEEDS = 200


def hf_greedy(folder: Path, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Return `num_tokens` greedy tokens after the prompt, going on after an end of sequence."""
    return list(_greedy(str(folder), tuple(prompt_ids), num_tokens)[0])


def hf_margins(folder: Path, prompt_ids: list[int], num_tokens: int) -> list[float]:
    """Return by how much each token of `hf_greedy` leads the second best, in logits."""
    return list(_greedy(str(folder), tuple(prompt_ids), num_tokens)[1])


def hf_logprobs(folder: Path, ids: list[int]) -> Tensor:
    """Return [T, V] fp32: row t is the log-softmax of the token that follows ids[: t + 1]."""
    return torch.log_softmax(_logits(load_model(folder), ids), dim=-1)


def good_prompts(folder: Path, lengths: list[int], num_tokens: int) -> dict[int, list[int]]:
    """Return one prompt (ids below 256) a length, the same on every run.

    Its `num_tokens` greedy tokens hold at least five distinct ones (all distinct where
    `num_tokens` is below five) and lead by over `MIN_MARGIN` at every step.
    """
    return {length: list(_good_prompt(str(folder), length, num_tokens)) for length in lengths}


def load_model(folder: Path) -> transformers.PreTrainedModel:
    """Return the folder's fp32 model, loaded once; callers must not change it."""
    return _load(str(folder))


@functools.cache
def _greedy(
    folder: str, prompt_ids: tuple[int, ...], num_tokens: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    model = _load(folder)
    ids, margins = list(prompt_ids), []
    for _ in range(num_tokens):
        logits = _logits(model, ids)[-1]  # [V]
        best, second = logits.topk(2).values.tolist()
        margins.append(best - second)
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt_ids) :]), tuple(margins)


@torch.no_grad()
def _logits(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    # Beyond this, rope goes on but the comparison would be with what no checkpoint promises.
    limit = model.config.max_position_embeddings
    if not 0 < len(ids) <= limit:
        raise ValueError(f"ids: got {len(ids)} tokens, need 1 to {limit}")
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()  # [T, V]


@functools.cache
def _good_prompt(folder: str, length: int, num_tokens: int) -> tuple[int, ...]:
    for seed in range(MAX_SEEDS):
        prompt = tuple(np.random.default_rng([length, seed]).integers(0, 256, length).tolist())
        tokens, margins = _greedy(folder, prompt, num_tokens)
        if len(set(tokens)) >= min(MIN_DISTINCT, num_tokens) and min(margins) > MIN_MARGIN:
            return prompt
    raise RuntimeError(f"no good prompt of {length} tokens in {MAX_SEEDS} seeds for {folder}")


@functools.cache
def _load(folder: str) -> transformers.PreTrainedModel:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
