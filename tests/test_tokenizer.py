"""Tokenizer: text that grows token by token equals the one-shot decode, and stops where it should.

Three tokenizers: one token a byte (Qwen's kind), tokens of several bytes that cut characters
anywhere (the same kind), and Llama 2's kind, with "▁" for spaces and <0xE4> for unknown bytes.
"""

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import VOCAB_SIZE, save_tiny_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from nanoinfer.request import Request
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.sequence import Sequence
from nanoinfer.tokenizer import Detokenizer, Tokenizer

REPLACEMENT = "\ufffd"
IM_END = 258
MAX_HELD = 16  # U+FFFD: what a few tokens hold of bytes that may still become a character
TEXTS = [
    "plain words, twice  spaced\n",
    "naïve café, Grüße",
    "中文字符，混合 text и кириллица",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "tab\tnul\0 end",
    "हिन्दी ไทย עברית",
    f"a real {REPLACEMENT} character{REPLACEMENT}",
]
many = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    save_tiny_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """256 bytes, then 300 pieces cut out of `TEXTS` without regard to characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    rng = random.Random(0)
    pieces: dict[str, int] = {character: i for i, character in enumerate(alphabet)}
    while len(pieces) < 256 + 300:
        text = encode(rng.choice(TEXTS))[0][0]
        start = rng.randrange(len(text) - 1)
        pieces.setdefault(text[start : start + rng.randint(2, 6)], len(pieces))
    backend = tokenizers.Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return _save(backend, tmp_path_factory.mktemp("pieces"))


@pytest.fixture(scope="module")
def llama_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As in Llama 2: ids 0..2 special, 3..258 bytes, then "▁", letters and "▁" + letter."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    letters = [chr(c) for c in range(0x21, 0x7F)]
    for piece in ("▁", *letters, *("▁" + c for c in letters)):
        vocab[piece] = len(vocab)
    merges = [("▁", c) for c in letters]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")]
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return _save(backend, tmp_path_factory.mktemp("llama"), '"bos_token": "<s>", ')


def _save(backend: tokenizers.Tokenizer, folder: Path, more: str = "") -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    text = f'{{{more}"tokenizer_class": "PreTrainedTokenizerFast"}}'
    (folder / "tokenizer_config.json").write_text(text)
    return Tokenizer(folder)


def shown_texts(
    tokenizer: Tokenizer, ids: list[int], **params: object
) -> tuple[list[str], Detokenizer]:
    """The text after each token, and the detokenizer, before its `finish`."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    shown = []
    for token_id in ids:
        detokenizer.append(token_id)
        shown.append(detokenizer.text)
    return shown, detokenizer


def check_growth(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    """Prefixes of the final text, late only by what may still become a character."""
    shown, detokenizer = shown_texts(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    detokenizer.finish()
    final = tokenizer.decode(ids, skip_special_tokens)
    assert detokenizer.text == final
    for i, text in enumerate(shown, 1):
        assert final.startswith(text), "shows what is not there at the end"
        now = tokenizer.decode(ids[:i], skip_special_tokens)
        assert now.startswith(text), "shows half a character"
        held = now[len(text) :]
        assert held == REPLACEMENT * len(held), "holds back a whole character"
        assert len(held) <= MAX_HELD
    return final


# Incremental text


@pytest.mark.parametrize("text", TEXTS)
def test_text_grows_by_whole_characters(text: str, byte_tokenizer: Tokenizer):
    ids = list(text.encode())
    assert check_growth(byte_tokenizer, ids) == text
    shown, _ = shown_texts(byte_tokenizer, ids)
    allowed = {text[:i] for i in range(len(text) + 1)}
    assert set(shown) <= allowed
    # Each character is there with its last byte; one that looks unfinished, with the next token.
    for i, character in enumerate(text):
        if character != REPLACEMENT:
            assert shown[len(text[: i + 1].encode()) - 1] == text[: i + 1]


@many
@given(data=st.binary(max_size=40))
@example(b"\xe4\xb8\xe4\xb8\xad\xff\xff\xf0\x9f\x98a")
@example(b"\xed\xa0\x80\xed\xb0\x80")
@example(b"\xef\xbf\xbd\xef\xbf\xbda")
@example(b"\xf0\x9f\x98" * 5)
def test_random_bytes_equal_the_one_shot_decode(byte_tokenizer: Tokenizer, data: bytes):
    assert check_growth(byte_tokenizer, list(data)) == data.decode(errors="replace")


@many
@given(
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1) | st.integers(250, VOCAB_SIZE - 1), max_size=30),
    skip=st.booleans(),
)
@example(ids=[0xE4, IM_END, 0xB8, 0xAD], skip=True)
@example(ids=[0xE4, 270, 0xB8, 0xAD], skip=False)
@example(ids=[270, 270, 0x20, 0x61], skip=True)
def test_special_and_unknown_ids_equal_the_one_shot_decode(
    byte_tokenizer: Tokenizer, ids: list[int], skip: bool
):
    final = check_growth(byte_tokenizer, ids, skip)
    assert ("<|im_end|>" in final) == (IM_END in ids and not skip)


