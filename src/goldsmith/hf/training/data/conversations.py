"""Tokens of a conversation, written by the tokenizer's chat template, and which of them belong to the assistant."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import commonprefix
from typing import TYPE_CHECKING

from ...model_types import Tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as BackendTokenizer

Turn = dict[str, str]  # role, content

ASSISTANT = "assistant"


def conversation(messages: object, tokenizer: Tokenizer, *, every: bool = False) -> tuple[list[int], list[bool]]:
    """(tokens, which of them are trained on) of a list of {"role", "content"}; raises ValueError with the reason.

    Trains on the assistant's tokens, or on all. A token is the assistant's if any of its characters is, also a space,
    as in transformers' `return_assistant_tokens_mask`.
    """
    turns = _checked(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the model's tokenizer has no chat template, so it cannot format 'messages'; "
            'give {"prompt", "completion"} or {"text"} instead'
        )
    text = _rendered(turns, tokenizer)
    if every:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids, [True] * len(ids)
    spans = _spans(turns, text, tokenizer)
    ids, places = _tokens_with_places(text, tokenizer)
    borders = [border for span in spans for border in span]
    if crossing := [k for k, place in enumerate(places) if _crosses(place, borders)]:
        added = tokenizer.added_tokens_decoder  # a new dict at each access
        for k in crossing:
            places[k] = _without_blanks(text, places[k], added.get(ids[k]))
    inside = _inside(places, spans)
    if not any(inside[1:]):
        raise ValueError("the assistant says nothing in it")
    return ids, inside


def _tokens_with_places(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[tuple[int, int]]]:
    """The tokens of a text, and the positions in the text where each token begins and ends."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            "the model's tokenizer has no fast version and cannot report the positions of tokens; "
            "use --train-on all, which does not need them"
        )
    with _untrimmed(tokenizer.backend_tokenizer):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # a token without width counts as part of what follows it
    return encoding["input_ids"], [(first, max(last, first + 1)) for first, last in encoding["offset_mapping"]]


@contextmanager
def _untrimmed(inner: BackendTokenizer) -> Iterator[None]:
    """Within this context, the offsets of a token include its spaces.

    Only post-processors trim spaces (`trim_offsets`, by default in ByteLevel), down to nothing for a token of spaces.
    They also add special tokens, which are not requested here.
    """
    from tokenizers.processors import ByteLevel

    kept = inner.post_processor
    if kept is not None:
        inner.post_processor = ByteLevel(trim_offsets=False)
    try:
        yield
    finally:
        if kept is not None:
            inner.post_processor = kept


def _crosses(place: tuple[int, int], borders: list[int]) -> bool:
    at = bisect_right(borders, place[0])
    return at < len(borders) and borders[at] < place[1]


def _without_blanks(text: str, place: tuple[int, int], added: AddedToken | None) -> tuple[int, int]:
    """The token's own characters: an added token may also cover the spaces next to it."""
    first, last = place
    if added is not None and text[first:last].strip():
        if added.lstrip:
            first = last - len(text[first:last].lstrip())
        if added.rstrip:
            last = first + len(text[first:last].rstrip())
    return first, last


def _inside(places: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """For each place, whether it overlaps a span; both lists are in the order of the text."""
    inside, k = [], 0
    for first, last in places:
        while k < len(spans) and spans[k][1] <= first:
            k += 1
        inside.append(k < len(spans) and spans[k][0] < last)
    return inside


def _checked(messages: object) -> list[Turn]:
    if not isinstance(messages, list) or not messages:
        raise ValueError('\'messages\' is not a list of {"role", "content"}')
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


def _rendered(turns: list[Turn], tokenizer: Tokenizer, *, ask: bool = False) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
        text.encode()
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"a message contains an incomplete character: {error.reason}") from error
    return text


def _spans(turns: list[Turn], text: str, tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Where in the text each answer is: from the point where generation would begin to the end of its turn."""
    spans = []
    for number, turn in enumerate(turns):
        if turn["role"] != ASSISTANT:
            continue
        before, after = _before(turns, number, tokenizer), _rendered(turns[: number + 1], tokenizer)
        ends = len(after.rstrip())
        if not text.startswith(before) or not text.startswith(after[:ends]):
            raise ValueError(
                f"the chat template writes message {number + 1} differently when more messages follow, so the place of "
                "the answer is unknown; put each answer into a row of its own, or use --train-on all"
            )
        while ends < len(after) and text.startswith(after[ends], ends):  # some end the last turn with other spaces
            ends += 1
        spans.append((len(before), ends))
    return spans


def _before(turns: list[Turn], number: int, tokenizer: Tokenizer) -> str:
    """The text up to the point where generation of this answer would begin."""
    if number:
        return _rendered(turns[:number], tokenizer, ask=True)
    # no template accepts an empty conversation: take the common prefix of two that differ from the answer on
    return commonprefix([_rendered([turns[0] | {"content": answer}], tokenizer) for answer in ("a", "b")])
