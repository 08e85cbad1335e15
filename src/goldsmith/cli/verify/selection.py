"""Which cases a run proves, in which dtypes and through which probes; what it leaves out; and about what each costs.

`--thorough` is everything. The ordinary run on a CPU is sized to end within two minutes on two slow cores: there a run
of a Triton kernel through the interpreter takes 0.1 to 1 s, and the golden's bounds and ensembles 0.3 s a case (torch
2.13).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, cast

import torch

from ...assay.case import Case
from ...assay.target import Target
from ...core.op import Op
from ..targets import op_dtypes

if TYPE_CHECKING:
    from ..workers.messages import JobMessage
from ..terminal import count

# What the first run shows anyway; what needs seven further runs; what needs seven others, and makes sense in the
# interpreter, where programs run in order and so repeat. The rest takes some thirty.
VALUES = ("values", "ensemble", "decisions", "statistics", "poison", "guard", "alias", "float32")
USUAL = (*VALUES, "second_call", "repeats")
CONTRACT = (*VALUES, "second_call", "layouts")
RUNS: dict[tuple[str, ...] | None, int] = {VALUES: 2, USUAL: 9, CONTRACT: 9, None: 50}  # of the candidate, about
EVERY_PROBE = "every_probe"  # tag of the cases that an ordinary run puts through all probes
TYPICAL_ELEMENTS = 100  # of the largest input: the case that stands for the others is the one of about this size
INTERPRETED_CASES = 8  # of an operator, in an ordinary run
SIZES = ("quick", "default", "thorough")


@dataclass(frozen=True)
class Job:
    """One case in one dtype: `probes` None is all of them; `cost` is in seconds on two slow cores, roughly.

    `label` is what reports call it: the case's name, with the dtype where the target has several.
    """

    case: str
    dtype: str
    label: str
    probes: tuple[str, ...] | None = None
    cost: float = 1.0

    def to_json(self) -> JobMessage:
        return cast("JobMessage", asdict(self))

    @classmethod
    def from_json(cls, data: JobMessage) -> Job:
        probes = None if data["probes"] is None else tuple(data["probes"])
        return cls(data["case"], data["dtype"], data["label"], probes, data["cost"])


@dataclass(frozen=True)
class Choice:
    """The jobs of one proof, and what of it is not run: how many cases, and which in words."""

    jobs: list[Job]
    left_out: list[tuple[int, str]]


def choose(op: Op, backend: str, device: str, interpreted: bool, size: str, dtype: str | None) -> Choice:
    """The jobs of one backend of an operator.

    quick     one small case, through what its first run shows
    default   GPU: every case in every dtype, small ones with second call and repeats, those tagged "every_probe"
              through all probes, large ones through what their first run shows. The reference: every case in the first
              dtype (small ones on a CPU) through what its first run shows, those tagged and one more through all
              probes, one case in the other dtypes. The interpreter: at most eight cases in float32, through what their
              first run shows; one also with second call and layouts
    thorough  every case in every dtype through all probes; in the interpreter the small cases

    bfloat16 is not tried in the interpreter, where its stores truncate; what is asked for by name is, and `check` says
    of each case that it was not judged.
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
        return Choice([job(typical, dtypes[0], VALUES)], [(total - 1, "cases that --quick leaves out")])
    large = (len(op.cases) - len(cases)) * len(dtypes)
    left_out = [(large, f"large cases, which {'a GPU runs' if interpreted else 'a GPU or --thorough runs'}")]
    if truncated:
        text = "cases in bfloat16, whose stores Triton's interpreter truncates where hardware rounds"
        left_out.append((len(op.cases), text))
    everything = [(c, d) for d in dtypes for c in cases]
    if size == "thorough":
        return Choice([job(c, d, None) for c, d in everything], _some(left_out))
    if interpreted:
        kept = _spread(cases, typical)
        jobs = [job(c, dtypes[0], CONTRACT if c is typical else VALUES) for c in kept]
        left_out.append((len(everything) - len(jobs), "small cases in the interpreter, which --thorough runs"))
    elif on_gpu and backend != "reference":
        jobs = [job(c, d, _ordinary(c, typical, USUAL)) for c, d in everything]
    else:
        jobs = [job(c, dtypes[0], _ordinary(c, typical, VALUES)) for c in cases]
        jobs += [job(typical, d, VALUES) for d in dtypes[1:]]
        left_out.append((len(everything) - len(jobs), "cases in further dtypes, which --thorough runs"))
    return Choice(jobs, _some(left_out))


