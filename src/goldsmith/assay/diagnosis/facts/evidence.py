"""The evidence about one failing case, which rules read: only data; nothing here runs a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...report.check_report import Report
from ...report.results import MEMORY_KINDS, ErrorMap, Location
from .raised_error import RaisedError

OK, CULPRIT, INHERITED, OBSERVED, NOT_JUDGED = "ok", "culprit", "inherited", "observed", "not judged"
NOT_TRIED = "not tried"
NO_TIME = "no time was left"  # the reason why a step was left out


@dataclass(frozen=True)
class StageState:
    """One line of the stage table; names are those of a run (`h`, `h.grad`, `y`, `saved.h`, `x.grad`).

    kind         "stage", "output", "saved" or "grad"
    propagated   worst |error| / bound in the candidate's own run; None: the candidate does not name it
    isolated     the same with every earlier stage on the golden's values; None: could not be isolated
    state        "ok"; "culprit": wrong on right inputs; "inherited": wrong only because of an earlier stage;
                 "observed": wrong, but the candidate ignores substituted values before it, or raises with them;
                 "not tried": wrong, but there was no time to isolate it; "not judged"
    ignored      earlier stages whose substituted values the candidate ignores
    """

    name: str
    kind: str
    propagated: float | None = None
    isolated: float | None = None
    state: str = NOT_JUDGED
    text: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ratio:
    """y / g is constant over a group: the whole tensor, or a segment.

    ratio    the constant; spread: relative, within the group
    named    the name of the number (`4`, `n^2`, `a_res`, `1/tiles`); "" if it is unknown
    also     other names of the same number
    scope    "tensor" or "segment"; group: the segment's name
    """

    tensor: str
    scope: str
    group: str
    ratio: float
    spread: float
    named: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class ErrorPattern:
    """The tensor is the golden, rearranged or stored differently.

    kind     "permuted", "transposed", "shifted", "reversed", "dtype_width" or "swapped"
    match    share of the wrong part (by squares) that the pattern explains; at best 1
    params   for example {"axis": 0, "step": 1}, {"axes": [0, 1]}, {"dtype": "bfloat16"}, {"with": "w.grad"}
    also     other patterns that explain it equally well
    """

    tensor: str
    kind: str
    match: float
    params: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class RunFact:
    """The result of another run of the same case: a second call, a repeat, one thread, a layout, a scale.

    wrong, first  the tensors that fail, and the first of them in the golden's order, including stages
    same          bit-equal to the first run; difference: largest |difference| to it
    late          bytes of the candidate's own buffers that were written after it returned, if that was watched
    nan           results and stages that hold NaN where the golden has none
    stale         inputs of the first run with which the golden gives this result; None: not tested
    alike         for slightly changed inputs: wrong tensor -> correlation of its errors with the first run's
    computed      on zeroed memory: results that hold numbers other than 0 wherever the first run holds NaN
    kinds         of the findings about this run
    """

    name: str
    wrong: tuple[str, ...] = ()
    same: bool = True
    difference: float = 0.0
    error: str = ""
    text: str = ""
    first: str = ""
    late: int = 0
    nan: tuple[str, ...] = ()
    stale: tuple[str, ...] | None = None
    alike: Mapping[str, float] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()

    @property
    def right(self) -> bool:
        return not self.wrong and not self.error


@dataclass(frozen=True)
class Influence:
    """The slices of an input on which golden and candidate depend differently.

    Ranges are inclusive.

    outputs    the results in which the difference shows
    none       the input should have influence and has none at all; then `missing` is empty, since nothing is cut short
    elsewhere  slices of `extra` that miss some elements that they reach in the golden: they arrive at other places
    length     of the axis; 0: unknown
    reached    share of the wrong elements that moves with those slices (in the golden for missing ones); the fault
               itself reaches all of them
    onto       if a slice belongs to one row of the result, the rows that it leaks into: "later", "earlier", "next",
               "last" (the one before) or "other"; otherwise ""
    """

    input: str
    axis: int
    missing: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[int, int], ...] = ()
    outputs: tuple[str, ...] = ()
    none: bool = False
    elsewhere: tuple[tuple[int, int], ...] = ()
    length: int = 0
    reached: float = 1.0
    onto: str = ""

    @property
    def throughout(self) -> bool:
        """True if every slice of the axis reaches elements that it should not."""
        return self.length > 1 and self.extra == ((0, self.length - 1),)


@dataclass(frozen=True)
class WhatIf:
    """A change of the golden that gives the candidate's numbers.

    cause    the cause id of the change; text: what was changed
    match    share of the error's squares that the change removes; exact: every element equals the candidate's within
             rounding
    whole    the change explains the whole tensor; otherwise it explains the wrong part, and the golden the rest
    others   share of the candidate's other results that the change also gives
    prior    how common such a mistake is among the changes that were tried
    also     other causes that describe the same mistake
    line     "file:number" of the golden that it changes, "" if it is no single one
    """

    cause: str
    text: str
    tensor: str
    match: float
    exact: bool
    params: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = True
    others: float = 1.0
    prior: float = 0.5
    also: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True)
class NonFiniteOrigin:
    """Where a value that is finite in the golden first becomes NaN or Inf in the candidate.

    kind   "nan" or "inf"; stage: the first named tensor that holds it
    op     the operation that makes it from finite values; "" if torch's dispatcher sees none
    cause  "overflow", "missing_max_shift", "use_after_free" or "uninitialised_accumulator"; "" if unknown
    """

    kind: str
    stage: str
    op: str
    cause: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class GradientCarriers:
    """The output gradients that make `tensor` wrong if all others are zero.

    outputs   those that do so alone
    harmless  those that do not
    always    the tensor is wrong even with zeros for all of them
    parts     axis -> inclusive ranges of slices of the first such gradient that make it wrong, one slice at a time;
              only axes of which every slice was tried, and some do not make it wrong; (): it takes several at once
    """

    tensor: str
    outputs: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    always: bool = False
    parts: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryFact:
    """A fault in memory.

    kind     "overrun", "stray_read", "input_modified", "output_modified", "aliased" or "never_written"
    run      the run that shows it
    values   of the finding: {"bytes": 4, "side": "past"}, {"with": "x"}
    """

    kind: str
    tensor: str
    text: str
    location: Location | None = None
    run: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Evidence:
    """The evidence about one failing case.

    tensor, golden, got   the first wrong tensor, both float64 (None if the candidate gave none)
    other                 other results and stages of the same run: name -> (got, golden), float64
    whatif                changes of the golden that give the tensor, the best first
    runs                  by name: "second_call", "other_inputs", "back", "backward_twice", "repeat 1", "one thread",
                          "layout transposed(x)", "scale 2^12", ...
    scalars, sizes        of the case; both may give names to numbers in causes
    operators             of the golden that make the tensor; empty if unknown
    left_out              steps that were left out -> why
    memory                faults in memory, from the report's findings
    map                   the first wrong tensor as a small picture
    nonfinite_origin      where NaN or Inf begins
    carriers              the output gradients that make the tensor wrong
    alike                 another tensor of the golden with exactly these numbers; "" if there is none
    unused                integer inputs -> numbers below a size of the case that they do not contain
    stored                dtype of the first wrong tensor, as the candidate returned it
    reused                stage -> a later stage that was written into its memory
    grouped               True if an input has whole numbers or is a mask, which may define groups
    filled                which groups are empty, if an error disappears once they are filled
    """

    report: Report
    stages: list[StageState] = field(default_factory=list)
    first_wrong: str | None = None
    tensor: str = ""
    golden: Tensor | None = None
    got: Tensor | None = None
    location: Location | None = None
    ratios: list[Ratio] = field(default_factory=list)
    permutations: list[ErrorPattern] = field(default_factory=list)
    runs: dict[str, RunFact] = field(default_factory=dict)
    influence: dict[str, Influence] = field(default_factory=dict)
    memory: list[MemoryFact] = field(default_factory=list)
    whatif: list[WhatIf] = field(default_factory=list)
    error: str | None = None
    other: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scalars: dict[str, object] = field(default_factory=dict)
    sizes: dict[str, object] = field(default_factory=dict)
    dtype: str = "float32"
    operators: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    map: ErrorMap | None = None
    nonfinite_origin: NonFiniteOrigin | None = None
    carriers: GradientCarriers | None = None
    alike: str = ""
    unused: dict[str, list[int]] = field(default_factory=dict)
    filled: str = ""
    grouped: bool = True
    stored: str = ""
    reused: dict[str, str] = field(default_factory=dict)
    raised: RaisedError | None = None

    def __post_init__(self) -> None:
        faults = (f for f in self.report.findings if f.kind in MEMORY_KINDS)
        self.memory = self.memory or [MemoryFact(f.kind, f.tensor, f.text, f.location, f.run, f.values) for f in faults]
        if self.error is not None:
            self.fail(self.error)

    def fail(self, error: str) -> None:
        """Record the message of the exception that ended the plain run, and what it says as data."""
        self.error, self.raised = error, RaisedError.read(error)

    def stage(self, name: str) -> StageState | None:
        """The stage of that name, or None."""
        return next((s for s in self.stages if s.name == name), None)
