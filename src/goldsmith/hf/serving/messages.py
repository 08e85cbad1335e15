"""The messages of a chat as ids of a prompt, and an answer's text as content, reasoning and tool calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.cli.serving.utils import (
    BaseHandler,
    Modality,
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
    response_events_to_chunks,
)
from transformers.utils.chat_template_utils import render_jinja_template

from ..model_types import Tokenizer
from ..offload.generation import chat_ids
from .refusals import BAD_REQUEST, RequestRefusal
from .request_fields import field_of, shortened, shown, wrong

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT = ("text", "input_text", "output_text")
Part = str | ReasoningText | ToolCall


def chat_prompt(tokenizer: Tokenizer, body: dict[str, Any]) -> tuple[list[int], list[object] | None]:
    """The ids of a chat's messages in the tokenizer's template, and its tools; raises RequestRefusal."""
    if not tokenizer.chat_template:
        raise RequestRefusal(
            BAD_REQUEST, "The model's tokenizer has no chat template: send the text as `prompt` to /v1/completions."
        )
    messages = _checked_messages(body.get("messages"))
    tools = field_of(body, "tools", list)
    if body.get("tool_choice") == "none":
        tools = None
    options = field_of(body, "chat_template_kwargs", dict) or {}
    for name, value in options.items():
        if name in _reserved() or not isinstance(value, (str, int, float, bool, type(None))):
            raise wrong(
                "chat_template_kwargs", f"{shortened(name)} is not supported: give the template's own words only."
            )
    try:
        inputs = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
        inputs = [message | known for message, known in zip(messages, inputs, strict=True)]  # it drops other keys
        return chat_ids(tokenizer, inputs, tools=tools or None, **options), tools or None
    except TemplateError as error:
        raise wrong("messages", f"the model's chat template refuses them: {error}.") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise wrong(
            "messages", f"they do not fit the model's chat template ({type(error).__name__}: {error})."
        ) from error


@functools.cache
def _reserved() -> frozenset[str]:
    """Names that the server or transformers gives to a template, or takes on the way there."""
    ways = (chat_ids, PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    return frozenset({"messages"}.union(*(inspect.signature(way).parameters for way in ways)))


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with a role and text; raises RequestRefusal for images and for files: a request opens no address."""
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "expected a list of at least one message.")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong("messages", 'every message needs a role, such as {"role": "user", "content": "Hello"}.')
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in TEXT or not isinstance(part.get("text"), str):
                only = "this server takes text only, and opens no file and no address."
                raise wrong("messages", f"a part of type {shown(kind)} is not supported: {only}")
        if not isinstance(content, (str, list, type(None))):
            raise wrong("messages", "content: expected text, or a list of parts of type text.")
    return messages


class AnswerParts:
    """An answer's text in parts, by the model's response template of transformers; without one it is all content."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, ids: Sequence[int], tools: list[object] | None
    ) -> None:
        own = _fits(tokenizer, model, ids)
        self._parser = build_response_parser(tokenizer, model, list(ids), **_tools(tools)) if own else None
        self._begin: list[Part] = response_events_to_chunks(self._parser.initial_events) if self._parser else []

    @property
    def special(self) -> bool:
        """Whether the text must hold special tokens, which mark the parts."""
        return self._parser is not None

    def add(self, text: str) -> list[Part]:
        if self._parser is None:
            return [text]
        begin, self._begin = self._begin, []
        return [*begin, *cast("list[Part]", response_events_to_chunks(self._parser.feed(text)))]

    def end(self, closing: str) -> list[Part]:
        """The parts that the end of the text completes, given the end token's text; an unfinished tool call is none.

        The end token may close a part in the model's template. In a template of another model it would be content.
        """
        if self._parser is None:
            return []
        parts = self.add(closing)
        try:
            _, events = self._parser.finalize()
            parts += cast("list[Part]", response_events_to_chunks(events))
        except (ValueError, RuntimeError):  # the text ended within a tool call
            pass
        return [part for part in parts if isinstance(part, ToolCall) or part != closing]


def _fits(tokenizer: Tokenizer, model: PreTrainedModel, ids: Sequence[int]) -> bool:
    """Whether the response template belongs to this prompt: where its anchor is missing, transformers takes the whole
    prompt for a part of the answer (it chooses templates by the model's type, whatever the tokenizer)."""
    template = get_response_template(tokenizer, model) or {}
    anchors = template.get("start_anchor") or []
    prompt = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return not anchors or any(anchor in prompt for anchor in ([anchors] if isinstance(anchors, str) else anchors))


def _tools(tools: list[object] | None) -> dict[str, Any]:
    """`tools` as a keyword, which transformers 5.17 does not have."""
    return {"tools": tools} if "tools" in inspect.signature(build_response_parser).parameters else {}
