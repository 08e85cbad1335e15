"""Proposals: patches that a program of the user's makes from the evidence, before the search makes its own.

The program gets one JSON object on standard input:

    {"schema": 1, "target": name, "wrong": [results], "diagnosis": the data of the diagnosis, "files": {path: text}}

and writes one on standard output: {"patches": [{"file": path, "text": the whole new file}, {"diff": unified diff}]}.
Nothing that it writes is believed: a proposal runs in a sandbox, and passes what every other patch passes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .edits.edits import Edit
from .patch import changed_line
from .reading.candidate_source import CandidateSource

SCHEMA = 1
KIND = "proposed"
_MOST, _LARGEST = 40, 4 << 20  # proposals that are tried, and bytes that are read
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True)
class Proposals:
    """edits: what can be tried; refused: one sentence for each proposal that cannot, or for the whole program."""

    edits: list[Edit] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class _Unusable(Exception):
    """A proposal that is no patch of the candidate's files."""


def proposals(command: str, source: CandidateSource, evidence: Mapping[str, object], seconds: float) -> Proposals:
    """Run the program and read its patches; a program that fails or takes too long only costs its time."""
    files = {path: file.data.decode(errors="replace") for path, file in source.files.items()}
    request = json.dumps({"schema": SCHEMA, **evidence, "files": files})
    try:
        answer = _answer(shlex.split(command), request, seconds)
        listed = json.loads(answer)["patches"]
        if not isinstance(listed, list):
            raise TypeError
    except _Unusable as error:
        return Proposals(refused=[f"{command}: {error}"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return Proposals(refused=[f'{command}: its output is not {{"patches": [...]}}'])
    found = Proposals()
    for number, entry in enumerate(listed[:_MOST], 1):
        try:
            found.edits.append(_edit(entry, source, files))
        except _Unusable as error:
            found.refused.append(f"proposal {number}: {error}")
    return found


def _answer(words: Sequence[str], request: str, seconds: float) -> str:
    """What the program writes; it ends, with all that it started, after that time or that many bytes."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
        stdin.write(request.encode())
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                words, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise _Unusable(f"it cannot be started ({error.strerror})") from error
        status = _waited(process, stdout, seconds)
        if status:
            raise _Unusable(f"it ended with status {status}")
        stdout.seek(0)
        return stdout.read(_LARGEST).decode(errors="replace")


def _waited(process: subprocess.Popen[bytes], stdout: IO[bytes], seconds: float) -> int:
    """The exit status. Raises _Unusable for a program that runs or writes for too long."""
    until = time.monotonic() + seconds
    try:
        while True:
            try:
                return process.wait(0.1)
            except subprocess.TimeoutExpired:
                if os.fstat(stdout.fileno()).st_size > _LARGEST:
                    raise _Unusable(f"it wrote more than {_LARGEST} bytes") from None
                if time.monotonic() > until:
                    raise _Unusable(f"it had not ended after {seconds:.3g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _edit(entry: object, source: CandidateSource, files: Mapping[str, str]) -> Edit:
    if not isinstance(entry, dict):
        raise _Unusable("it is no object")
    if isinstance(entry.get("diff"), str):
        path, text = _applied(entry["diff"], files)
    elif isinstance(entry.get("text"), str):
        path, text = _file(entry.get("file"), files), entry["text"]
    else:
        raise _Unusable("it has neither a diff nor a text")
    before = files[path]
    if text == before:
        raise _Unusable("it changes nothing")
    span = tuple(_changed(before.encode(), text.encode()))
    return Edit(path, (span,), KIND, 0.0, changed_line(before, text))  # type: ignore[arg-type]


def _changed(before: bytes, after: bytes) -> Iterator[int | str]:
    """The bytes that differ, as a span: first, behind the last, new text. It begins and ends on whole lines."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    rest = min(len(old), len(new)) - same
    tail = next((n for n in range(rest) if old[-1 - n] != new[-1 - n]), rest)
    yield len(b"".join(old[:same]))
    yield len(b"".join(old[: len(old) - tail]))
    yield b"".join(new[same : len(new) - tail]).decode(errors="replace")


def _file(name: object, files: Mapping[str, str]) -> str:
    """The candidate's file that is meant, by its path or the end of it; the only one if no name is given."""
    if name is None and len(files) == 1:
        return next(iter(files))
    wanted = Path(str(name))
    fitting = [p for p in files if wanted.parts and Path(p).parts[-len(wanted.parts) :] == wanted.parts]
    if len(fitting) != 1:
        raise _Unusable(f"{str(name)[:100]!r} is no file of the candidate")
    return fitting[0]


def _applied(diff: str, files: Mapping[str, str]) -> tuple[str, str]:
    """(path, text) after a unified diff of one file, whose context must fit."""
    lines = diff.splitlines()
    names = [s[4:].split("\t")[0].strip() for s in lines if s.startswith("+++ ")]
    if len(names) != 1:
        raise _Unusable("its diff must change one file")
    name = names[0].removeprefix("b/")
    path = _file(name, files)
    before = files[path].splitlines()
    out, at, n = [], 0, next(i for i, s in enumerate(lines) if s.startswith("+++ ")) + 1
    while n < len(lines):
        hunk = _HUNK.match(lines[n])
        n += 1
        if hunk is None:
            continue
        old, new = [], []
        while n < len(lines) and not lines[n].startswith("@@") and lines[n][:1] in (" ", "+", "-", ""):
            old += [lines[n][1:]] if lines[n][:1] != "+" else []
            new += [lines[n][1:]] if lines[n][:1] != "-" else []
            n += 1
        start = max(int(hunk[1]) - (hunk[2] != "0"), at)
        if before[start : start + len(old)] != old:
            raise _Unusable(f"its diff does not fit at line {hunk[1]}")
        out += [*before[at:start], *new]
        at = start + len(old)
    return path, "\n".join([*out, *before[at:]]) + ("\n" if files[path].endswith("\n") else "")
