"""Errors of the model's steps as refusals: each is an answer to its request, and the server goes on."""

from __future__ import annotations

import torch

from ...core.messages import sentence
from ...offload.errors import RoutingError, StoreError
from ...offload.guard.report import NumericsError
from ..offload.generation import NothingToDraw
from .refusals import BAD_REQUEST, FAILED, NO_MEMORY, UNAVAILABLE, RequestRefusal

STEP_ERRORS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RequestRefusal, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
NO_ROOM = ("can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory")


def refusal_of(error: BaseException) -> RequestRefusal:
    """The answer to a request whose step raised this error."""
    if isinstance(error, RequestRefusal):
        return error
    text = sentence(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(part in text.lower() for part in NO_ROOM):
        less = "A shorter prompt, a smaller max_tokens or fewer requests at once need less."
        dropped = f"Out of memory: the server dropped this request. {less}"
        return RequestRefusal(NO_MEMORY, dropped, code="out_of_memory")
    if isinstance(error, StoreError):
        return RequestRefusal(UNAVAILABLE, text)
    if isinstance(error, NothingToDraw) and error.scaled:
        return RequestRefusal(BAD_REQUEST, f"temperature: {text} Give a higher one, or 0.", field="temperature")
    if isinstance(error, (NumericsError, RoutingError, NothingToDraw)):
        return RequestRefusal(FAILED, text[:1].upper() + text[1:])
    return RequestRefusal(FAILED, f"The model's step failed: {type(error).__name__}: {text}")
