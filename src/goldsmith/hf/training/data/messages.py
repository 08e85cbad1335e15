"""Checks the messages of a conversation, and brings them into the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....core.json_values import parse_json

Message = dict[str, object]  # role, content, and what else the chat template reads

ASSISTANT = "assistant"
SHAREGPT = {  # who speaks, and the role in chat templates
    "human": "user", "user": "user", "gpt": ASSISTANT, "assistant": ASSISTANT, "system": "system",
    "function_call": ASSISTANT, "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip


def checked(messages: object, key: str = "messages", *, one_side: bool = False) -> list[Message]:
    """The messages with text as content and tool calls as objects; raises ValueError with the reason.

    one_side: this is only the prompt or only the completion, so the assistant need not speak in it.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{key!r} is not a list of {{"role", "content"}}')
    turns = [_message(turn, number) for number, turn in enumerate(messages, 1)]
    if any("tool_calls" in turn for turn in turns) and not one_side:
        _check_answers(turns)
    if not one_side and not any(turn["role"] == ASSISTANT for turn in turns):
        roles = ", ".join(dict.fromkeys(str(turn["role"]) for turn in turns))
        raise ValueError(f"no message is the assistant's; the roles are {roles}")
    return turns


def _check_answers(turns: Sequence[Message]) -> None:
    """Raises ValueError for a tool's message that follows neither the assistant's nor another tool's."""
    before = None
    for number, turn in enumerate(turns, 1):
        if turn["role"] == "tool" and before not in (ASSISTANT, "tool"):
            place = f"follows one of the {before}'s" if before else "comes first"
            raise ValueError(f"the roles are out of order: message {number} is a tool's and {place}")
        before = turn["role"]


def _message(turn: object, number: int) -> Message:
    if not isinstance(turn, dict) or not (turn.keys() >= {"role", "content"} or turn.keys() >= {"role", "tool_calls"}):
        raise ValueError(f"message {number} lacks 'role' or 'content'")
    if not isinstance(turn["role"], str):
        raise ValueError(f"'role' of message {number} is a {type(turn['role']).__name__}; expected text")
    # templates ask whether a key is there: a null, which tables write for missing values, would count as there
    message: Message = {name: value for name, value in turn.items() if value is not None or name == "content"}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = _calls(calls, number)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _joined(content, number)
    elif content is None:
        if not calls:
            raise ValueError(f"'content' of message {number} is null, and it has no 'tool_calls'")
    elif not isinstance(content, str):
        raise ValueError(f"'content' of message {number} is a {type(content).__name__}; expected text")
    return message


def _joined(parts: Sequence[object], number: int) -> str:
    """The text of content parts, one after the other, as the templates that know parts write them."""
    texts = []
    for place, part in enumerate(parts, 1):
        if not isinstance(part, dict) or not isinstance(part.get("type", "text"), str):
            raise ValueError(
                f"'content' of message {number} is a list, and part {place} of it is a {type(part).__name__}; "
                'expected {"type": "text", "text": ...}'
            )
        kind, text = part.get("type", "text"), part.get("text")
        if kind != "text":
            raise ValueError(f"part {place} of message {number} has the type {kind}: this command trains on text alone")
        if not isinstance(text, str):
            raise ValueError(f"'text' of part {place} of message {number} is a {type(text).__name__}; expected text")
        texts.append(text)
    return "".join(texts)


def _calls(calls: object, number: int) -> list[object]:
    """Tool calls whose arguments are objects: templates write objects as JSON, and would quote a JSON text again."""
    if not isinstance(calls, list):
        raise ValueError(f"'tool_calls' of message {number} is a {type(calls).__name__}; expected a list")
    result: list[object] = []
    for place, call in enumerate(calls, 1):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool call {place} of message {number} has no function with a 'name'")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}")
            except ValueError as error:
                raise ValueError(
                    f"the arguments of tool call {place} of message {number} are not JSON: {error}"
                ) from error
        if arguments is not None and not isinstance(arguments, dict):
            raise ValueError(
                f"the arguments of tool call {place} of message {number} are a {type(arguments).__name__}; "
                "expected an object"
            )
        function = {**function, "arguments": arguments or {}}
        result.append({**call, "function": function} if "function" in call else function)
    return result


def from_sharegpt(turns: Sequence[Mapping[str, object]]) -> list[Message]:
    """ShareGPT's speakers as roles of chat templates; raises ValueError if they do not take turns."""
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        speaker = turn["role"]
        if not isinstance(speaker, str) or speaker not in SHAREGPT:
            raise ValueError(f"'from' of message {number} is {speaker}; known are {', '.join(SHAREGPT)}")
        role = SHAREGPT[speaker]
        before = str(messages[-1]["role"]) if messages else None
        expected = {None: ("system", "user"), "system": ("user",), ASSISTANT: ("user", "tool")}.get(
            before, (ASSISTANT, "tool") if before == "tool" else (ASSISTANT,)
        )
        if role not in expected:
            where = f"follows one of the {before}'s" if before else "comes first"
            raise ValueError(
                f"the roles are out of order: message {number} is the {role}'s ({speaker}) and {where}; "
                f"expected {' or '.join(expected)}"
            )
        message: Message = {**turn, "role": role}
        if speaker == "function_call":
            message |= {"content": None, "tool_calls": _written_call(turn.get("content"), number)}
        messages.append(message)
    return messages


def _written_call(value: object, number: int) -> list[object]:
    try:
        call = parse_json(str(value))
    except ValueError as error:
        raise ValueError(f"the function call of message {number} is not JSON: {error}") from error
    calls = call if isinstance(call, list) else [call]
    return [{"type": "function", "function": one} for one in calls]
