"""What a candidate's source says about itself, read with `ast`: nothing is executed."""

from __future__ import annotations

import ast
from dataclasses import dataclass

LAWFUL = ("stage", "tracing", "deciding", "storage")  # of goldsmith, what a candidate may import
_KERNELS = ("triton", "load_inline", "cpp_extension", "ctypes", "cffi", "numba", "cupy", "cutlass", "CDLL")


@dataclass(frozen=True)
class SourceFacts:
    """What a source names.

    judge   modules of the judge that it imports
    kernel  whether it holds a kernel
    """

    judge: tuple[str, ...] = ()
    kernel: bool = False


def read(source: str) -> SourceFacts:
    """The facts of a Python source; none if it cannot be parsed, because its import says so."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return SourceFacts()
    judge, words = dict[str, None](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            judge.update({a.name: None for a in node.names if _of_the_judge(a.name)})
            words |= {part for a in node.names for part in a.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            words |= {*module.split("."), *(a.name for a in node.names)}
            if _of_the_judge(module):
                judge.update({f"{module}.{a.name}": None for a in node.names if not _lawful(module, a.name)})
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Name):
            words.add(node.id)
    return SourceFacts(tuple(judge), any(word in words for word in _KERNELS))


def _of_the_judge(module: str) -> bool:
    return module.partition(".")[0] == "goldsmith"


def _lawful(module: str, name: str) -> bool:
    """Whether a candidate may import this: names of stages, or the assay itself to reach them."""
    return name in LAWFUL or (module, name) == ("goldsmith", "assay")
