"""The demo model, a real one, gives the tokens that transformers gives in fp32.

In bf16: test_bf16.py.
"""

import functools
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.demo import demo_model

pytestmark = pytest.mark.network

PROMPTS = [
    "Once upon a time",
    "The lighthouse keeper had not spoken to anyone for",
    "In the middle of the night, a small dog",
    "Dear grandmother,\n\nThank you for",
    "The best way to learn to play the piano is",
    "When the rain stopped, the children",
    "A good friend is someone who",
    "The old map showed a path that",
    "Every morning the baker",
    "It was the last day of summer and",
    "The ship sailed slowly into",
    "My favourite season is autumn because",
    "The teacher smiled and said:",
    "Deep in the forest there lived",
    "To make a cup of tea, first",
    "The two brothers could not agree on",
    "She opened the letter and read:",
    "Nobody in the village knew why the clock",
    "The astronaut looked out of the window and saw",
    "At the end of the street there is a shop that sells",
]
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo_model()


@functools.cache
def hf_model(folder: Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.inference_mode()
def test_twenty_prompts_equal_transformers_in_fp32(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(folder, dtype="float32", max_model_len=512) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = hf_model(folder, torch.float32)
    model.generation_config.eos_token_id = None
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        expected = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist(), output.prompt
