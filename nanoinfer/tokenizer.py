"""Text to token ids and back.

In: strings or chat messages; later, one sampled token id at a time.
Out: token ids; text that grows by whole characters, and the stop string that ended it.

Invariants: incremental text equals the one-shot decode of the same ids, whatever the bytes; a
character split over several tokens is never shown half; nothing of a stop string is ever shown.
Encoding, decoding and chat templates are the `tokenizers` and `transformers` libraries'; ours is
the incremental part.
"""

from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

from nanoinfer.prompts import PROMPT_FORMS, Prompt, flatten_text, unwrap_prompt
from nanoinfer.sampling_params import SamplingParams

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_REPLACEMENT = "\ufffd"  # what decoders show for bytes that are not, or not yet, a character
_LONGEST_OPEN = 3


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
        text, ids = unwrap_prompt(prompt)
        if text is None and ids is None:
            raise ValueError(f"prompt: got None, need {PROMPT_FORMS}")
        if ids is None:
            try:
                ids = self.require("text prompt").encode(text)
            except TypeError as error:  # a lone surrogate, say
                raise ValueError(f"prompt: got {text!r:.80}, need Unicode text") from error
        return text, ids

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
        options = {"chat_template": chat_template, "tokenize": False, **template_kwargs}
        try:
            text = hf.apply_chat_template([flatten_text(m) for m in messages], **options)
        except Exception as error:  # jinja's, and whatever a template's code raises
            raise ValueError(f"chat: the template failed: {error}") from error
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


class Detokenizer:
    """One answer's text, token by token.

    Decoding a single token is wrong (half a character, a lost space), decoding everything each
    time is quadratic. So a window of tokens is decoded, which starts two clean boundaries back:

        ids:     . . . . [ a b | c d ]        text shown up to b, which ended on a whole
                         prefix  read         character; new = decode(a..d) - decode(a..b)

    If the window ends in U+FFFDs, its last bytes may still become a character: they are held back.
    A character has at most 4 bytes, so after 4 tokens no more than 3 are. Without stop strings the
    text is made when somebody reads it, and at the end in one go: not between two steps.
    The window is the idea of vLLM's and TGI's `detokenize_incrementally`.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, params.skip_special_tokens)
        self._params = params
        self._ids: list[int] = []
        self._num_seen = 0  # ids that `_text` was made of
        self._prefix = self._read = 0
        self._old = ""  # decode(ids[prefix:read])
        self._shown = 0  # characters of the window beyond `_old` that are in `text` already
        self._text = ""

    @property
    def text(self) -> str:
        self._catch_up()
        return self._text

    def append(self, token_id: int, check_stop: bool = True) -> str | None:
        """Add one token; returns the stop string that its text completes, if any."""
        self._ids.append(token_id)
        if not self._params.stop:
            return None
        start = len(self._text)
        self._catch_up()
        return self._find_stop(start) if check_stop else None

    def finish(self) -> None:
        """No more tokens come: what was held back as half a character is shown as it is."""
        self._show(self._decode(self._ids[self._prefix :]))
        self._num_seen = len(self._ids)

    def num_stable_chars(self) -> int:
        """Length of `text` without a tail that may still become a stop string."""
        text, longest = self.text, max(map(len, self._params.stop), default=1) - 1
        for held in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-held:]) for s in self._params.stop):
                return len(text) - held
        return len(text)

    def _catch_up(self) -> None:
        """Take the new tokens into the text, one by one."""
        for end in range(self._num_seen + 1, len(self._ids) + 1):
            window = self._decode(self._ids[self._prefix : end])
            num_open = len(window) - len(window.rstrip(_REPLACEMENT))
            is_overdue = end - self._read > _LONGEST_OPEN
            num_held = min(num_open, _LONGEST_OPEN) if is_overdue else num_open
            if self._show(window[: len(window) - num_held]) and num_open == 0:
                self._prefix, self._read, self._shown = self._read, end, 0
                self._old = self._decode(self._ids[self._prefix : end])
        self._num_seen = len(self._ids)

    def _show(self, window: str) -> str:
        new = window[len(self._old) + self._shown :]
        self._text += new
        self._shown += len(new)
        return new

    def _find_stop(self, start: int) -> str | None:
        """Cut `text` at the earliest stop string that ends in text[start:]."""
        found = []
        for stop in self._params.stop:
            at = self._text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        if not found:
            return None
        at, stop = min(found)
        self._text = self._text[: at + len(stop) * self._params.include_stop_str_in_output]
        return stop
