"""Selects the cases of a run, their dtypes and probes, and estimates what each costs.

`--thorough` selects everything, except repeats of large cases. The ordinary run on a CPU should finish within two
minutes on two slow cores, where one run of an interpreted Triton kernel takes 0.1 to 1 s, and the golden's bounds and
ensembles take 0.3 s a case (torch 2.13).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import torch

from ...assay.declare.case import Case
from ...assay.declare.target import Target
from ...assay.probes import NAMES
from ...core.op import Op
from ..targets import op_dtypes

if TYPE_CHECKING:
    from ..workers.messages import JobMessage
from ..terminal import count

# VALUES needs two runs of the candidate, USUAL and CONTRACT seven more each, all probes about fifty. CONTRACT is for
# Triton's interpreter: it runs programs in order, so that `repeats` would find nothing there.
VALUES = ("values", "ensemble", "decisions", "statistics", "poison", "guard", "alias", "float32")
USUAL = (*VALUES, "second_call", "repeats")
CONTRACT = (*VALUES, "second_call", "layouts")
# where the same case also runs in float32
AGAIN, USUAL_AGAIN, ALL_AGAIN = (tuple(p for p in probes if p != "float32") for probes in (VALUES, USUAL, NAMES))
ON_RANKS = ("values",)  # the other probes look at memory in one process
RUNS: dict[tuple[str, ...] | None, int] = {
    VALUES: 2,
    AGAIN: 2,
    USUAL: 9,
    USUAL_AGAIN: 9,
    ALL_AGAIN: 50,
    CONTRACT: 9,
    None: 50,
}  # of the candidate, roughly
EVERY_PROBE = "every_probe"  # tag of cases that get all probes in an ordinary run
TYPICAL_ELEMENTS = 100  # elements of the largest input of the case that represents the others
FEW_CASES = 8  # most cases per operator in an ordinary run, in the interpreter and of a reference on a GPU
LARGE_COST = 10  # times that of a small case: on a GPU launches cost most, and large cases have no more of them
SIZES = ("quick", "default", "thorough")


@dataclass(frozen=True)
class Job:
    """One case in one dtype. `probes` None means all; `cost` is roughly the seconds it takes on two slow cores.

    `layout` names how an operator's tensors lie on ranks, with --ranks.

    `label` is its name in reports: the case's name, followed by the dtype if the target has several.
    """

    case: str
    dtype: str
    label: str
    probes: tuple[str, ...] | None = None
    cost: float = 1.0
    layout: str = ""

    def to_json(self) -> JobMessage:
        return cast("JobMessage", asdict(self))

    @classmethod
    def from_json(cls, data: JobMessage) -> Job:
        probes = None if data["probes"] is None else tuple(data["probes"])
        return cls(data["case"], data["dtype"], data["label"], probes, data["cost"], data.get("layout", ""))


@dataclass(frozen=True)
class Choice:
    """The jobs of one check, and the cases that are left out, as (their number, a phrase that names them)."""

    jobs: list[Job]
    left_out: list[tuple[int, str]]


def choose(op: Op, backend: str, device: str, interpreted: bool, size: str, dtype: str | None) -> Choice:
    """The jobs of one backend of an operator, by the size of the run.

    quick     one small case with the probes VALUES
    default   - kernels on a GPU: every case in the first dtype. Large cases with VALUES, cases tagged "every_probe" and
                the typical case with all probes, the others with USUAL. Then every small case in the other dtypes with
                VALUES.
              - the reference on a GPU: as on a CPU, but at most eight small cases in the first dtype
              - in the interpreter: at most eight small cases in the first dtype. The typical case with CONTRACT, the
                others with VALUES.
              - otherwise (the reference and native kernels on a CPU): every small case in the first dtype. Tagged cases
                and the typical case with all probes, the others with VALUES. Then the typical case in the other dtypes
                with VALUES.
    thorough  every case in every dtype with all probes; in the interpreter only small cases. Large cases show races,
              offsets and sums that small ones cannot; the other probes would repeat what small ones show. So they have
              all probes in two dtypes, USUAL in further ones, and VALUES in one dtype on the reference. On a GPU the
              reference has all probes in the first dtype and USUAL in the others: it is the same torch code in each,
              and on a CPU has all probes in all of them

    The interpreter skips bfloat16, because its stores truncate. If bfloat16 was requested by name it runs, and `check`
    notes for each case that it was not judged.
    """
    known = [_name(d) for d in op_dtypes(op)]
    on_gpu = device.startswith("cuda")
    job = _Jobs(known, interpreted, on_gpu)
    dtypes = list(known) if dtype is None else [dtype]
    truncated = interpreted and dtype is None and "bfloat16" in dtypes
    if truncated:
        dtypes.remove("bfloat16")
    cases = [c for c in op.cases if not ("large" in c.tags and (interpreted or not (on_gpu or size == "thorough")))]
    if not cases or not dtypes:
        return Choice([], [])
    typical = _typical(cases)
    if size == "quick":
        total = len(op.cases) * (len(dtypes) + truncated)
        return Choice([job(typical, dtypes[0], VALUES)], [(total - 1, "cases left out by --quick")])
    large = (len(op.cases) - len(cases)) * len(dtypes)
    left_out = [(large, f"large cases ({'run on a GPU' if interpreted else 'run on a GPU or with --thorough'})")]
    if truncated:
        text = "cases in bfloat16 (Triton's interpreter truncates its stores, hardware rounds them)"
        left_out.append((len(op.cases), text))
    everything = [(c, d) for d in dtypes for c in cases]
    again, every = (AGAIN, ALL_AGAIN) if dtypes[0] == "float32" else (VALUES, None)
    if size == "thorough":
        if on_gpu and backend == "reference":
            every = USUAL_AGAIN if every is ALL_AGAIN else USUAL
        jobs = [job(c, d, None if d == dtypes[0] else every) for c, d in everything if "large" not in c.tags]
        jobs += _thorough_large([c for c in cases if "large" in c.tags], backend, dtypes, job)
        left_out.append((len(everything) - len(jobs), "large cases of the reference in further dtypes"))
        return Choice(jobs, _without_zeros(left_out))
    if interpreted:
        kept = _spread(cases, typical)
        jobs = [job(c, dtypes[0], CONTRACT if c is typical else VALUES) for c in kept]
        left_out.append((len(everything) - len(jobs), "small cases in the interpreter (run with --thorough)"))
    elif on_gpu and backend != "reference":
        small = [c for c in cases if "large" not in c.tags]
        jobs = [job(c, dtypes[0], _ordinary(c, typical, USUAL)) for c in cases]
        jobs += [job(c, d, again) for d in dtypes[1:] for c in small]
        left_out.append((len(everything) - len(jobs), "large cases in further dtypes (run with --thorough)"))
    else:
        kept = _spread([c for c in cases if "large" not in c.tags], typical) if on_gpu else cases
        jobs = [job(c, dtypes[0], _ordinary(c, typical, VALUES)) for c in kept]
        jobs += [job(typical, d, again) for d in dtypes[1:]]
        further = (len(dtypes) - 1) * (len(cases) - 1)
        left_out.append((len(cases) - len(kept), "cases of the reference on a GPU (run with --thorough)"))
        left_out.append((further, "cases in further dtypes (run with --thorough)"))
    return Choice(jobs, _without_zeros(left_out))


def _thorough_large(cases: Sequence[Case], backend: str, dtypes: Sequence[str], job: _Jobs) -> list[Job]:
    if backend == "reference":
        return [job(c, dtypes[0], VALUES) for c in cases]
    every, usual = (ALL_AGAIN, USUAL_AGAIN) if dtypes[0] == "float32" else (None, USUAL)
    probes = [None, every, *(usual for _ in dtypes[2:])]
    return [job(c, d, probes[k]) for k, d in enumerate(dtypes) for c in cases]


def _without_zeros(left_out: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(number, text) for number, text in left_out if number]


def choose_own(target: Target, size: str, dtype: str | None) -> Choice:
    """The jobs of a user's target: every case in every dtype with all probes, or one case with --quick.

    Only a run shows whether its kernels are interpreted; `check` then does not judge them in bfloat16.
    """
    known = [_name(d) for d in target.dtypes]
    job, dtypes = _Jobs(known), known if dtype is None else [dtype]
    if size == "quick":
        number = len(target.cases) * len(dtypes) - 1
        return Choice(
            [job(_typical(target.cases), dtypes[0], VALUES)], _without_zeros([(number, "cases left out by --quick")])
        )
    drawn, literal = ([c for c in target.cases if c.given == literally] for literally in (False, True))
    jobs = [job(case, d, None) for d in dtypes for case in drawn]  # literal inputs bring their own dtype
    return Choice(jobs + [job(case, dtype or _own_dtype(case, dtypes[0]), None) for case in literal], [])


def _own_dtype(case: Case, default: str) -> str:
    return next((_name(d) for d in case.own_dtypes), default)


def examined(jobs: Iterable[Job]) -> str:
    """One sentence that says how many cases ran with which probes."""
    words: dict[tuple[str, ...] | None, str] = {
        None: "all probes",
        CONTRACT: "values, memory, second call and layouts",
        USUAL: "values, memory, second call and repeats",
        USUAL_AGAIN: "values, memory, second call and repeats",
        VALUES: "values and memory",
        AGAIN: "values and memory",
        ALL_AGAIN: "all probes",
        ON_RANKS: "the values of all ranks",
    }
    probes = [job.probes for job in jobs]
    numbers = Counter(words[each] for each in probes)
    parts = [
        f"{count(numbers[phrase], 'case')} with {phrase}" for phrase in dict.fromkeys(words.values()) if numbers[phrase]
    ]
    parts += ["--thorough runs all probes on every small case"] if set(probes) - {None, ALL_AGAIN, ON_RANKS} else []
    return f"Run: {'; '.join(parts)}." if probes else ""


def _ordinary(case: Case, typical: Case, usual: tuple[str, ...]) -> tuple[str, ...] | None:
    """The probes of a case in an ordinary run: `usual`, unless it is large, tagged or the typical case."""
    if "large" in case.tags:
        return VALUES
    return None if EVERY_PROBE in case.tags or case is typical else usual


def _typical(cases: Sequence[Case]) -> Case:
    """The case that represents the others: of about TYPICAL_ELEMENTS, tagged EVERY_PROBE if any case is."""
    tagged = [c for c in cases if EVERY_PROBE in c.tags]
    return min(tagged or cases, key=lambda c: abs(elements(c) - TYPICAL_ELEMENTS))


def _spread(cases: list[Case], typical: Case) -> list[Case]:
    """At most FEW_CASES cases, evenly spread from first to last, the typical one included."""
    step = max(1.0, len(cases) / FEW_CASES)
    kept = {round(k * step) for k in range(FEW_CASES)}
    index = cases.index(typical)
    if index not in kept:
        kept = kept - {min(kept, key=lambda k: abs(k - index))} | {index}
    return [c for k, c in enumerate(cases) if k in kept]


def elements(case: Case) -> int:
    """Number of elements of the largest input; for large cases the product of the sizes, without drawing them."""
    if "large" in case.tags:
        return math.prod(v for v in case.sizes.values() if isinstance(v, int) and not isinstance(v, bool))
    try:
        drawn = case.build(torch.float32, "cpu", 0).values()
    except Exception:  # noqa: BLE001  a case that cannot be drawn is reported by name when it runs
        return TYPICAL_ELEMENTS
    return max((v.numel() for v in drawn if isinstance(v, torch.Tensor)), default=0)


@dataclass(frozen=True)
class _Jobs:
    """Makes the jobs of one target with these dtypes, interpreted or not, on a GPU or not."""

    dtypes: Sequence[str]
    interpreted: bool = False
    on_gpu: bool = False

    def __call__(self, case: Case, dtype: str, probes: tuple[str, ...] | None) -> Job:
        runs = RUNS[probes]
        seconds = 0.3 + 0.03 * runs + runs * (0.4 if self.interpreted else 0.01)
        label = case.name if case.given or list(self.dtypes) == [dtype] else f"{case.name} {dtype}"
        size = LARGE_COST if "large" in case.tags else 1 + elements(case) / (5e6 if self.on_gpu else 2e4)
        return Job(case.name, dtype, label, probes, seconds * size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
