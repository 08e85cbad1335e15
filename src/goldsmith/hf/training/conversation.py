"""Conversations through the tokenizer's chat template, and which of their tokens the assistant says."""

from __future__ import annotations

from typing import Any

ASSISTANT = "assistant"


def conversation(messages: object, tokenizer: Any, *, every: bool = False) -> tuple[list[int], list[bool]]:
    """(tokens, whether they count) of a list of {"role", "content"}; ValueError with the reason.

    What the assistant says counts, or every token.
    """
    turns = _checked(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the model's tokenizer has no chat template, so it cannot say how 'messages' are written; "
            'give {"prompt", "completion"} or {"text"} instead'
        )
    text = _rendered(turns, tokenizer)
    if every:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids, [True] * len(ids)
    spans = _spans(turns, text, tokenizer)
    try:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    except NotImplementedError as error:
        raise ValueError("the model's tokenizer cannot say where a token stands (it has no fast version)") from error
    inside = [any(a <= first < last <= b for a, b in spans) for first, last in found["offset_mapping"]]
    if not any(inside[1:]):
        raise ValueError("the assistant says nothing in it")
    return found["input_ids"], inside


def _checked(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('\'messages\' is no list of {"role", "content"}')
    for number, turn in enumerate(messages, 1):
        if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
            raise ValueError(f"message {number} lacks 'role' or 'content'")
        for key in ("role", "content"):
            if not isinstance(turn[key], str):
                raise ValueError(f"'{key}' of message {number} is a {type(turn[key]).__name__}; expected text")
    if not any(turn["role"] == ASSISTANT for turn in messages):
        roles = ", ".join(dict.fromkeys(turn["role"] for turn in messages))
        raise ValueError(f"no message is the assistant's; the roles are {roles}")
    return messages


def _rendered(turns: list[dict[str, Any]], tokenizer: Any, *, ask: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
        text.encode()
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"a message holds half a character: {error.reason}") from error
    return text


def _spans(turns: list[dict[str, Any]], text: str, tokenizer: Any) -> list[tuple[int, int]]:
    """Where in the text each answer stands: from where generation would begin to the end of its turn."""
    spans = []
    for number, turn in enumerate(turns):
        if turn["role"] != ASSISTANT:
            continue
        before = _rendered(turns[:number], tokenizer, ask=True) if number else ""
        after = _rendered(turns[: number + 1], tokenizer)
        begins, ends = len(before), len(after)
        if not text.startswith(before) or not text.startswith(after.rstrip()):
            raise ValueError(
                f"the chat template writes message {number + 1} otherwise when more follows, so where the answer "
                "stands is not known; give each answer a row of its own, or use --train-on all"
            )
        spans.append((begins, min(ends, len(text))))
    return spans
