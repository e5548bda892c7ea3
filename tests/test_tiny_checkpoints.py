"""The tiny checkpoints obey their own rules: a fault of an engine changes what they say."""

import copy
import json

import pytest
import torch
from oracle import good_prompts, hf_greedy, hf_logprobs, hf_margins, load_model
from safetensors.torch import load_file
from tiny import SPECIAL_TOKENS, TINY_NAMES, VOCAB_SIZE, adds_one, make_tiny
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

LENGTHS = [1, 16, 17, 70]
NUM_TOKENS = 16
# ASCII, whitespace, characters of two, three and four bytes, a joined emoji; NFC already.
TEXT = "Hello,  wörld!\n\té ﬁ 你好 नमस्ते 👩‍👩‍👧 🙂"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好?"}]


@pytest.fixture(params=TINY_NAMES)
def folder(request, tiny):
    return tiny(request.param)


def test_weights_are_random_enough(folder):
    for name, weight in load_file(folder / "model.safetensors").items():
        assert weight.dtype == torch.float32, name
        if adds_one(name, folder.name):
            assert -0.5 <= weight.min() < -0.2, name
            assert 0.2 < weight.max() <= 0.5, name
        elif "norm" in name:
            assert 0.5 <= weight.min() < 0.8, name
            assert 1.2 < weight.max() <= 1.5, name
        elif name.endswith(("A_log", "dt_bias")):
            assert weight.unique().numel() == weight.numel() >= 4, name
            assert weight.abs().max() <= 1, name
        else:
            assert 0.2 < weight.std() < 0.4, name


def test_prompts_vary_and_lead(folder):
    prompts = good_prompts(folder, LENGTHS, NUM_TOKENS)
    assert [len(prompts[length]) for length in LENGTHS] == LENGTHS
    for prompt in prompts.values():
        assert max(prompt) < 256
        tokens = hf_greedy(folder, prompt, NUM_TOKENS)
        assert len(tokens) == NUM_TOKENS
        assert len(set(tokens)) >= 5
        assert min(hf_margins(folder, prompt, NUM_TOKENS)) > 1e-3


def test_greedy_equals_cached_generate(folder):
    for prompt in good_prompts(folder, LENGTHS, NUM_TOKENS).values():
        generated = load_model(folder).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
        )
        # min_new_tokens masks the eos ids, so compare up to the first of them.
        expected = hf_greedy(folder, prompt, NUM_TOKENS)
        end = next((i for i, token in enumerate(expected) if token in (256, 258)), NUM_TOKENS)
        assert generated[0, len(prompt) :][:end].tolist() == expected[:end]


def test_logprobs_are_normalised_and_agree_with_greedy(folder):
    prompt = good_prompts(folder, [17], NUM_TOKENS)[17]
    logprobs = hf_logprobs(folder, prompt)
    assert logprobs.shape == (17, VOCAB_SIZE)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(17))
    assert [int(logprobs[-1].argmax())] == hf_greedy(folder, prompt, 1)


def test_each_norm_changes_the_tokens(folder):
    """A norm weight that an engine ignores is seen in the tokens."""
    prompts = good_prompts(folder, LENGTHS, NUM_TOKENS)
    kinds = {name.split(".")[-2] for name in load_model(folder).state_dict() if "norm" in name}
    assert {"input_layernorm", "post_attention_layernorm", "norm"} <= kinds
    assert ({"q_norm", "k_norm"} <= kinds) == ("qwen3" in folder.name)
    for kind in kinds:
        faulty = copy.deepcopy(load_model(folder))
        for name, parameter in faulty.named_parameters():
            if name.split(".")[-2] == kind:
                parameter.data.fill_(0.0 if adds_one(name, folder.name) else 1.0)
        assert any(
            _greedy_of(faulty, prompt) != hf_greedy(folder, prompt, NUM_TOKENS)
            for prompt in prompts.values()
        ), kind


