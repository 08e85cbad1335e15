"""The proof before the timing: nothing is timed that the assay rejects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ...assay.checks import check
from ...assay.probes import QUICK
from ...core.device import BackendUnavailable
from ...core.op import Op
from ..verify import command as verify
from .proof_files import Proved, Verdict, judge, judged
from .subject import Subject, Variant

HERE = tuple(
    name for name in QUICK if name != "float32"
)  # a composite's target knows the one dtype that it is timed in
NOT_WANTED: Verdict = (None, "not verified (--no-verify)")


class Prover:
    """Proves operators in worker processes, all of a run at once; composites, unknown to verify, in this one."""

    def __init__(self, wanted: bool, device: str, say: Console, given: Proved | None = None) -> None:
        self.wanted, self.device, self.say, self.given = wanted, device, say, given or {}
        self.proved: dict[tuple[str, str, torch.dtype], Verdict] = {}

    @property
    def rejected(self) -> bool:
        return any(verdict is False for verdict, _ in self.proved.values())

    def rejections(self) -> list[str]:
        """A line for each operator that was not timed because it could not be proved."""
        return [
            f"[bold red]{name} on {backend} was not timed: {escape(why)}[/]"
            for (name, backend, _), (verdict, why) in self.proved.items()
            if verdict is False
        ]

    def reject(self, subject: Subject, backend: str, why: str) -> None:
        """It broke at a size that it was to be timed at: nothing more of it is timed."""
        self.proved[subject.name, backend, subject.entry.dtype] = (False, why)

    def prove_all(self, wanted: Iterable[tuple[Op, torch.dtype]], backend: str) -> None:
        """Every operator in the dtype that it is timed in, on the backend that will run: `goldsmith verify`'s run."""
        groups: dict[tuple[str, torch.dtype], list[str]] = {}
        for op, dtype in wanted if self.wanted or self.given else ():
            chosen = _backend(op, dtype, self.device, backend)
            if chosen is None:
                continue
            if (op.name, chosen, dtype) in self.proved:
                continue
            held = self.given.get((op.name, chosen))
            verdict = held and judge(held, op, chosen, self.device, dtype)
            if verdict:
                self.proved[op.name, chosen, dtype] = verdict
                continue
            names = groups.setdefault((chosen, dtype), [])
            if op.name not in names:
                names.append(op.name)
        for (chosen, dtype), names in groups.items() if self.wanted else ():
            self._verify(chosen, dtype, names)

    def _verify(self, backend: str, dtype: torch.dtype, names: list[str]) -> None:
        kind = str(dtype).removeprefix("torch.")
        self.say.print(f"[dim]proving {', '.join(names)} on {backend} in {kind}[/]")
        request = verify.Request(names=tuple(names), backend=backend, device=self.device, dtype=kind)
        outcome = verify.verify(request, self.say)
        if outcome.interrupted:
            raise KeyboardInterrupt
        for entry in outcome.entries:
            report = entry.report
            if report is None:
                verdict: Verdict = False, f"nothing could be proved: {entry.reason}"
            elif entry.verdict == "pass":
                verdict = True, f"goldsmith verify, {len(judged(report.to_json()))} cases, {kind}"
            else:
                texts = [f.text for f in report.findings] or [report.partial or entry.verdict]
                verdict = False, texts[0]
            self.proved[entry.operator, backend, dtype] = verdict

    def prove(self, subject: Subject, backend: str) -> Verdict:
        """Whether the assay passes it, and by what; (None, why) when no proof was wanted."""
        key = (subject.name, backend, subject.entry.dtype)
        if key not in self.proved:
            if not self.wanted:
                return NOT_WANTED
            with self.say.status(f"[dim]proving {subject.name} on {backend}[/]") as status:
                self.proved[key] = self._here(subject, backend, status)
        return self.proved[key]

    def _here(self, subject: Subject, backend: str, status: Any) -> Verdict:
        target, dtype, device = subject.target(backend), subject.entry.dtype, subject.device
        done = 0
        for case in target.cases:
            status.update(f"[dim]proving {target.name}: {case.name} ({done} of {len(target.cases)} done)[/]")
            report = check(target, case, dtype=dtype, device=device, probes=HERE, raises=False)
            done += 1
            if not report.ok:
                first = report.findings[0].text if report.findings else report.verdict
                return False, f"{case.name}: {first}"
        return True, f"assay.check, {done} cases, {str(dtype).removeprefix('torch.')}"


def _backend(op: Op, dtype: torch.dtype, device: str, wanted: str) -> str | None:
    """The backend that will run this dtype here, judged by the operator's small cases; None when none can.

    The smallest that one of the fast backends takes: some take no odd sizes, which the smallest of all have.
    """
    found = None
    for case in sorted((c for c in op.cases if "large" not in c.tags), key=lambda c: sum(map(_size, c.sizes.values()))):
        given = case.build(dtype, device, 0)
        try:
            chosen = op.choose(wanted, tuple(given.get(n) for n in op.inputs), {o: given[o] for o in op.options})
        except BackendUnavailable:
            continue
        found = found or chosen
        if chosen != "reference" or wanted == "reference":
            return chosen
    return found


def _size(value: Any) -> int:
    return value if isinstance(value, int) else 0


@torch.no_grad()
def golden_result(subject: Subject) -> torch.Tensor | None:
    """What the first result is compared with; None where memory is short."""
    try:
        return subject.golden()
    except torch.OutOfMemoryError:
        return None


@torch.no_grad()
def relative_error(golden: torch.Tensor | None, variant: Variant) -> float | None:
    """|got - golden| / |golden| of the first result, as far as golden goes; None where that says nothing."""
    if golden is None or not variant.comparable:
        return None
    try:
        norm = golden.norm()
        return float((variant.results()[0][: len(golden)].double() - golden).norm() / norm) if norm else None
    except torch.OutOfMemoryError:
        return None
