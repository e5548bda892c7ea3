"""The engine written out in docs/01_naive_engine.md is an oracle: no cache, no batch, no kernel.

Its code is taken from the page, so the page cannot drift from what is tested.
"""

import functools
import re
from pathlib import Path

import pytest
from oracle import good_prompts, hf_greedy

from nanoinfer import LLM, SamplingParams

PAGE = Path(__file__).parent.parent / "docs" / "01_naive_engine.md"
NUM_TOKENS = 12
LENGTHS = [1, 4, 17, 40]

if not PAGE.is_file():
    pytest.skip("needs a checkout", allow_module_level=True)


@functools.cache
def naive() -> dict:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    code = "\n".join(block for block in blocks if ">>>" not in block)
    assert "nanoinfer" not in code
    namespace: dict = {}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-tied"])
def test_naive_engine_transformers_and_nanoinfer_agree(tiny, name: str) -> None:
    folder = tiny(name)
    prompts = list(good_prompts(folder, LENGTHS, NUM_TOKENS).values())
    config, weights = naive()["load"](folder)
    expected = [hf_greedy(folder, ids, NUM_TOKENS) for ids in prompts]
    assert [naive()["generate"](ids, NUM_TOKENS, config, weights) for ids in prompts] == expected
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(folder, device="cpu", dtype="float32", block_size=4, num_kv_blocks=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
