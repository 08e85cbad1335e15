"""The guard's report of a NaN or Inf: its origin as an object, an exception, a warning and a text."""

from __future__ import annotations

from dataclasses import asdict, dataclass

MOST_ROWS = 1000


@dataclass(frozen=True)
class NumericsReport:
    """Where a NaN or Inf began in an engine's call, and why.

    layer, stage, cause    the earliest stage whose inputs are finite and whose result is not, and the cause;
               layer None, stage and cause "after": the model's output after its last experts

    kind       "nan" or "inf"
    experts    the experts at fault, ascending; empty if no expert is
    rows       the token rows with a NaN or Inf, ascending, at most 1000; num_rows: their number
    positions  (batch, position) of these rows, if the caller has given the batch's shape
    lane       "cpu", "copied" or "cached": the lane of the first expert in `experts`; None if that is empty
    call       number of the engine's call, from 1
    first      whether all layers before it gave finite numbers
    evidence   sentences: ranges before the stage, checksums, whether a recomputation gives it again
    advice     what to do
    """

    layer: int | None
    stage: str
    cause: str
    kind: str
    experts: tuple[int, ...]
    rows: tuple[int, ...]
    num_rows: int
    positions: tuple[tuple[int, int], ...]
    lane: str | None
    call: int
    first: bool
    evidence: tuple[str, ...]
    advice: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        what = "NaN" if self.kind == "nan" else "Inf"
        of = f", expert{'s' * (len(self.experts) > 1)} {_few(self.experts)}" if self.experts else ""
        on = f", on the lane {self.lane!r}" if self.lane else ""
        where = f" (positions {_few(self.positions)})" if self.positions else ""
        rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)}: {_few(self.rows)}{where}"
        facts = " ".join(self.evidence)
        if self.layer is None:
            return f"{what} after the last layer of experts; call {self.call}, {rows}. {facts} {self.advice}"
        return (
            f"{what} in layer {self.layer}, stage {self.stage!r}, cause {self.cause!r}{of}{on}; call {self.call}, "
            f"{rows}. {facts} {self.advice}"
        )


class NumericsError(ArithmeticError):
    """A NaN or Inf in an engine's call; `report` says where it arose."""

    def __init__(self, report: NumericsReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[NumericsError], tuple[NumericsReport]]:
        return NumericsError, (self.report,)


class NumericsWarning(UserWarning):
    """The report with guard="warn"; the values pass unchanged."""

    def __init__(self, report: NumericsReport) -> None:
        super().__init__(str(report))
        self.report = report


def _few(values: tuple[object, ...], most: int = 8) -> str:
    shown = ", ".join(map(str, values[:most]))
    return f"{shown}, ... ({len(values)})" if len(values) > most else shown