@many
@given(ids=st.lists(st.integers(0, 555), max_size=30))
def test_tokens_that_cut_characters_equal_the_one_shot_decode(
    pieces_tokenizer: Tokenizer, ids: list[int]
):
    check_growth(pieces_tokenizer, ids)


@many
@given(text=st.text("a 中é😀", max_size=8), reads=st.sets(st.integers(0, 29)))
@example(text="中é", reads={3})
def test_it_makes_no_difference_when_text_is_read(
    llama_tokenizer: Tokenizer, text: str, reads: set[int]
):
    """Its decoder shows whole characters as U+FFFDs while the one behind them is unfinished."""
    _, ids = llama_tokenizer.encode_prompt(text)
    texts, _ = shown_texts(llama_tokenizer, ids)
    detokenizer = Detokenizer(llama_tokenizer, SamplingParams())
    for i, token_id in enumerate(ids):
        detokenizer.append(token_id)
        assert i not in reads or detokenizer.text == texts[i]
    detokenizer.finish()
    assert detokenizer.text == text


def test_without_stop_strings_text_is_made_when_it_is_read(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    calls = []
    decode = byte_tokenizer.decode
    monkeypatch.setattr(byte_tokenizer, "decode", lambda *args: calls.append(1) or decode(*args))
    seq = make_sequence(byte_tokenizer)
    for token_id in b"abc":
        seq.append_token(token_id, None)
    assert not calls
    assert seq.text() == "abc"
    for token_id in b"def":
        seq.append_token(token_id, None)
    calls.clear()
    seq.finish("length")
    assert len(calls) == 1
    assert seq.text() == "abcdef"


def test_invalid_bytes_are_not_held_back_for_long(byte_tokenizer: Tokenizer):
    shown, _ = shown_texts(byte_tokenizer, [0xFF] * 100)
    assert all(0 <= i - len(text) <= MAX_HELD for i, text in enumerate(shown, 1))


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_llama_text_grows_by_whole_characters(text: str, llama_tokenizer: Tokenizer):
    """This decoder shows one U+FFFD for each byte of an unfinished character."""
    _, ids = llama_tokenizer.encode_prompt(text)
    assert llama_tokenizer.decode(ids) == text
    shown, detokenizer = shown_texts(llama_tokenizer, ids)
    detokenizer.finish()
    assert detokenizer.text == text
    assert all(text.startswith(part) for part in shown)
    assert shown[-1] == text


def test_llama_invalid_bytes_come_out_before_long(llama_tokenizer: Tokenizer):
    ids = [3 + 0xFF] * 40 + [llama_tokenizer.encode_prompt("a")[1][-1]]
    shown, _ = shown_texts(llama_tokenizer, ids)
    assert shown[-1] == llama_tokenizer.decode(ids)
    assert shown[30].startswith(REPLACEMENT)


@many
@given(ids=st.lists(st.sampled_from([0, 1, 2, 259, 325, 326, 400, 401, 99_999]), max_size=12))
@example(ids=[419, 2, 420])
def test_llama_spaces_survive_skipped_tokens(llama_tokenizer: Tokenizer, ids: list[int]):
    """Such a decoder strips a space at its start, so a window must not start after nothing."""
    shown, detokenizer = shown_texts(llama_tokenizer, ids)
    detokenizer.finish()
    final = llama_tokenizer.decode(ids)
    assert detokenizer.text == final
    assert all(final.startswith(text) for text in shown)


# Stop strings


def first_stop(texts: list[str], stops: list[str], include: bool) -> tuple[int, str, str] | None:
    """After each token, look through the whole text: (token, cut text, stop string)."""
    for i, text in enumerate(texts):
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        if found:
            at, stop = min(found)
            return i, text[: at + len(stop) * include], stop
    return None


stop_strings = st.lists(st.text("ab中é", min_size=1, max_size=4), min_size=1, max_size=3)


@many
@given(
    text=st.text("ab中é😀", max_size=20),
    stops=stop_strings,
    include=st.booleans(),
    cuts=st.sampled_from(["bytes", "characters"]),
)
@example(text="aab", stops=["ab", "aab"], include=False, cuts="bytes")
@example(text="abab", stops=["abb", "bab"], include=True, cuts="bytes")
@example(text="aaab中", stops=["aab", "中"], include=False, cuts="bytes")
def test_stop_strings_equal_a_search_of_the_whole_text(
    byte_tokenizer: Tokenizer, text: str, stops: list[str], include: bool, cuts: str
):
    ids = list(text.encode())
    texts, _ = shown_texts(byte_tokenizer, ids)
    expected = first_stop(texts, stops, include)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    detokenizer = Detokenizer(byte_tokenizer, params)
    streamed = []
    for i, token_id in enumerate(ids):
        stop = detokenizer.append(token_id)
        if stop is not None:
            assert expected == (i, detokenizer.text, stop)
            break
        assert expected is None or i < expected[0]
        assert detokenizer.text == texts[i]
        streamed.append(detokenizer.text[: detokenizer.num_stable_chars()])
        # Held back: exactly the longest tail that begins a stop string.
        tails = [texts[i][k:] for k in range(len(texts[i]) + 1)]
        held = next(t for t in tails if not t or any(s != t and s.startswith(t) for s in stops))
        assert streamed[-1] + held == texts[i]
    else:
        assert expected is None
        detokenizer.finish()
        assert detokenizer.text == text
    if not include:
        assert all(detokenizer.text.startswith(part) for part in streamed)


@many
@given(
    ids=st.lists(st.integers(0, 555), max_size=12),
    stops=st.lists(st.sampled_from(["e", " s", "文字", "é", "d, 🏳", "й", "ab"]), min_size=1),
)
def test_stop_strings_inside_longer_tokens(
    pieces_tokenizer: Tokenizer, ids: list[int], stops: list[str]
):
    texts, _ = shown_texts(pieces_tokenizer, ids)
    detokenizer = Detokenizer(pieces_tokenizer, SamplingParams(stop=stops))
    found = None
    for i, token_id in enumerate(ids):
        stop = detokenizer.append(token_id)
        if stop is not None:
            found = (i, detokenizer.text, stop)
            break
    assert found == first_stop(texts, stops, False)


def make_sequence(tokenizer: Tokenizer, **params: object) -> Sequence:
    request = Request(
        "0",
        None,
        [1],
        SamplingParams(max_tokens=None, **params),
        eos_token_ids=frozenset({IM_END}),
        max_model_len=1000,
    )
    return Sequence(request, 0, 0, Detokenizer(tokenizer, request.params))


def stream(seq: Sequence, text: str | list[int]) -> list[str]:
    """What may be shown after each token, until the sequence ends."""
    shown = []
    for token_id in text.encode() if isinstance(text, str) else text:
        seq.append_token(token_id, None)
        shown.append(seq.text())
        if seq.is_finished:
            break
    return shown


def test_nothing_of_a_stop_string_is_streamed(byte_tokenizer: Tokenizer):
    seq = make_sequence(byte_tokenizer, stop=["END"])
    assert stream(seq, "xENyEND...") == ["x", "x", "x", "xENy", "xENy", "xENy", "xENy"]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "END")
    assert bytes(seq.output_token_ids) == b"xENyEND", "its tokens are counted"
    seq = make_sequence(byte_tokenizer, stop=["END"], include_stop_str_in_output=True)
    assert stream(seq, "xEND...") == ["x", "x", "x", "xEND"]


