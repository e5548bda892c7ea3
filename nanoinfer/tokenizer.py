"""Text to token ids and back.

In: strings or chat messages; later, one sampled token id at a time.
Out: token ids; text that grows by whole characters, and the stop string that ended it.

Invariants: incremental text equals the one-shot decode of the same ids, whatever the bytes; a
character split over several tokens is never shown half; nothing of a stop string is ever shown.
Encoding, decoding and chat templates are the `tokenizers` and `transformers` libraries'; ours is
the incremental part.
"""

import operator
from collections.abc import Mapping
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

from nanoinfer.sampling_params import SamplingParams

Prompt = str | list[int] | Mapping[str, Any]
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_REPLACEMENT = "\ufffd"  # what decoders show for bytes that are not, or not yet, a character


class Tokenizer:
    """A checkpoint's tokenizer. A folder without one still loads: token ids need none."""

    def __init__(self, folder: Path, skip: bool = False) -> None:
        self._folder = folder
        self._hf: Any = None
        if not skip and any((folder / name).is_file() for name in _FILES):
            from transformers import AutoTokenizer

            self._hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)

    def require(self, what: str) -> Any:
        """transformers' tokenizer, or ValueError: `what` needs one and the folder has none."""
        if self._hf is None:
            raise ValueError(
                f"{what}: needs a tokenizer, but {self._folder / _FILES[0]} is missing; "
                "pass tokenizer=FOLDER, or give token ids and SamplingParams(detokenize=False)"
            )
        return self._hf

    @property
    def is_present(self) -> bool:
        return self._hf is not None

    @property
    def eos_token_id(self) -> int | None:
        return self._hf.eos_token_id if self._hf is not None else None

    def encode_prompt(self, prompt: Prompt) -> tuple[str | None, Any]:
        """A prompt in any form -> its text if there is one, and its ids, not checked yet.

        Text gets the special tokens that the tokenizer adds (BOS).
        """
        text, ids = _unwrap_prompt(prompt)
        return text, self.require("text prompt").encode(text) if ids is None else ids

    def encode_chat(
        self, chat_template: str | None, *, messages: list[dict], **template_kwargs: Any
    ) -> dict[str, Any]:
        """A conversation as a prompt with its ids; the template places special tokens itself."""
        hf = self.require("chat")
        if chat_template is None and not hf.chat_template:
            raise ValueError(
                f"chat: {self._folder} has no chat template (chat_template.jinja or "
                "tokenizer_config.json); pass chat_template=..., or use generate"
            )
        text = hf.apply_chat_template(
            messages, chat_template=chat_template, tokenize=False, **template_kwargs
        )
        return {
            "prompt": text,
            "prompt_token_ids": hf.encode(text, add_special_tokens=False),
        }

    def decode_token(self, token_id: int) -> str:
        """One token's own text, special or not: to name a candidate."""
        return self.decode([token_id], skip_special_tokens=False)

    def decode(self, ids: Ids[int], skip_special_tokens: bool = True) -> str:
        hf = self.require("decode")
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is not None:  # the Rust library without transformers' Python around it
            return backend.decode(ids, skip_special_tokens)
        return hf.decode(ids, skip_special_tokens=skip_special_tokens)


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt in any form, or several of them -> a list. A list of ints is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    each = list(prompts)
    return [each] if each and isinstance(each[0], int) else each


def _unwrap_prompt(prompt: Prompt) -> tuple[str | None, Any]:
    """A prompt in any form -> (its text if given, its token ids if given)."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    unknown = set(prompt) - {"prompt", "prompt_token_ids"}
    if unknown or not prompt:
        raise ValueError(
            f"prompt: got keys {sorted(prompt)}, need 'prompt' (text) or 'prompt_token_ids' (list)"
        )
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt: got {type(text).__name__} under 'prompt', need text")
    ids = prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError("prompt: got None, need text or token ids")
    return text, ids


def check_prompt(ids: Any, vocab_size: int, max_model_len: int) -> list[int]:
    """A prompt's token ids as ints that the model knows, and few enough."""
    try:
        ids = [operator.index(i) for i in ids]
    except TypeError:
        raise ValueError(
            f"prompt: got {ids!r:.80}, need text, a list of token ids or a dict of one of them"
        ) from None
    if not ids:
        raise ValueError("prompt: got no tokens, need at least 1")
    check_vocabulary("prompt", ids, vocab_size)
    if len(ids) >= max_model_len:
        raise ValueError(
            f"prompt: got {len(ids)} tokens, need fewer than max_model_len = {max_model_len}; "
            "shorten the prompt or raise max_model_len"
        )
    return ids


def check_vocabulary(what: str, ids: list[int], vocab_size: int) -> None:
    """All ids must be the model's (whose vocabulary may be larger than the tokenizer's)."""
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{what}: token id {token_id} is outside the vocabulary of {vocab_size}"
            )


class Detokenizer:
    """One answer's text, token by token.

    Decoding a single token is wrong (half a character, a lost space), decoding everything each
    time is quadratic. So a window of tokens is decoded, which starts two clean boundaries back:

        ids:     . . . . [ a b | c d ]        text shown up to b, which ended on a whole
                         prefix  read         character; new = decode(a..d) - decode(a..b)

    If the window ends in U+FFFD, its last bytes may still become a character: all but that one
    are shown. (Decoders show an unfinished character as exactly one U+FFFD.)
    The window is the idea of vLLM's and TGI's `detokenize_incrementally`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, params.skip_special_tokens)
        self._params = params
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self._old = ""  # decode(ids[prefix:read])
        self._shown = 0  # characters of the window beyond `_old` that are in `text` already
        self.text = ""

    def append(self, token_id: int, check_stop: bool = True) -> str | None:
        """Add one token; returns the stop string that its text completes, if any."""
        self._ids.append(token_id)
        window = self._decode(self._ids[self._prefix :])
        is_open = window.endswith(_REPLACEMENT)
        start = len(self.text)
        self._show(window[:-1] if is_open else window)
        if not is_open:
            self._prefix, self._read, self._shown = self._read, len(self._ids), 0
            self._old = self._decode(self._ids[self._prefix : self._read])
        return self._find_stop(start) if check_stop else None

    def finish(self) -> None:
        """No more tokens come: what was held back as half a character is shown as it is."""
        self._show(self._decode(self._ids[self._prefix :]))

    def num_stable_chars(self) -> int:
        """Length of `text` without a tail that may still become a stop string."""
        longest = max(map(len, self._params.stop), default=1) - 1
        for held in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-held:]
            if any(s.startswith(tail) for s in self._params.stop):
                return len(self.text) - held
        return len(self.text)

    def _show(self, window: str) -> None:
        new = window[len(self._old) + self._shown :]
        self.text += new
        self._shown += len(new)

    def _find_stop(self, start: int) -> str | None:
        """Cut `text` at the earliest stop string that ends in text[start:]."""
        found = []
        for stop in self._params.stop:
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[: at + len(stop) * self._params.include_stop_str_in_output]
        return stop
