"""JSON from a user's files, read so that every fault of a text is a ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes | bytearray, *, parse_constant: Callable[[str], object] | None = None) -> Any:
    """The value of a JSON text. Raises ValueError for text that is not JSON, also for one nested too deeply.

    json.loads raises RecursionError for the latter, which no reader of a file expects.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