def test_stop_string_that_repeats_its_own_start(byte_tokenizer: Tokenizer):
    seq = make_sequence(byte_tokenizer, stop=["aab"])
    assert stream(seq, "aaaab") == ["", "", "a", "aa", "aa"]
    seq = make_sequence(byte_tokenizer, stop=["\n\n"])
    assert stream(seq, "x\ny\n\nz") == ["x", "x", "x\ny", "x\ny", "x\ny"]


def test_stop_string_that_equals_what_another_holds_back(byte_tokenizer: Tokenizer):
    """ "ab" is the tail that "abc" holds; it ends the text itself."""
    seq = make_sequence(byte_tokenizer, stop=["abc", "ab"])
    assert stream(seq, "xabc") == ["x", "x", "x"]
    assert seq.stop_reason == "ab"
    seq = make_sequence(byte_tokenizer, stop=["bcd", "abcde", "c"])
    assert stream(seq, "abcd") == ["", "", "ab"]
    assert seq.stop_reason == "c"


def test_held_tail_is_flushed_at_the_end(byte_tokenizer: Tokenizer):
    seq = make_sequence(byte_tokenizer, stop=["END"])
    assert stream(seq, [*b"xEN", IM_END]) == ["x", "x", "x", "xEN"]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", None)
    seq = make_sequence(byte_tokenizer, stop=["END"])
    stream(seq, "xEN")
    seq.finish("abort")
    assert seq.text() == "xEN"
    seq = make_sequence(byte_tokenizer)
    assert stream(seq, [*b"x\xe4\xb8", IM_END]) == ["x", "x", "x", f"x{REPLACEMENT}"]


