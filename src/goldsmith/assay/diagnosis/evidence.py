"""Everything that a rule may read about one failing case. All of it is data; nothing here runs a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..report.check_report import Report
from ..report.results import ErrorMap, Location

OK, CULPRIT, INHERITED, OBSERVED, NOT_JUDGED = "ok", "culprit", "inherited", "observed", "not judged"
NOT_TRIED = "not tried"
IGNORES = "the candidate ignores a substituted"  # in the text of a stage that could not be isolated for that
NO_TIME = "no time was left"  # why a step was left out
STATES = (OK, CULPRIT, INHERITED, OBSERVED, NOT_TRIED, NOT_JUDGED)


@dataclass(frozen=True)
class StageState:
    """One line of the stage table; names are those of a run (`h`, `h.grad`, `y`, `saved.h`, `x.grad`).

    kind         "stage", "output", "saved" or "grad"
    propagated   worst |error| / bound in the candidate's own run; None: the candidate does not name it
    isolated     the same with every earlier stage on the golden's values; None: could not be isolated
    state        "ok"; "culprit": wrong on right inputs; "inherited": wrong only because of what came before;
                 "observed": wrong, and the candidate ignores substituted values before it, or raises with them;
                 "not tried": wrong, and no time was left to isolate it; "not judged"
    """

    name: str
    kind: str
    propagated: float | None = None
    isolated: float | None = None
    state: str = NOT_JUDGED
    text: str = ""


@dataclass(frozen=True)
class Fit:
    """One term of the residual y - g, found by regression.

    term, factor      residual = coefficient * factor * term; factor "1" is none
    reading           against the golden's own coefficient: "missing", "repeated", "sign_flipped", "factor" (`named` is
                      what multiplies the golden's term: "a_res", "1/inv_rms"), or "added" (no term of the golden)
    coefficient       as measured, with its standard error
    exact             the number it was snapped to within that error, or None; `named` says what that number is
    golden            the golden's own coefficient of the term (None: the golden has no such term)
    gain, r2          share of the residual that this term explains on top of those before it, and of all terms together
    condition         of the chosen columns
    also              other explanations that cannot be told from this one
    where             "" for the whole tensor, or the segment it was fitted in
    """

    tensor: str
    term: str
    factor: str
    reading: str
    coefficient: float
    error: float
    exact: float | None = None
    named: str = ""
    golden: float | None = None
    gain: float = 0.0
    r2: float = 0.0
    condition: float = 1.0
    also: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Ratio:
    """y / g is constant over a group: the whole tensor, a segment, or each row along an axis.

    ratio    the constant (for rows: its median); spread: relative, within the group
    named    what the number is (`4`, `n^2`, `a_res`, `1/tiles`); "" when it is nothing known
    also     other names of the same number
    scope    "tensor", "segment" or "row"; group: the segment's name, or "axis 1 [3..7]"
    """

    tensor: str
    scope: str
    group: str
    ratio: float
    spread: float
    named: str = ""
    also: tuple[str, ...] = ()
    fraction: float = 1.0


@dataclass(frozen=True)
class ErrorPattern:
    """The tensor is the golden rearranged or stored otherwise.

    kind     "permuted", "transposed", "shifted", "reversed", "half_filled", "dtype_width" or "swapped"
    match    share of the wrong part (by squares) that the pattern explains, 1 at best
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
    """What came of another run of the same case: a second call, a repeat, one thread, a layout, a scale.

    wrong, first  the tensors that fail in it; the first that does in the golden's order, stages among them
    same          bit-equal to the first run; difference: largest |difference| to it
    late          bytes of the candidate's own buffers that were written after it had returned, where that was watched
    nan           results and stages that hold NaN where the golden has none
    stale         inputs that, as they were in the first run, make the golden give what came; None: not asked
    alike         where inputs are a little off: of a wrong tensor, how its errors correlate with the first run's
    computed      on zeroed memory: results with numbers other than 0 wherever the first run holds NaN
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

    @property
    def right(self) -> bool:
        return not self.wrong and not self.error


@dataclass(frozen=True)
class Influence:
    """Which slices of an input the golden depends on and the candidate does not, and the other way round.

    Ranges are inclusive. `outputs` are the results in which it shows. `none`: the input has no influence at all, and
    should (`missing` is empty then: nothing is cut short). `elsewhere`: those of `extra` that fail to reach some
    of what they reach in the golden: they come out at other places. `length`: of the axis, 0 where it is not known.
    `foreign`: the golden's results in `outputs` are not made of that input at all. `reached`: of the wrong elements,
    the share that moves with those slices, in the golden with the missing ones; a fault that is there reaches all.
    `absent`, `summed`, `beside`: of what is missing, as closer.py asks; None and () where it was not asked.
    `onto`: where a slice belongs to one row of the result alone, the rows that it leaks into: "later", "earlier",
    "next", "last" (the one before) or "other"; "" elsewhere.
    """

    input: str
    axis: int
    missing: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[int, int], ...] = ()
    outputs: tuple[str, ...] = ()
    none: bool = False
    elsewhere: tuple[tuple[int, int], ...] = ()
    length: int = 0
    foreign: bool = False
    reached: float = 1.0
    absent: bool | None = None
    summed: bool | None = None
    beside: tuple[str, ...] = ()
    onto: str = ""

    @property
    def throughout(self) -> bool:
        """Whether every slice of the axis reaches what it should not."""
        return self.length > 1 and self.extra == ((0, self.length - 1),)


@dataclass(frozen=True)
class WhatIf:
    """A change of the golden that makes what the candidate made.

    cause    the id that such a change is of; text: what was changed
    match    share of the error's squares that is gone; exact: every element is the candidate's, within rounding
    whole    the change explains the whole tensor; otherwise the wrong part alone, and the golden the rest
    others   share of the candidate's other results that it makes as well
    prior    how common such a mistake is, among the changes that were tried
    also     other causes that the same mistake may be called by
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


