"""The formats of a row, known by its columns: text, prompt and completion, messages, ShareGPT, Alpaca."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from ....core.json_values import parse_json
from ..errors import MissingPackage
from .messages import Message, checked, from_sharegpt

KINDS: dict[type | tuple[type, ...], str] = {
    type(None): "null",
    bool: "boolean",
    (int, float): "number",
    str: "text",
    Mapping: "object",
}
KNOWN = (
    '{"text"}, {"prompt", "completion"}, {"messages": [{"role", "content"}]}, '
    '{"conversations": [{"from", "value"}]} or {"instruction", "input", "output"}'
)
SET_HERE = {"add_generation_prompt", "chat_template", "continue_final_message", "tokenize", "tools"}
ALPACA = (
    "Below is an instruction that describes a task{with_input}. "
    "Write a response that appropriately completes the request."
)
ALPACA_INPUT = ", paired with an input that provides further context"


@dataclass(frozen=True)
class PlainText:
    """Text that is trained on in full, and may be cut anywhere."""

    text: str


@dataclass(frozen=True)
class PromptedText:
    """A prompt and the text that follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatMessages:
    """Messages for the chat template. With `prompt`, training is on all that follows the prompt."""

    messages: list[Message]
    prompt: list[Message] = field(default_factory=list)
    tools: list[object] | None = None
    template_arguments: Mapping[str, object] = field(default_factory=dict)


Content = PlainText | PromptedText | ChatMessages


def format_of(columns: Mapping[str, object], *, from_table: bool = False) -> str:
    """The name of the row's format; raises ValueError that lists its columns and the known formats.

    A text column next to "instruction" and "output" is the same text, already formatted, so it is read.
    """
    names = columns.keys()
    formats: list[str] = [name for name in ("text", "messages", "conversations") if name in names]
    if {"prompt", "completion"} <= names:
        formats.append("prompt and completion")
    elif "completion" in names or "prompt" in names and formats == ["text"]:
        formats = []
    if not formats and {"instruction", "output"} <= names and "prompt" not in names:
        formats = ["instruction and output"]
    if len(formats) == 1:
        return formats[0]
    kind = "columns" if from_table else "keys"
    listed = ", ".join(map(repr, names)) or "(none)"
    raise ValueError(f"has the {kind} {listed}; a row is {KNOWN}")


def content_of(format: str, columns: Mapping[str, object], *, chat: bool, from_table: bool = False) -> Content:
    """What a row holds; raises ValueError with the reason. chat: whether the tokenizer has a chat template."""
    if format == "text":
        return PlainText(text_field(columns, "text", empty=from_table))
    if format == "prompt and completion" and not isinstance(columns["prompt"], list):
        return PromptedText(text_field(columns, "prompt", empty=True), text_field(columns, "completion"))
    if format == "instruction and output":
        return _alpaca(columns, chat)
    tools, arguments = _tools(columns), _template_arguments(columns)
    if format == "prompt and completion":
        prompt, completion = (checked(columns[key], key, one_side=True) for key in ("prompt", "completion"))
        if prompt[-1]["role"] not in ("user", "tool"):
            raise ValueError(f"the last message of 'prompt' has the role {prompt[-1]['role']}; expected user or tool")
        if completion[0]["role"] != "assistant":
            raise ValueError(
                f"the first message of 'completion' has the role {completion[0]['role']}; expected assistant"
            )
        return ChatMessages(completion, prompt, tools, arguments)
    if format == "conversations":
        return ChatMessages(_sharegpt(columns), [], tools, arguments)
    return ChatMessages(checked(columns["messages"]), [], tools, arguments)


def _sharegpt(columns: Mapping[str, object]) -> list[Message]:
    """The messages of a ShareGPT row: TRL renames the keys, and the roles get the names of chat templates."""
    turns = columns["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError('\'conversations\' is not a list of {"from", "value"}')
    if not all({"from", "value"} <= turn.keys() for turn in turns):
        return checked(turns, "conversations")  # of {"role", "content"}
    try:
        from trl.data_utils import maybe_convert_to_chatml
    except ImportError as error:
        raise MissingPackage("Rows with 'conversations' are read with", "trl") from error
    row = maybe_convert_to_chatml({"conversations": copy.deepcopy(turns)})
    system = columns.get("system")
    if system and isinstance(system, str):
        row["messages"].insert(0, {"role": "system", "content": system})
    return checked(from_sharegpt(row["messages"]), "conversations")


def _alpaca(columns: Mapping[str, object], chat: bool) -> Content:
    """Stanford's Alpaca: as a conversation, or as the original prompt if the tokenizer has no chat template."""
    instruction, output = text_field(columns, "instruction"), text_field(columns, "output")
    context = "" if columns.get("input") is None else text_field(columns, "input", empty=True)
    system = "" if columns.get("system") is None else text_field(columns, "system", empty=True)
    if not chat:
        first = system or ALPACA.format(with_input=ALPACA_INPUT if context else "")
        middle = f"### Input:\n{context}\n\n" if context else ""
        return PromptedText(f"{first}\n\n### Instruction:\n{instruction}\n\n{middle}### Response:\n", output)
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    question = f"{instruction}\n\n{context}" if context else instruction
    return ChatMessages([*turns, {"role": "user", "content": question}, {"role": "assistant", "content": output}])


def _tools(columns: Mapping[str, object]) -> list[object] | None:
    """The tools that the model may call, a list or the JSON text of one, as TRL reads them."""
    tools = columns.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ValueError(f"'tools' is not JSON: {error}") from error
    if tools is None or tools == "":
        return None
    if not isinstance(tools, list):
        raise ValueError(f"'tools' is {with_article(tools)}; expected a list of tools, or its JSON text")
    return tools or None


def _template_arguments(columns: Mapping[str, object]) -> Mapping[str, object]:
    arguments = columns.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"'chat_template_kwargs' is {with_article(arguments)}; expected an object")
    if reserved := sorted(SET_HERE & arguments.keys()):
        raise ValueError(f"'chat_template_kwargs' has {', '.join(reserved)}, which the command sets itself")
    return cast("Mapping[str, object]", arguments)


def with_article(value: object) -> str:
    """ "a list", "null": the kind of a value in the words of JSON."""
    kind = next((words for types, words in KINDS.items() if isinstance(value, types)), type(value).__name__)
    return kind if kind == "null" else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def text_field(row: Mapping[str, object], key: str, *, empty: bool = False) -> str:
    """The text under a key; raises ValueError if it is not text, empty, or not valid Unicode."""
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {with_article(value)}; expected text")
    if not value and not empty:
        raise ValueError(f"{key!r} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key!r} contains an unpaired surrogate, U+{ord(value[error.start]):04X}") from error
    return value
