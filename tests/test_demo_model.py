"""The demo model, a real one: equal to transformers in fp32, as close as transformers in bf16."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanoinfer import LLM, SamplingParams
from nanoinfer.batch import Batch
from nanoinfer.demo import demo_model
from nanoinfer.scheduler import ScheduledSequence

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
NUM_POSITIONS = 2000


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


def our_logprobs(llm: LLM, ids: list[int]) -> Tensor:
    """log-softmax [T, V] of one prompt in one step, straight from the model."""
    engine = llm.engine
    seq = engine.make_request(ids, SamplingParams()).sequences[0]
    seq.block_table = list(range(1, 1 + -(-len(ids) // engine.config.block_size)))
    step = [ScheduledSequence(seq, 0, len(ids), is_sampling=True)]
    batch = Batch.build(step, engine.config.block_size, torch.device("cpu"))
    runner = engine._runner
    hidden = runner._model(batch, runner._caches)
    return runner._model.logits(hidden).log_softmax(-1)


@torch.inference_mode()
def test_bf16_is_as_close_to_fp32_as_transformers_is(folder: Path) -> None:
    """Mean KL(fp32 || bf16) over real text: at most 1.1 times transformers' own."""
    root = Path(__file__).parent.parent
    text = (root / "README.md").read_text() + (root / "docs" / "design.md").read_text()
    with LLM(folder, dtype="bfloat16", max_model_len=4096) as llm:
        ids = llm.get_tokenizer().encode(text)[:NUM_POSITIONS]
        assert len(ids) == NUM_POSITIONS
        ours = our_logprobs(llm, ids)

    def hf_logprobs(dtype: torch.dtype) -> Tensor:
        return hf_model(folder, dtype)(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    exact = hf_logprobs(torch.float32)

    def mean_kl(other: Tensor) -> float:
        return float((exact.exp() * (exact - other)).sum(-1).mean())

    kl, kl_hf = mean_kl(ours), mean_kl(hf_logprobs(torch.bfloat16))
    assert kl <= 1.1 * kl_hf, f"mean KL to fp32: ours {kl:.3e}, transformers' bf16 {kl_hf:.3e}"
