"""A candidate's parameters as data, and a stand-in that has them."""

from __future__ import annotations

import inspect
from typing import Any

from ...declare.binding import signature_of
from .candidate_side import Parts


class Refusal(Exception):
    """A source from which no candidate can be made: the text says why, `reason` is a short id."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def parameters_of(parts: Parts) -> dict[str, list[tuple[str, str, bool]] | None]:
    """Function -> its parameters as (name, kind, whether it has a default); None if the signature is unreadable."""
    described: dict[str, list[tuple[str, str, bool]] | None] = {}
    for name in ("candidate", "backward"):
        function = getattr(parts, name)
        if function is not None:
            known = signature_of(function)[1]
            described[name] = (
                known if known is None else [(p.name, p.kind.name, p.default is not p.empty) for p in known]
            )
    return described


def stand_in(parameters: list[tuple[str, str, bool]] | None, name: str) -> Any:
    """A callable with these parameters, for a target whose candidate is in another process."""

    def elsewhere(*args: object, **named: object) -> object:
        raise RuntimeError("this candidate runs in another process")

    elsewhere.__name__ = elsewhere.__qualname__ = name
    if parameters is not None:
        kinds = {k.name: k for k in inspect._ParameterKind}
        elsewhere.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(n, kinds[kind], default=None if optional else inspect.Parameter.empty)
                for n, kind, optional in parameters
            ]
        )
    return elsewhere