@dataclass(frozen=True)
class Born:
    """Where a value that is finite in the golden first becomes NaN or Inf in the candidate.

    kind   "nan" or "inf"; stage: the first named tensor that holds it
    op     the operation that makes it of finite values; "" where torch's dispatcher sees none
    cause  "overflow", "missing_max_shift", "missing_sync", "use_after_free" or "uninitialised_accumulator", where that
           is known
    """

    kind: str
    stage: str
    op: str
    cause: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Carried:
    """Which output gradients make `tensor` wrong when all others are zero.

    outputs   those that do, each alone; quiet: those that do not
    always    it is wrong with zeros for all of them
    parts     axis -> ranges (inclusive) of the first one whose slices, one at a time, make it wrong; whole axes are
              left out
    unit      a single 1 at that index makes it wrong (None: not known, or not)
    together  axes along which no slice alone makes it wrong: it takes several at once
    """

    tensor: str
    outputs: tuple[str, ...] = ()
    quiet: tuple[str, ...] = ()
    always: bool = False
    parts: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    unit: tuple[int, ...] | None = None
    together: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryFact:
    """Something done to memory.

    kind     "overrun", "stray_read", "input_modified", "output_modified", "aliased" or "never_written"
    """

    kind: str
    tensor: str
    text: str
    location: Location | None = None


@dataclass
class Evidence:
    """One failing case, examined.

    tensor, golden, got   the first wrong tensor, both float64 (None when the candidate gave none)
    other                 results of the same run by name, candidate and golden: (got, golden), float64
    whatif                changes of the golden that make the tensor, the best first
    runs                  by name: "second_call", "other_inputs", "back", "backward_twice", "repeat 1", "one thread",
                          "layout transposed(x)", "scale 2^12", ...
    scalars, sizes        of the case; both may name causes
    operators             of the golden, as far as the tensor is made of them; empty where that is not known
    left_out              steps that could not be taken, and why
    map                   the first wrong tensor as a small picture
    born, carried         where it left the finite numbers; which output gradients make it wrong
    alike                 another tensor of the golden whose very numbers it holds; "" where there is none
    unused                integer inputs -> numbers that they leave out, below a size of the case
    made_of               operators, as far as a rule asks for them and `operators` is empty
    stored                dtype of the first wrong tensor, as the candidate made it
    kept                  input -> a sentence: its other numbers in the same memory give the first result
    reused                stage -> a later one that was written into its memory
    deaf                  input -> where all inputs are small, the share of what it moves in the golden that stays
    grouped               whether an input is of whole numbers or a mask, which may say what belongs to which group
    filled                which groups are empty, where an error goes away once they are not
    """

    report: Report
    stages: list[StageState] = field(default_factory=list)
    first_wrong: str | None = None
    tensor: str = ""
    golden: Tensor | None = None
    got: Tensor | None = None
    location: Location | None = None
    fits: list[Fit] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    permutations: list[ErrorPattern] = field(default_factory=list)
    runs: dict[str, RunFact] = field(default_factory=dict)
    influence: dict[str, Influence] = field(default_factory=dict)
    memory: list[MemoryFact] = field(default_factory=list)
    whatif: list[WhatIf] = field(default_factory=list)
    error: str | None = None
    other: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    operators: frozenset[str] = frozenset()
    left_out: dict[str, str] = field(default_factory=dict)
    map: ErrorMap | None = None
    born: Born | None = None
    carried: Carried | None = None
    alike: str = ""
    unused: dict[str, list[int]] = field(default_factory=dict)
    filled: str = ""
    grouped: bool = True
    made_of: frozenset[str] = frozenset()
    stored: str = ""
    kept: dict[str, str] = field(default_factory=dict)
    reused: dict[str, str] = field(default_factory=dict)
    deaf: dict[str, float] = field(default_factory=dict)

    def stage(self, name: str) -> StageState | None:
        """The stage of that name, if it is in the table."""
        return next((s for s in self.stages if s.name == name), None)
