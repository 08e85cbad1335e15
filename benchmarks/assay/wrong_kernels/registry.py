"""The list of wrong kernels in plain torch, and of right twins: `assay.check` must reject the first, pass the second.

Ids M.. and G.. are those of KernelFault; T.. are faults that the usual rules miss; others are further faults. Every
entry makes a new `assay.Target`, because some kernels keep state between calls, which is their fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from goldsmith import assay


@dataclass(frozen=True)
class Wrong:
    """A kernel, its mistake in words, and the function that makes its target.

    right   the kernel is a right twin
    fault   the right verdict of a wrong one: "fail", or "reference_fault" where the golden is wrong
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
    """Register the decorated function, which returns a target."""

    def register(make: Callable[[], assay.Target]) -> Callable[[], assay.Target]:
        KERNELS.append(Wrong(id, host, what, make, right, fault))
        return make

    return register
