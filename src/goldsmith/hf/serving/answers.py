"""The objects of OpenAI's API for one answer, whole or in pieces; transformers' own for chats."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import ReasoningText, ToolCall

from .messages import AnswerParts, Part
from .running_text import End, Piece

DONE = "data: [DONE]\n\n"
_FORMS = ChatCompletionHandler(None, None)  # type: ignore[arg-type]  # only for the forms of its answers


def usage(prompt: int, tokens: int) -> CompletionUsage:
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=tokens, total_tokens=prompt + tokens)


def sse(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


class ChatAnswer:
    """A chat's answer: `begin`, `add` and `end` give the pieces of a stream; `whole` the answer after `end`.

    count   whether a stream ends with a piece of its numbers of tokens, which has no choices
    """

    def __init__(self, model: str, prompt: int, parts: AnswerParts, *, count: bool = False) -> None:
        self._count = count
        self._id, self._model, self._prompt, self._parts = f"chatcmpl-{uuid.uuid4().hex}", model, prompt, parts
        self._content, self._reasoning = "", ""
        self._calls: list[ToolCall] = []
        self._end: dict[str, Any] = {}

    def begin(self) -> str:
        return _FORMS._build_chunk_sse(self._id, role="assistant", model=self._model)

    def add(self, piece: Piece) -> str:
        return "".join(map(self._part, self._parts.add(piece.text)))

    def end(self, end: End) -> str:
        pieces = "".join(map(self._part, self._parts.end(end.closing)))
        reason = "tool_calls" if self._calls and end.reason == "stop" else end.reason
        self._end = {"finish_reason": reason, "usage": usage(self._prompt, end.tokens)}
        pieces += _FORMS._build_chunk_sse(self._id, model=self._model, finish_reason=reason)
        if self._count:
            own = {"id": self._id, "object": "chat.completion.chunk", "created": int(time.time()), "model": self._model}
            pieces += sse(own | {"choices": [], "usage": self._end["usage"].model_dump(exclude_none=True)})
        return pieces + DONE

    def whole(self) -> dict[str, Any]:
        calls = [
            ChatCompletionMessageToolCall(
                id=f"{self._id}_tool_call_{number}", type="function",
                function={"name": call.name, "arguments": call.arguments},
            )
            for number, call in enumerate(self._calls)
        ]  # fmt: skip
        return _FORMS._build_completion(
            self._id, self._content, self._model, tool_calls=calls or None,  # type: ignore[arg-type]
            reasoning_content=self._reasoning or None, **self._end,
        )  # fmt: skip

    def _part(self, part: Part) -> str:
        if isinstance(part, ToolCall):
            self._calls.append(part)
            number = len(self._calls) - 1
            call = ChoiceDeltaToolCall(
                index=number, type="function", id=f"{self._id}_tool_call_{number}",
                function={"name": part.name, "arguments": part.arguments},
            )  # fmt: skip
            return _FORMS._build_chunk_sse(self._id, model=self._model, tool_calls=[call])
        if isinstance(part, ReasoningText):
            self._reasoning += part
            return _FORMS._build_chunk_sse(self._id, model=self._model, reasoning_content=part)
        self._content += part
        return _FORMS._build_chunk_sse(self._id, model=self._model, content=part)


class CompletionAnswer:
    """A completion's answer, as `ChatAnswer`. transformers has none before 5.18, and its later one adds `suffix`."""

    def __init__(self, model: str, prompt: int, *, count: bool = False) -> None:
        self._count = count
        self._id, self._model, self._prompt = f"cmpl-{uuid.uuid4().hex}", model, prompt
        self._created, self._text = int(time.time()), ""
        self._end: End | None = None

    def begin(self) -> str:
        return ""

    def add(self, piece: Piece) -> str:
        self._text += piece.text
        return sse(self._object(piece.text, None, None))

    def end(self, end: End) -> str:
        self._end = end
        pieces = sse(self._object("", end.reason, None))
        if self._count:
            pieces += sse(self._object("", None, usage(self._prompt, end.tokens)) | {"choices": []})
        return pieces + DONE

    def whole(self) -> dict[str, Any]:
        end = self._end or End("stop", 0)
        return self._object(self._text, end.reason, usage(self._prompt, end.tokens))

    def _object(self, text: str, reason: str | None, used: CompletionUsage | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        result = {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}
        return result | {"choices": [choice]} | ({"usage": used.model_dump(exclude_none=True)} if used else {})


Answer = ChatAnswer | CompletionAnswer
