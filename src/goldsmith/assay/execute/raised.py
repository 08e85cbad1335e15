"""What a candidate raised: where, whether Triton's interpreter is to blame, and the exception as plain data."""

from __future__ import annotations

import builtins
import os
import re
import traceback
from dataclasses import dataclass
from typing import Any

from ..declare.returned_values import UnusableResult
from ..support.printable import from_here, text_of

INTERPRETERS = "InterpreterError"  # Triton's error that wraps whatever is raised inside a kernel
_LIBRARIES = (
    *(f"{os.sep}{name}{os.sep}" for name in ("torch", "triton", "numpy", f"goldsmith{os.sep}assay")),
    f"{os.sep}goldsmith{os.sep}core{os.sep}tracing.py",
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')  # of faulthandler
_NOT_OWN = ("site-packages", "/goldsmith/", "<frozen", "lib/python3")
_LONGEST = 4000  # characters of a message that travels


@dataclass(frozen=True)
class Origin:
    """Where an exception comes from: file and line of the user's own code, or ""; `lacking`: see from_interpreter."""

    file: str = ""
    line: int = 0
    lacking: bool = False


def place(error: BaseException) -> str:
    """Where the user's own code raised, as " (file:line)"; inside a kernel where the interpreter wraps the error."""
    origin = _origin(error)
    return f" ({from_here(origin.file)}:{origin.line})" if origin.file else ""


def frame(error: BaseException) -> str:
    """The innermost frame of the user's own code, as "in f (file, line 3)", or ""."""
    own = _own_frames(error)
    return f"in {own[-1].name} ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def frame_of_report(report: str) -> str:
    """The innermost frame of the user's own code in stacks that faulthandler wrote, or ""."""
    for path, line, function in _FRAME.findall(report):
        if not any(part in path for part in _NOT_OWN):
            return f"in {function} ({os.path.basename(path)}, line {line})"
    return ""


def from_interpreter(error: BaseException) -> bool:
    """Whether an exception means that Triton's interpreter lacks something, not that the kernel is wrong.

    Inside a kernel the interpreter wraps every exception in InterpreterError. A missing feature surfaces as
    NotImplementedError, as a method missing on a plain number (scalar arguments are Python floats there), or as a
    TypeError of the interpreter's own code.
    """
    return _origin(error).lacking


def to_data(error: BaseException) -> dict[str, object]:
    """An exception as plain data."""
    origin = _origin(error)
    base = next(k.__name__ for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k)
    return {
        "name": type(error).__name__[:100],
        "base": base,
        "text": text_of(error)[:_LONGEST],
        "unusable": isinstance(error, UnusableResult),
        "file": origin.file,
        "line": origin.line,
        "lacking": origin.lacking,
    }


def from_data(data: dict[str, Any]) -> Exception | SystemExit:
    """An exception of the same name, text and built-in base; KeyError, ValueError and TypeError for malformed data."""
    name, text = str(data["name"]), str(data["text"])
    if data["unusable"]:
        return UnusableResult(text)
    base = getattr(builtins, str(data["base"]), Exception)
    if not isinstance(base, type) or not issubclass(base, Exception | SystemExit) or issubclass(base, ExceptionGroup):
        base = Exception  # a group cannot be made without its members
    origin = Origin(str(data["file"]), int(data["line"]), bool(data["lacking"]))
    kind: type[Exception] = type(name, (base,), {"__str__": lambda self: text, "origin": origin})
    return kind.__new__(kind)


def _origin(error: BaseException) -> Origin:
    known = getattr(error, "origin", None)
    if isinstance(known, Origin):
        return known
    chain = _chain(error)
    wrapped = any(type(e).__name__ == INTERPRETERS for e in chain)
    for each in reversed(chain) if wrapped else chain:
        own = _own_frames(each)
        if own:
            return Origin(own[-1].filename, own[-1].lineno or 0, _lacking(chain))
    return Origin(lacking=_lacking(chain))


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f for f in frames if not f.filename.startswith("<") and not any(p in f.filename for p in _LIBRARIES)]


def _lacking(chain: list[BaseException]) -> bool:
    if not any(type(e).__name__ == INTERPRETERS for e in chain):
        return False
    root = chain[-1]
    if isinstance(root, NotImplementedError):
        return True
    if isinstance(root, AttributeError) and isinstance(getattr(root, "obj", None), int | float):
        return True
    return isinstance(root, TypeError | AttributeError) and _raised_in(root).endswith("triton/runtime/interpreter.py")


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes, down to the first."""
    chain: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__ or seen.__context__
    return chain


def _raised_in(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else trace.tb_frame.f_code.co_filename
