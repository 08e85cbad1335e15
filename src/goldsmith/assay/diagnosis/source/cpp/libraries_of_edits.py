"""Libraries that hold many edits: each is a copy of its function under another name, and a number says which one runs.

A build takes a second or more, and a run a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....declare.cpp_source import SWITCH, CppSource, NotBuilt, numbered
from ..edits.edits import Edit
from .tokens import CppFunction, CppText

_MARK = "goldsmith_edit_"  # with a number, the file that the compiler's messages name for an edit
_SWITCH = f'extern "C" __attribute__((weak, visibility("default"))) int {SWITCH} = 0;'


def loads(source: CppSource, files: Mapping[str, bytes], edits: Sequence[Edit]) -> list[dict[str, str] | None]:
    """What a process needs to load each of the edits; None for those that the compiler refuses."""
    texts = {path: CppText(data.decode("latin-1")) for path, data in files.items()}
    places = {n: _function_of(texts[e.path], e) for n, e in enumerate(edits)}
    together = {n: place for n, place in places.items() if place is not None}
    library = None
    while together and library is None:
        try:
            library = source.library(_with_edits(texts, edits, together))
        except NotBuilt as error:
            refused = _refused(error.output) & set(together)
            if not refused:
                break
            together = {n: place for n, place in together.items() if n not in refused}
    answers: list[dict[str, str] | None] = []
    for number, edit in enumerate(edits):
        if number in together and library is not None:
            answers.append(numbered(library, number + 1))
        elif number in together or _function_of(texts[edit.path], edit) is None:  # it stands outside of such functions
            answers.append(_alone(source, files, edit))
        else:
            answers.append(None)
    return answers


def _refused(output: str) -> set[int]:
    """The edits that a compiler's errors are about, or else those that its output mentions."""
    of_errors = re.findall(rf"{_MARK}(\d+)\W+\d+[^\n]*\berror\b", output)
    return {int(n) for n in of_errors or re.findall(rf"{_MARK}(\d+)", output)}


def _alone(source: CppSource, files: Mapping[str, bytes], edit: Edit) -> dict[str, str] | None:
    whole = {path: data.decode(errors="replace") for path, data in files.items()}
    edited = {**whole, edit.path: edit.applied(files[edit.path]).decode(errors="replace")}
    try:
        source.library(edited)
    except NotBuilt:
        return None
    return edited


def _function_of(text: CppText, edit: Edit) -> CppFunction | None:
    """The function whose body an edit changes, if a copy of it can be called in its place."""
    start, end = min(s for s, _, _ in edit.spans), max(e for _, e, _ in edit.spans)
    for function in text.functions:
        if function.body <= start and end < function.end:
            can = function.arguments is not None and function.templates is not None and not function.constant
            return function if can else None
    return None


def _with_edits(
    texts: Mapping[str, CppText], edits: Sequence[Edit], places: Mapping[int, CppFunction]
) -> dict[str, str]:
    """path -> text with the copies of all edits. The number of an edit is its index and one; 0 is the file as it is."""
    whole: dict[str, str] = {}
    for path, text in texts.items():
        inserted: dict[int, list[str]] = {}
        for number, function in places.items():
            edit = edits[number]
            if edit.path != path:
                continue
            begin, body = inserted.setdefault(function.begin, []), inserted.setdefault(function.body, [])
            begin.append(f'\n#line 1 "{_MARK}{number}"\n{_copy(text, function, edit, number)}\n')
            called = f"{_name(function, number)}{_angles(function)}({', '.join(function.arguments or ())})"
            body.append(f'\n#line 1 "{_MARK}{number}"\nif ({SWITCH} == {number + 1}) return {called};\n')
        out, at = [_SWITCH, f'\n#line 1 "{Path(path).name}"\n'], 0
        for place, parts in sorted(inserted.items()):
            out += [text.text[at:place], *parts, f'\n#line {text.line(place)} "{Path(path).name}"\n']
            at = place
        whole[path] = "".join([*out, text.text[at:]]).encode("latin-1").decode(errors="replace")
    return whole


def _copy(text: CppText, function: CppFunction, edit: Edit, number: int) -> str:
    """The function with the edit, under another name."""
    name = text.tokens[function.name_at]
    spans = [(name.start, name.end, _name(function, number)), *edit.spans]
    out = text.text[: function.end]
    for start, end, new in sorted(spans, reverse=True):
        out = out[:start] + new + out[end:]
    return out[function.begin :]


def _name(function: CppFunction, number: int) -> str:
    return f"{function.name}_{_MARK}{number}"


def _angles(function: CppFunction) -> str:
    return f"<{', '.join(function.templates)}>" if function.templates else ""