def _greedy_of(model, prompt):
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("scaled", "plain"),
    [("tiny-qwen3-yarn", "tiny-qwen3"), ("tiny-llama-llama3rope", "tiny-llama")],
)
def test_rope_scaling_changes_the_tokens(tiny, scaled, plain):
    weights, plain_weights = (load_file(tiny(n) / "model.safetensors") for n in (scaled, plain))
    assert all(torch.equal(weights[name], plain_weights[name]) for name in weights)
    for prompt in good_prompts(tiny(scaled), [17, 70], NUM_TOKENS).values():
        assert hf_greedy(tiny(scaled), prompt, NUM_TOKENS) != hf_greedy(
            tiny(plain), prompt, NUM_TOKENS
        )


def test_ids_without_a_token_are_produced(folder):
    tokenizer_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert tokenizer_size == 259 < VOCAB_SIZE == AutoConfig.from_pretrained(folder).vocab_size
    best = {int(hf_logprobs(folder, [byte])[-1].argmax()) for byte in range(256)}
    assert any(token >= tokenizer_size for token in best)


def test_configs_are_the_published_kind(folder):
    config = json.loads((folder / "config.json").read_text())
    tied = folder.name.endswith("tied")
    assert config["eos_token_id"] == 258
    assert config["tie_word_embeddings"] == tied
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != tied
    assert config.get("head_dim") == (None if folder.name == "tiny-qwen2" else 32)
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [258, 256]
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.7, 20, 0.9)


def test_q_k_v_biases_only_in_qwen2(folder):
    biases = [n for n in load_file(folder / "model.safetensors") if n.endswith(".bias")]
    assert len(biases) == (6 if folder.name == "tiny-qwen2" else 0)


def test_token_ids_are_the_bytes(tiny_qwen3):
    tokenizer = Tokenizer.from_file(str(tiny_qwen3 / "tokenizer.json"))
    ids = tokenizer.encode(TEXT).ids
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(list("你".encode())[:2]).endswith("\ufffd")
    assert {text: tokenizer.token_to_id(text) for text in SPECIAL_TOKENS} == SPECIAL_TOKENS
    assert tokenizer.encode("a<|im_end|>b").ids == [97, 258, 98]
    assert tokenizer.encode("e\u0301").ids == list("é".encode())  # NFC, as Qwen


def test_auto_tokenizer_is_the_same_tokenizer(folder):
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(folder)
    for text in (
        TEXT,
        "e\u0301",
        "",
        " ",
        "<|im_start|>user\nhi<|im_end|>\n",
        "don't 12345 \r\n x",
    ):
        assert auto(text)["input_ids"] == raw.encode(text).ids
        assert auto.decode(raw.encode(text).ids) == raw.decode(
            raw.encode(text).ids, skip_special_tokens=False
        )
    assert (auto.eos_token, auto.eos_token_id) == ("<|im_end|>", 258)
    assert auto.bos_token is None
    assert len(auto) == 259
    assert set(auto.all_special_ids) <= {256, 257, 258}


def test_chat_template_honours_enable_thinking(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(**options):
        return tokenizer.apply_chat_template(MESSAGES, tokenize=False, **options)

    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n你好?<|im_end|>\n"
    header = "<|im_start|>assistant\n"
    assert render() == turns
    assert render(add_generation_prompt=True) == turns + header
    assert render(add_generation_prompt=True, enable_thinking=True) == turns + header
    assert (
        render(add_generation_prompt=True, enable_thinking=False)
        == turns + header + "<think>\n\n</think>\n\n"
    )
    assert tokenizer.encode(header, add_special_tokens=False)[0] == 257


def test_a_checkpoint_is_the_same_on_every_run(tiny_qwen3, tmp_path):
    state = torch.random.get_rng_state()
    again = make_tiny("tiny-qwen3", tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), state)
    for file in sorted(tiny_qwen3.iterdir()):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tiny-qwen9.*tiny-qwen3"):
        make_tiny("tiny-qwen9", tmp_path)
