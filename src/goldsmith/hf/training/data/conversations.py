"""Tokens of a conversation, written by the tokenizer's chat template, and which of them belong to the assistant."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os.path import commonprefix
from typing import TYPE_CHECKING

from ...model_types import Tokenizer
from ..errors import MissingPackage
from .messages import ASSISTANT, Message

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as BackendTokenizer


class RewrittenTurn(ValueError):
    """The chat template writes a message differently when more messages follow: its place is unknown."""

    def __init__(self, number: int):
        super().__init__(
            f"the chat template writes message {number} differently when more messages follow, so the place of the "
            "answer is unknown; put each answer into a row of its own, or use --train-on all"
        )


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, with the tools and arguments of one row; `source` replaces the template."""

    tokenizer: Tokenizer
    tools: list[object] | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    source: str | None = None

    def render(self, turns: Sequence[Message], *, ask: bool = False) -> str:
        """The text of a conversation; ask: up to the point where the assistant's next answer begins."""
        replaced = {} if self.source is None else {"chat_template": self.source}
        with _explained():
            text = self.tokenizer.apply_chat_template(
                turns, tools=self.tools, tokenize=False, add_generation_prompt=ask, **replaced, **self.arguments
            )
            text.encode()
        return text

    def check(self, turns: Sequence[Message], text: str) -> None:
        """Raises ValueError if the template leaves out tool calls, which would train on an answer that is not there."""
        for number, turn in enumerate(turns, 1):
            if turn.get("tool_calls") and self._text_without_calls(turns, number - 1) == text:
                raise ValueError(f"the chat template does not write the tool calls of message {number}")
        if self.tools and replace(self, tools=None).render(turns) == text:
            raise ValueError("the chat template does not write the 'tools' of the row; remove them from the data")

    def _text_without_calls(self, turns: Sequence[Message], number: int) -> str | None:
        bare = {name: value for name, value in turns[number].items() if name != "tool_calls"}
        try:
            return self.render([*turns[:number], bare, *turns[number + 1 :]])
        except ValueError:  # a template that knows tool calls may refuse the tool's answer without one
            return None

    def for_training(self) -> ChatTemplate | None:
        """TRL's template for this model, which writes each message the same whatever follows; None if TRL has none."""
        source = _training_template(self.tokenizer)
        return None if source is None or source == self.source else replace(self, source=source)


def conversation(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    every: bool = False,
    tools: list[object] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[list[int], list[bool]]:
    """(tokens, which of them are trained on) of messages; raises ValueError with the reason.

    Trains on the assistant's tokens, or on all. A token is the assistant's if any of its characters is, also a space,
    as in transformers' `return_assistant_tokens_mask`.
    """
    _need_template(tokenizer)
    template = ChatTemplate(tokenizer, tools, arguments or {})
    text = template.render(messages)
    template.check(messages, text)
    if every:
        return _all(text, tokenizer)
    try:
        spans = _spans(messages, text, template)
    except RewrittenTurn:
        if (training := template.for_training()) is None:
            raise
        text = training.render(messages)
        spans = _spans(messages, text, training)
    ids, inside = _marked(text, spans, tokenizer)
    if not any(inside[1:]):
        raise ValueError("the assistant says nothing in it")
    return ids, inside


def templated(
    prompt: Sequence[Message],
    completion: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    every: bool = False,
    tools: list[object] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[list[int], list[bool]]:
    """As `conversation`, for a prompt and a completion in messages; all of the completion is trained on."""
    _need_template(tokenizer)
    try:
        from trl.data_utils import apply_chat_template
    except ImportError as error:
        raise MissingPackage("A prompt and a completion that are messages need", "trl") from error
    turns = [*prompt, *completion]
    template = ChatTemplate(tokenizer, tools, arguments or {})
    template.check(turns, template.render(turns))
    row = {"prompt": list(prompt), "completion": list(completion), "chat_template_kwargs": dict(arguments or {})}
    with _explained():
        parts = apply_chat_template(row, tokenizer, tools)
    text = parts["prompt"] + parts["completion"]
    return _all(text, tokenizer) if every else _marked(text, [(len(parts["prompt"]), len(text))], tokenizer)


def _need_template(tokenizer: Tokenizer) -> None:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the model's tokenizer has no chat template, so it cannot format 'messages'; "
            'give {"prompt", "completion"} or {"text"} instead'
        )


@contextmanager
def _explained() -> Iterator[None]:
    """Turns the errors of a chat template into ValueError."""
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from error
    except (TypeError, AttributeError, KeyError, IndexError) as error:  # of an expression, as in role + content
        raise ValueError(f"the chat template cannot format the conversation: {error}") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"a message contains an incomplete character: {error.reason}") from error


def _training_template(tokenizer: Tokenizer) -> str | None:
    """TRL's chat template for the training of this tokenizer's model, or None if TRL is missing or knows none."""
    template = tokenizer.chat_template
    if template not in _TRAINING_TEMPLATES:
        try:
            from trl.chat_template_utils import get_training_chat_template

            _TRAINING_TEMPLATES[template] = get_training_chat_template(tokenizer)
        except (ImportError, ValueError):  # ValueError: a template that TRL does not know
            _TRAINING_TEMPLATES[template] = None
    return _TRAINING_TEMPLATES[template]


_TRAINING_TEMPLATES: dict[str | None, str | None] = {}


def _all(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids, [True] * len(ids)


def _marked(text: str, spans: list[tuple[int, int]], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """The tokens of a text, and for each whether it has a character in one of the spans."""
    ids, places = _tokens_with_places(text, tokenizer)
    borders = [border for span in spans for border in span]
    if crossing := [k for k, place in enumerate(places) if _crosses(place, borders)]:
        added = tokenizer.added_tokens_decoder  # a new dict at each access
        for k in crossing:
            places[k] = _without_blanks(text, places[k], added.get(ids[k]))
    return ids, _inside(places, spans)


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


def _spans(turns: Sequence[Message], text: str, template: ChatTemplate) -> list[tuple[int, int]]:
    """Where in the text each answer is: from the point where generation would begin to the end of its turn."""
    spans = []
    for number, turn in enumerate(turns):
        if turn["role"] != ASSISTANT:
            continue
        before, after = _before(turns, number, template), template.render(turns[: number + 1])
        ends = len(after.rstrip())
        if not text.startswith(before) or not text.startswith(after[:ends]):
            raise RewrittenTurn(number + 1)
        while ends < len(after) and text.startswith(after[ends], ends):  # some end the last turn with other spaces
            ends += 1
        spans.append((len(before), ends))
    return spans


def _before(turns: Sequence[Message], number: int, template: ChatTemplate) -> str:
    """The text up to the point where generation of this answer would begin."""
    if number:
        return template.render(turns[:number], ask=True)
    # no template accepts an empty conversation: take the common prefix of two that differ from the answer on
    return commonprefix([template.render([{**turns[0], "content": answer}]) for answer in ("a", "b")])