def _some(left_out: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(number, text) for number, text in left_out if number]


def choose_own(target: Target, size: str, dtype: str | None) -> Choice:
    """The jobs of a target of the user's own: every case in every dtype through all probes, or one with --quick.

    Whether its kernels run in the interpreter shows when they run: `check` then does not judge them in bfloat16.
    """
    known = [_name(d) for d in target.dtypes]
    job, dtypes = _Jobs(known), known if dtype is None else [dtype]
    if size == "quick":
        number = len(target.cases) * len(dtypes) - 1
        return Choice(
            [job(_typical(target.cases), dtypes[0], VALUES)], _some([(number, "cases that --quick leaves out")])
        )
    drawn, literal = ([c for c in target.cases if c.given == given] for given in (False, True))
    jobs = [job(case, d, None) for d in dtypes for case in drawn]  # what is given as it is has a dtype of its own
    return Choice(jobs + [job(case, dtype or _own_dtype(case, dtypes[0]), None) for case in literal], [])


def _own_dtype(case: Case, otherwise: str) -> str:
    return next((_name(d) for d in case.own_dtypes), otherwise)


def examined(jobs: Iterable[Job]) -> str:
    """One sentence: how many cases went through which probes."""
    words: dict[tuple[str, ...] | None, str] = {
        None: "all probes",
        CONTRACT: "values, memory, second call and layouts",
        USUAL: "values, memory, second call and repeats",
        VALUES: "values and memory",
    }
    numbers = Counter(job.probes for job in jobs)
    said = [f"{count(numbers[probes], 'case')} through {words[probes]}" for probes in words if numbers[probes]]
    said += ["--thorough runs all probes on every case"] if set(numbers) - {None} else []
    return f"Run: {'; '.join(said)}." if numbers else ""


def _ordinary(case: Case, typical: Case, most: tuple[str, ...]) -> tuple[str, ...] | None:
    """What a case goes through in an ordinary run: `most` of them, unless it is large, tagged or the typical one."""
    if "large" in case.tags:
        return VALUES
    return None if EVERY_PROBE in case.tags or case is typical else most


def _typical(cases: Sequence[Case]) -> Case:
    """The case that stands for the others, of about the usual size: one of those meant for every probe, if any are."""
    tagged = [c for c in cases if EVERY_PROBE in c.tags]
    return min(tagged or cases, key=lambda c: abs(elements(c) - TYPICAL_ELEMENTS))


def _spread(cases: list[Case], typical: Case) -> list[Case]:
    """At most INTERPRETED_CASES of them, evenly from first to last, the typical one among them."""
    step = max(1.0, len(cases) / INTERPRETED_CASES)
    kept = {round(k * step) for k in range(INTERPRETED_CASES)}
    at = cases.index(typical)
    if at not in kept:
        kept = kept - {min(kept, key=lambda k: abs(k - at))} | {at}
    return [c for k, c in enumerate(cases) if k in kept]


def elements(case: Case) -> int:
    """Elements of the largest input; of a large case the product of its sizes, which need not be drawn."""
    if "large" in case.tags:
        return math.prod(v for v in case.sizes.values() if isinstance(v, int) and not isinstance(v, bool))
    try:
        drawn = case.build(torch.float32, "cpu", 0).values()
    except Exception:  # noqa: BLE001  a user's case that cannot be drawn is told when it is run, with its name
        return TYPICAL_ELEMENTS
    return max((v.numel() for v in drawn if isinstance(v, torch.Tensor)), default=0)


@dataclass(frozen=True)
class _Jobs:
    """Makes jobs of one target: knows its dtypes, and whether its kernels are interpreted."""

    dtypes: Sequence[str]
    interpreted: bool = False
    on_gpu: bool = False

    def __call__(self, case: Case, dtype: str, probes: tuple[str, ...] | None) -> Job:
        runs = RUNS[probes]
        seconds = 0.3 + 0.03 * runs + runs * (0.4 if self.interpreted else 0.01)
        label = case.name if case.given or list(self.dtypes) == [dtype] else f"{case.name} {dtype}"
        return Job(case.name, dtype, label, probes, seconds * (1 + elements(case) / (5e6 if self.on_gpu else 2e4)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
