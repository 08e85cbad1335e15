"""The fields of a request's JSON body, checked: what is not supported is refused by name, never ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from .refusals import BAD_REQUEST, RequestRefusal

Value = TypeVar("Value")
STOPS = 16  # stop strings in a request; OpenAI allows 4
SHARED = {
    "model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "user",
    "metadata", "n", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs",
}  # fmt: skip
CHAT = SHARED | {
    "messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "response_format", "store", "top_logprobs", "service_tier",
}  # fmt: skip
COMPLETIONS = SHARED | {"prompt", "best_of", "echo", "suffix"}
# field -> values that mean "as without the field"; every other value would change the answer, and is refused
WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
}
KINDS: dict[type, str] = {
    str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "an object",
    list: "a list", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True)
class RequestFields:
    """The fields that a chat and a completion share. None: the request leaves it to the server."""

    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool  # whether a stream ends with the numbers of tokens


def wrong(field: str, text: str) -> RequestRefusal:
    return RequestRefusal(BAD_REQUEST, f"{field}: {text}", field=field)


def read_fields(body: object, known: set[str]) -> tuple[RequestFields, dict[str, object]]:
    """The shared fields of a body, and the body; raises RequestRefusal for what is not supported."""
    if not isinstance(body, dict):
        raise RequestRefusal(BAD_REQUEST, f"The body is {KINDS.get(type(body), 'no object')}; expected a JSON object.")
    for field in body:
        if field not in known:
            raise wrong(shortened(field), "this server does not know the field: leave it out.")
    for field, values in WITHOUT_EFFECT.items():
        value = body.get(field)
        alike = (value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
        if value is not None and not any(alike):
            raise wrong(field, f"{shown(value)} is not supported: leave the field out.")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    options = field_of(body, "stream_options", dict, _only_usage, "only include_usage is known")
    field_of(body, "user", str)
    field_of(body, "metadata", dict)
    fields = RequestFields(
        model=field_of(body, "model", str),
        max_tokens=field_of(body, limit, int, lambda value: value >= 1, "expected at least 1"),
        temperature=field_of(body, "temperature", float, lambda value: 0 <= value <= 100, "expected 0 to 100"),
        top_p=field_of(body, "top_p", float, lambda value: 0 < value <= 1, "expected a share above 0 and at most 1"),
        top_k=field_of(body, "top_k", int, lambda value: value >= 1, "expected at least 1"),
        seed=field_of(body, "seed", int, lambda value: -(2**63) <= value < 2**64, "expected -2^63 to 2^64 - 1"),
        stop=_stops(body.get("stop")),
        stream=bool(field_of(body, "stream", bool)),
        usage=bool(field_of(options or {}, "include_usage", bool)),
    )
    return fields, body


def field_of(
    body: Mapping[str, object], field: str, kind: type[Value], good: Callable[[Value], bool] | None = None,
    expected: str = "",
) -> Value | None:  # fmt: skip
    """body[field], None if it is missing or null; raises RequestRefusal for another type, and where `good` is False."""
    value = body.get(field)
    if value is None:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            raise wrong(field, f"{shown(value)} is not supported; {expected or 'expected a finite number'}.") from None
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise wrong(field, f"{shown(value)} is {KINDS.get(type(value), 'of another type')}; expected {KINDS[kind]}.")
    if isinstance(value, float) and not math.isfinite(value) or good is not None and not good(value):
        raise wrong(field, f"{shown(value)} is not supported; {expected or 'expected a finite number'}.")
    return value


def _only_usage(options: dict[str, object]) -> bool:
    return not set(options) - {"include_usage"}


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop", f"{shown(value)} is not supported: give a string or a list of strings.")
    if len(stops) > STOPS or "" in stops:
        raise wrong("stop", f"expected at most {STOPS} strings, none of them empty.")
    return tuple(stops)


def shown(value: object) -> str:
    """A value of a request as a message may repeat it."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    """A text of a request as a message may repeat it."""
    return text if len(text) <= 60 else f"{text[:57]}..."
