"""SourceLine and FaultyLine: the line of the candidate that goes wrong first, and what was compared to find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

# benchmarks.kernelfault.lines, 44 faults drawn at random (x86, torch 2.13, 2026-11)
MEASURED = "Likely, no proof: of 36 such lines, 11 were the faulty one, and 24 stood within two lines of it."

UNSHOWN = ("region", "beside", "reading")  # fields for the search for a patch


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's source. file: its path."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class FoundValue:
    """A value of the candidate that the golden computes too.

    line       of the candidate; 0: an input of the call
    operation  that made it, "" for an input
    golden     what it equals in the golden: an expression, or the name of a tensor
    matched    distinct elements that were compared; elements such as 0, 1 and small integers do not count
    negated    equal up to the sign
    """

    line: int
    operation: str
    golden: str
    matched: int
    negated: bool = False


@dataclass(frozen=True)
class FaultyLine:
    """The first operation whose inputs are values of the golden and whose result is not.

    expression  the text of the line
    operation   the operator: "mul", "dot", "store"
    inputs      its inputs, as far as they are values of the golden
    compared    distinct elements of its result that were looked for
    missing     of them, those that no value of the golden has
    tensors     the wrong results that depend on it
    backward    whether autograd's backward of this line made the result
    region      (file, line) of all operations on the way to the wrong results that have no value of the golden, and of
                what says where they read and write: the fault is likely in one of these lines
    beside      (file, line) of all other operations that ran
    reading     (file, line) of what says where and whether the inputs of the operation are read
    border      the line at or before which the fault lies, since with another result there (`instead`) a run of the
                candidate is right; 0 if no such run was made
    """

    at: SourceLine
    expression: str
    operation: str
    inputs: tuple[FoundValue, ...]
    compared: int
    missing: int
    tensors: tuple[str, ...]
    backward: bool = False
    instead: str = ""
    border: int = 0
    region: tuple[tuple[str, int], ...] = ()
    beside: tuple[tuple[str, int], ...] = ()
    reading: tuple[tuple[str, int], ...] = ()

    @property
    def place(self) -> str:
        return f"{Path(self.at.file).name}:{self.at.line}"

    @property
    def sentences(self) -> list[str]:
        """What was found and what was not, a sentence each."""
        of = " of autograd's backward" if self.backward else ""
        lines = []
        if self.inputs:
            lines.append(f"Its inputs are values of the golden: {_listed(self.inputs)}.")
        result = f"The result of {self.operation}{of}"
        if not self.missing:
            lines.append(f"{result} has the golden's numbers, and {_names(self.tensors)} has them in other places.")
        elif self.missing == self.compared:
            lines.append(f"{result} is not: none of {self.compared} elements is in a tensor of the golden.")
        else:
            lines.append(f"{result} is not: {self.missing} of {self.compared} elements are in no tensor of the golden.")
        if self.border:
            place = "in this line or before it" if self.border == self.at.line else f"in line {self.border} or before"
            where = "there" if self.border == self.at.line else f"in line {self.border}"
            lines.append(f"With another result {where} ({self.instead}) every result is right: the fault is {place}.")
        return lines

    def to_json(self) -> dict[str, object]:
        data = {name: value for name, value in asdict(self).items() if name not in UNSHOWN}
        return data.pop("at") | data | {"sentences": self.sentences}

    @staticmethod
    def from_json(data: Mapping[str, object]) -> FaultyLine:
        """Reads what the child process sent; raises TypeError, KeyError or ValueError for anything else."""
        inputs = data["inputs"]
        if not isinstance(inputs, list | tuple):
            raise TypeError("inputs that are no list")
        values = tuple(
            FoundValue(int(f["line"]), str(f["operation"]), str(f["golden"]), int(f["matched"]), bool(f["negated"]))
            for f in inputs
        )
        names = data["tensors"]
        if not isinstance(names, list | tuple):
            raise TypeError("tensors that are no list")
        return FaultyLine(
            SourceLine(str(data["file"]), int(str(data["line"])), str(data["function"])), str(data["expression"]),
            str(data["operation"]), values, int(str(data["compared"])), int(str(data["missing"])),
            tuple(map(str, names)), bool(data["backward"]), str(data["instead"]),
            int(str(data["border"])), *(_lines(data[name]) for name in UNSHOWN),
        )  # fmt: skip


def _lines(data: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(data, list | tuple):
        raise TypeError("lines that are no list")
    return tuple((str(file), int(line)) for file, line in data)


def _listed(inputs: tuple[FoundValue, ...]) -> str:
    parts = []
    for value in inputs:
        own = f"{value.operation} of line {value.line}" if value.line else value.golden
        same = f" = {'-' if value.negated else ''}{value.golden}" if value.line else ""
        parts.append(f"{own}{same} ({value.matched} elements)")
    return ", ".join(parts)


def _names(names: tuple[str, ...]) -> str:
    return " and ".join(names) or "the result"
