"""KnownOperators: torch's own operators as they were, to see which ones a candidate has given another kernel.

`torch.library.Library("aten", "IMPL")` replaces the kernel behind an operator, which no function of torch shows.
"""

from __future__ import annotations

import os

import torch

_NAMESPACES = ("aten", "prims", "prim")
_USED = (  # by the assay itself
    "equal", "eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "all", "any", "clone", "copy_", "detach",
    "fill_.Scalar", "zero_", "take", "empty.memory_format", "empty_strided", "view.dtype",
)  # fmt: skip
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{os.sep}torch{os.sep}")


class KnownOperators:
    """Made before the code that may register kernels. Kernels of libraries are no candidate's."""

    def __init__(self) -> None:
        self.registered = frozenset(torch.library._impls)
        self.kernels = {name: _kernels(f"aten::{name}") for name in _USED}

    def replaced(self) -> list[str]:
        """Operators of torch that have another kernel now."""
        new = (key.split("/") for key in torch.library._impls - self.registered)
        names = {f"{key[0]}::{key[1]}" for key in new if key[0] in _NAMESPACES and key[-1] != "Meta"}
        others = {name for name in names if any(map(_foreign, _kernels(name)))}
        for name, before in self.kernels.items():
            if any(_foreign(line) for line in _kernels(f"aten::{name}") - before):
                others.add(f"aten::{name}")
        return sorted(others)


def _kernels(name: str) -> frozenset[str]:
    """A line for each kernel of an operator, with the file that registered it."""
    return frozenset(line for line in torch._C._dispatch_dump(name).splitlines() if " registered at " in line)


def _foreign(line: str) -> bool:
    """Whether neither torch's own build nor a library registered this kernel."""
    file = line.partition(" registered at ")[2]
    return "pytorch" not in file.partition(" ")[0] and not any(part in file for part in _LIBRARIES)
