"""Processes of goldsmith's own: the current folder is not among the folders that they import from.

It may hold anything, candidates among it: a file `secrets.py` or `torch.py` there would stand for the module of that
name in the process that judges.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parents[4])  # the folder that holds the package `goldsmith`
_VARIABLE = "PYTHONSAFEPATH"


def own_process(
    module: str, *arguments: str, folders: tuple[str, ...] = (), **variables: str
) -> tuple[list[str], dict[str, str]]:
    """(command line, environment) of a process that runs a module of goldsmith's, which need not be installed.

    folders     of further modules
    variables   of the environment, beside those of this process
    """
    environment = {**os.environ, **variables}
    named = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = [SOURCE, *folders, *filter(None, named)]  # an empty entry would be the current folder
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return [sys.executable, "-P", "-m", module, *arguments], environment


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Context in which to start processes whose command line another library builds, such as multiprocessing."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        forget_safe_path()
        if before is not None:
            os.environ[_VARIABLE] = before


def forget_safe_path() -> None:
    """Afterwards the setting does not hold for processes that this one starts."""
    os.environ.pop(_VARIABLE, None)
