"""Wrong kernels in plain torch, and right twins of the tricky ones: what `assay.check` must catch, or leave alone.

Ids M.. and G.. are those of the fault catalogue, T.. what the usual rules let pass, the others further ones. Every
entry makes a fresh `assay.Target`, since some kernels keep state between calls, which is their fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from goldsmith import assay


@dataclass(frozen=True)
class Wrong:
    """One kernel, what is wrong with it in words, how to make its target, and whether it is wrong at all.

    fault is the verdict that it must get: "fail", or "reference_fault" for a golden that is at fault.
    """

    id: str
    host: str
    what: str
    target: Callable[[], assay.Target]
    right: bool = False
    fault: str = "fail"

    @property
    def name(self) -> str:
        return f"{self.id} {self.host}: {self.what}"


KERNELS: list[Wrong] = []


def wrong(id: str, host: str, what: str, *, right: bool = False, fault: str = "fail"):
    """Registers a function that returns a target."""

    def register(make: Callable[[], assay.Target]) -> Callable[[], assay.Target]:
        KERNELS.append(Wrong(id, host, what, make, right, fault))
        return make

    return register
