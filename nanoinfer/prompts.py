"""What a user may pass as a prompt, and what is wrong with it.

In: text, token ids, a dict of one of them, a conversation; one or a list of them.
Out: one form, checked. What can never run is refused here, with what was given and what is needed,
before anything is queued.
"""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

Prompt = str | list[int] | Mapping[str, Any]
PROMPT_FORMS = "text, a list of token ids or a dict of one of them"


def as_prompt_list(prompts: Any) -> list[Prompt]:
    """One prompt in any form, or several of them -> a list. A list of ints is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: got {prompts!r:.80}, need {PROMPT_FORMS}, or a list of them")
    each = list(prompts.tolist() if hasattr(prompts, "tolist") else prompts)
    return [each] if each and isinstance(each[0], Integral) else each


def as_conversations(messages: Any) -> list[Any]:
    """One conversation or several -> a list; a conversation is a list of role and content."""
    is_list = isinstance(messages, list | tuple)
    each = [messages] if is_list and any(isinstance(m, Mapping) for m in messages) else messages
    if not is_list or not all(isinstance(m, Mapping) and "role" in m for c in each for m in c):
        need = "a list of {'role': ..., 'content': ...}, or a list of such lists"
        raise ValueError(f"chat: got {messages!r:.80}, need {need}")
    return list(each)


def flatten_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's content parts, if all of them are text, as one string."""
    parts = message.get("content")
    if not isinstance(parts, list) or any(part.get("type") != "text" for part in parts):
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in parts)}


def unwrap_prompt(prompt: Prompt) -> tuple[str | None, Any]:
    """A prompt in any form -> (its text if given, its token ids if given)."""
    if isinstance(prompt, str):
        return prompt, None
    if not isinstance(prompt, Mapping):
        return None, prompt
    given = {key for key, value in prompt.items() if value is not None}
    if given - {"prompt", "prompt_token_ids"} or not prompt:
        got = sorted(prompt, key=str)
        raise ValueError(f"prompt: got keys {got}, need 'prompt' (text) or 'prompt_token_ids'")
    text = prompt.get("prompt")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt: got {type(text).__name__} under 'prompt', need text")
    return text, prompt.get("prompt_token_ids")


def check_prompt(ids: Any, vocab_size: int, max_model_len: int) -> list[int]:
    """A prompt's token ids as ints that the model knows, and few enough."""
    is_list = isinstance(ids, Iterable) and not isinstance(ids, bytes)
    if not is_list or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"prompt: got {ids!r:.80}, need {PROMPT_FORMS}")
    ids = [int(i) for i in ids]
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
