"""`goldsmith new`: writes the files of a new kernel, and says what to run next."""

from __future__ import annotations

import importlib.util
import keyword
import os
import shlex
import sys
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path

from ..terminal import Failure, write_json, write_stdout

TEMPLATES = files(__package__) / "templates"


def run(name: str, *, plain: bool = False, as_json: bool = False) -> int:
    """Write NAME.py and test_NAME.py, and return the exit status; raises Failure if a file exists."""
    kernel = Path(name.removesuffix(".py") + ".py")
    _check_name(name, kernel.stem)
    test = kernel.with_name(f"test_{kernel.name}")
    for path in (kernel, test):
        if os.path.lexists(path):
            raise Failure(f"{path} exists already, and `goldsmith new` overwrites nothing. Choose another name.")
    triton = not plain and importlib.util.find_spec("triton") is not None
    template = "triton_kernel.py.txt" if triton else "torch_kernel.py.txt"
    written: list[Path] = []
    try:
        kernel.parent.mkdir(parents=True, exist_ok=True)
        for path, source in ((kernel, template), (test, "test.py.txt")):
            text = TEMPLATES.joinpath(source).read_text(encoding="utf-8").replace("NAME", kernel.stem)
            with open(path, "x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:  # half of the files would keep the next attempt from writing
            path.unlink(missing_ok=True)
        raise Failure(f"cannot write {error.filename or kernel}: {error.strerror or error}.") from error
    kind = "a kernel in Triton" if triton else "a kernel in plain torch"
    contents = {kernel: f"{kind}, its golden, its cases and its target", test: "a pytest test for each case"}
    steps = {
        f"goldsmith verify {_quoted(kernel)}": "check the kernel",
        f"python -m pytest {_quoted(test)}": "keep it right",
        f"goldsmith diagnose {_quoted(kernel)}": "find the cause of a failure",
    }
    if as_json:
        write_json({"files": [str(path) for path in contents], "next": list(steps)})
        return 0
    text = _table({f"Wrote {path}": words for path, words in contents.items()}, "")
    write_stdout(f"{text}\nNext:\n{_table(steps, '  ')}")
    return 0


def _check_name(name: str, stem: str) -> None:
    if not name.strip():
        raise Failure("NAME is empty; give the name of a new file, such as my_norm.")
    if not stem.isidentifier() or keyword.iskeyword(stem):
        raise Failure(f"{name!r}: {stem!r} cannot be imported; choose a Python name, such as my_norm.")
    if stem in sys.stdlib_module_names or _installed(stem):
        raise Failure(f"{name!r}: {stem}.py would hide the installed module {stem}. Choose another name.")


def _installed(stem: str) -> bool:
    here = os.path.realpath(os.curdir)
    paths = [path for path in sys.path if path and os.path.realpath(path) != here]
    return PathFinder.find_spec(stem, paths) is not None


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _table(rows: dict[str, str], indent: str) -> str:
    width = max(map(len, rows))
    return "".join(f"{indent}{left:<{width}}  {right}\n" for left, right in rows.items())