def test_no_stop_before_min_tokens(byte_tokenizer: Tokenizer):
    seq = make_sequence(byte_tokenizer, stop=["ab"], min_tokens=3)
    assert stream(seq, "abxab")[-1] == "abx"
    assert bytes(seq.output_token_ids) == b"abxab"


def test_end_of_sequence_is_text_only_on_request(byte_tokenizer: Tokenizer):
    seq = make_sequence(byte_tokenizer, skip_special_tokens=False)
    assert stream(seq, [*b"x", IM_END]) == ["x", "x"]
    seq = make_sequence(byte_tokenizer, skip_special_tokens=False, include_stop_str_in_output=True)
    assert stream(seq, [*b"x", IM_END]) == ["x", "x<|im_end|>"]


def test_stop_string_does_not_wait_for_a_character_behind_it(byte_tokenizer: Tokenizer):
    seq = make_sequence(byte_tokenizer, stop=["é"])
    assert stream(seq, [*"aé".encode(), 0xE4]) == ["a", "a", "a"]
    assert len(seq.output_token_ids) == 3


# Chat templates and special tokens


def chat(
    tokenizer: Tokenizer, chat_template: str | None = None, **options: object
) -> tuple[str, list[int]]:
    messages = [{"role": "user", "content": "é?"}]
    prompt = tokenizer.encode_chat(chat_template=chat_template, messages=messages, **options)
    return prompt["prompt"], prompt["prompt_token_ids"]


def test_chat_options_reach_the_template(byte_tokenizer: Tokenizer):
    user = "<|im_start|>user\né?<|im_end|>\n"
    start = "<|im_start|>assistant\n"
    thinking = functools.partial(chat, byte_tokenizer, add_generation_prompt=True)
    assert chat(byte_tokenizer, add_generation_prompt=False)[0] == user
    assert thinking()[0] == thinking(enable_thinking=True)[0] == user + start
    text, ids = thinking(enable_thinking=False)
    assert text == user + start + "<think>\n\n</think>\n\n"
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[:2] == [257, ord("u")], "special tokens are single ids"
    assert chat(byte_tokenizer, "{{ messages[0].content }}!")[0] == "é?!"


def test_template_places_special_tokens_alone(llama_tokenizer: Tokenizer):
    assert llama_tokenizer.encode_prompt("a")[1][:1] == [1], "a plain prompt gets its BOS"
    template = "{{ bos_token }}{{ messages[0].content }}"
    text, ids = chat(llama_tokenizer, template)
    assert text == "<s>é?"
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_missing_template_is_named(llama_tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"chat: .* has no chat template"):
        chat(llama_tokenizer)


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.encode_prompt("a"),
        lambda t: t.decode([1]),
        lambda t: t.encode_chat(chat_template=None, messages=[]),
        lambda t: t.require("stop"),
    ],
)
def test_folder_without_tokenizer_says_which_file_is_missing(
    use: Callable[[Tokenizer], object], tmp_path: Path, byte_tokenizer: Tokenizer
):
    for tokenizer in (Tokenizer(tmp_path), Tokenizer(byte_tokenizer._folder, skip=True)):
        assert not tokenizer.is_present
        assert tokenizer.eos_token_id is None
        with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
            use(tokenizer)
    assert byte_tokenizer.eos_token_id == IM_END
