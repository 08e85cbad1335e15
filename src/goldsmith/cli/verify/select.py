"""Which cases a run proves, in which dtypes and through which probes, and about what each costs.

`--full` is everything. The ordinary run on a CPU is sized to end within two minutes on two slow cores: there a run of a
Triton kernel through the interpreter takes 0.1 to 1 s, and the golden's ensembles 0.3 s a case (2 cores, torch 2.13).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...core.op import Op
from ..targets import op_dtypes

# What the first run shows anyway, and what needs three and four further runs. The rest (repeats, scaling, taint) takes
# some fifty runs a case.
FIRST_RUN = ("values", "ensemble", "decisions", "statistics", "poison", "guard", "alias", "float32")
CONTRACT = (*FIRST_RUN, "second_call", "layouts")
TYPICAL_ELEMENTS = 100  # of the largest input: the case that stands for the others is the one of about this size
INTERPRETED_CASES = 10  # of an operator, in an ordinary run


@dataclass(frozen=True)
class Job:
    """One case in one dtype: `probes` None is all of them; `cost` is relative."""

    case: str
    dtype: str
    probes: tuple[str, ...] | None = None
    cost: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        return cls(**{**data, "probes": None if data["probes"] is None else tuple(data["probes"])})


def choose(op: Op, device: str, interpreted: bool, size: str, dtype: str | None) -> list[Job]:
    """The jobs of one backend of an operator.

    quick    one small case, through what its first run shows
    default  GPU: every case in every dtype, small ones through all probes. CPU: every small case in the first dtype
             through what its first run shows; one typical case with second call, layouts and 16 bits
             The interpreter gets at most ten cases, in float32
    full     every case in every dtype through all probes; in the interpreter the small cases

    bfloat16 is not proved in the interpreter unless asked for by name: there its stores truncate where hardware rounds.
    """
    dtypes = [str(d).removeprefix("torch.") for d in op_dtypes(op)]
    if dtype is not None:
        dtypes = [dtype]
    elif interpreted:
        dtypes = [d for d in dtypes if d != "bfloat16"]
    cases = [c for c in op.cases if not ("large" in c.tags and (interpreted or _slow(device, size)))]
    if not cases or not dtypes:
        return []
    typical = min(cases, key=lambda c: abs(elements(c) - TYPICAL_ELEMENTS))
    if size == "quick":
        return [_job(typical, dtypes[0], FIRST_RUN)]
    if size == "full":
        return [_job(case, d, None) for d in dtypes for case in cases]
    if not device.startswith("cuda"):
        if interpreted:
            cases, dtypes = _spread(cases, typical), dtypes[:1]
        ordinary = [_job(c, dtypes[0], CONTRACT if c is typical else FIRST_RUN) for c in cases]
        return ordinary + [_job(typical, d, FIRST_RUN) for d in dtypes[1:]]
    return [_job(case, d, CONTRACT if "large" in case.tags else None) for d in dtypes for case in cases]


def _slow(device: str, size: str) -> bool:
    return not device.startswith("cuda") and size != "full"


def _spread(cases: list[Any], typical: Any) -> list[Any]:
    """At most INTERPRETED_CASES of them, evenly from first to last, the typical one among them."""
    step = max(1.0, len(cases) / INTERPRETED_CASES)
    kept = {round(k * step) for k in range(INTERPRETED_CASES)}
    return [c for k, c in enumerate(cases) if k in kept or c is typical]


def elements(case: Any) -> int:
    """Elements of the largest input; of a large case the product of its sizes, which need not be drawn."""
    if "large" in case.tags:
        return math.prod(v for v in case.sizes.values() if isinstance(v, int) and not isinstance(v, bool))
    drawn = case.build(torch.float32, "cpu", 0).values()
    return max((v.numel() for v in drawn if isinstance(v, torch.Tensor)), default=0)


def _job(case: Any, dtype: str, probes: tuple[str, ...] | None) -> Job:
    runs = 50 if probes is None else 12 if "layouts" in probes else 2
    return Job(case.name, dtype, probes, runs * (1 + elements(case) / 20_000))
