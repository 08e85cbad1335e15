"""Which cases an ordinary run proves, in which dtypes, and about what each costs."""

from __future__ import annotations

from typing import Any

from ...core.op import Op
from ..targets import op_dtypes

# Elements of a case's sizes multiplied. The interpreter runs one program after another, so it gets the small cases.
INTERPRETER_ELEMENTS, CPU_ELEMENTS = 3_000, 60_000


def choose(op: Op, backend: str, device: str, interpreted: bool, size: str, dtype: str | None) -> list[tuple[Any, str]]:
    """(case, dtype) pairs: everything with --full, one small case with --quick.

    The ordinary run on a CPU leaves out the large cases, and proves the 16-bit dtypes on every third case only.
    """
    dtypes = [str(d).removeprefix("torch.") for d in op_dtypes(op)]
    if dtype is not None:
        dtypes = [dtype]
    cases = list(op.cases)
    if size == "quick":
        return [(min(_nonempty(cases), key=cost), d) for d in dtypes[:1]]
    on_cpu = not device.startswith("cuda")
    if size != "full" and on_cpu:
        largest = INTERPRETER_ELEMENTS if interpreted else CPU_ELEMENTS
        cases = [c for c in cases if "large" not in c.tags and elements(c) <= largest]
    chosen = []
    for k, d in enumerate(dtypes):
        every = 3 if size != "full" and on_cpu and k > 0 else 1
        chosen += [(case, d) for i, case in enumerate(cases) if (i + k) % every == 0]
    return chosen


def _nonempty(cases: list[Any]) -> list[Any]:
    return [c for c in cases if elements(c) > 0] or cases


def elements(case: Any) -> float:
    """The product of a case's sizes, those in tuples too."""
    product = 1
    for value in case.sizes.values():
        for v in value if isinstance(value, tuple) else (value,):
            product *= v if isinstance(v, int) and not isinstance(v, bool) else 1
    return product


def cost(case: Any) -> float:
    """Relative time of a case: a constant (launches, Python) and a part that grows with its elements."""
    return 1.0 + elements(case) / 20_000
