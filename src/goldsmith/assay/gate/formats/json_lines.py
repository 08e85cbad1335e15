"""JSON lines as candidates: one object a line with `source` (or `completion`), and if you like `name`, `language`,
`entry`, `files` and `problem`.

The name is a text or a number; `id` and `task_id` mean the same. Where it is missing, or of another type, the name is
FILE:LINE.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..candidate import LANGUAGES, Candidate
from ..isolation.loading import Refusal
from . import completions, flashinfer
from .submission import Submission, refused

TEXTS = ("source", "code", "completion", "response")
NAMES = ("name", "id", "task_id")
ALIASES = {"triton": "python", "py": "python", "cu": "cuda", "c++": "cpp"}


def read(text: str, where: str) -> Iterator[Submission]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        name = f"{where}:{number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield refused(name, "not_json", f"{name}: not JSON: {error}")
            continue
        yield of_object(data, name)


def of_object(data: Any, name: str) -> Submission:
    """The candidate of one JSON object, a FlashInfer-Bench solution or one with its source."""
    if flashinfer.is_solution(data):
        return solution(data, name)
    if not isinstance(data, Mapping):
        return refused(name, "no_source", f"{name}: of type {type(data).__name__}, expected an object with a source")
    own = next((str(data[k]) for k in NAMES if _is_name(data.get(k))), name)
    key = next((k for k in TEXTS if isinstance(data.get(k), str | list | Mapping)), None)
    if key is None:
        return refused(own, "no_source", f'{name}: the object has no source; give the code as "source"')
    code, language = (data[key], "python") if key in ("source", "code") else completions.source(data[key])
    if not isinstance(code, str):
        return refused(own, "no_source", f"{name}: {key} is a {type(code).__name__}, expected a text")
    files = data.get("files") or {}
    if not isinstance(files, Mapping) or not all(isinstance(t, str) for t in files.values()):
        return refused(own, "no_source", f"{name}: files must be an object from paths to texts")
    for field in ("language", "entry", "problem"):
        if not isinstance(data.get(field), str | None):
            return refused(
                own, "bad_field", f"{name}: {field} is of type {type(data[field]).__name__}, expected a text"
            )
    named = (data.get("language") or language).lower()
    language = ALIASES.get(named, named)
    if language not in LANGUAGES:
        known = ", ".join((*LANGUAGES, *ALIASES))
        return refused(own, "unknown_language", f"{name}: the language {named[:40]!r} is unknown; there are: {known}")
    candidate = Candidate(own, code, language=language, entry=data.get("entry") or "", files=dict(files))
    return Submission(candidate, data.get("problem") or None)


def _is_name(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


def solution(data: Mapping[str, object], name: str) -> Submission:
    try:
        definition, candidate = flashinfer.solution(data, name)
    except Refusal as why:
        return refused(name, why.reason, str(why))
    return Submission(candidate, definition or None)
