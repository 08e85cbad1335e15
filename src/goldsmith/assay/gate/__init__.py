"""The gate: kernels that nobody trusts, judged in isolation.

Problem      what is to be computed: a golden and cases
Candidate    the source of a kernel
judge        one candidate against one problem -> Verdict
judge_all    many
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate import Candidate
    from .isolation.limits import Limits
    from .judging import GateOptions, judge, judge_all
    from .problem import Problem
    from .verdict import Verdict

_MODULE_OF = {
    "Candidate": ".candidate",
    "Limits": ".isolation.limits",
    "GateOptions": ".judging",
    "Problem": ".problem",
    "Verdict": ".verdict",
    "judge": ".judging",
    "judge_all": ".judging",
}
__all__ = ["Candidate", "Limits", "GateOptions", "Problem", "Verdict", "judge", "judge_all"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
