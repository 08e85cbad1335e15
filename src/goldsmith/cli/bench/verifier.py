"""Verification before timing: an operator that the assay rejects is not timed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ...assay.checks import check
from ...assay.probes import QUICK
from ...core.device import BackendUnavailable
from ...core.op import Op
from ..verify import command as verify
from .subject import Subject, Variant
from .verified_files import ResultsByOperator, Verdict, judge, judged

# a module's target has the one dtype that it is timed in
MODULE_PROBES = tuple(name for name in QUICK if name != "float32")
NOT_VERIFIED: Verdict = (None, "not verified (--no-verify)")


class Verifier:
    """Verifies operators in worker processes, all of a run at once, and modules (which verify does not know) here."""

    def __init__(self, enabled: bool, device: str, say: Console, verified: ResultsByOperator | None = None) -> None:
        self.enabled, self.device, self.say, self.verified = enabled, device, say, verified or {}
        self.verdicts: dict[tuple[str, str, torch.dtype], Verdict] = {}

    @property
    def rejected(self) -> bool:
        return any(verdict is False for verdict, _ in self.verdicts.values())

    def rejections(self) -> list[str]:
        """A line per operator that was not timed because its check failed."""
        return [
            f"[bold red]{name} on {backend} was not timed: {escape(why)}[/]"
            for (name, backend, _), (verdict, why) in self.verdicts.items()
            if verdict is False
        ]

    def reject(self, subject: Subject, backend: str, why: str) -> None:
        """Time no more of this operator: it failed at a size that was to be timed."""
        self.verdicts[subject.name, backend, subject.entry.dtype] = (False, why)

    def verify_all(self, wanted: Iterable[tuple[Op, torch.dtype]], backend: str) -> None:
        """Run `goldsmith verify` on every operator, in the dtype that it is timed in, on the backend that will run."""
        groups: dict[tuple[str, torch.dtype], list[str]] = {}
        for op, dtype in wanted if self.enabled or self.verified else ():
            chosen = _backend(op, dtype, self.device, backend)
            if chosen is None:
                continue
            if (op.name, chosen, dtype) in self.verdicts:
                continue
            cases = self.verified.get((op.name, chosen))
            verdict = cases and judge(cases, op, chosen, self.device, dtype)
            if verdict:
                self.verdicts[op.name, chosen, dtype] = verdict
                continue
            names = groups.setdefault((chosen, dtype), [])
            if op.name not in names:
                names.append(op.name)
        for (chosen, dtype), names in groups.items() if self.enabled else ():
            self._verify(chosen, dtype, names)

    def _verify(self, backend: str, dtype: torch.dtype, names: list[str]) -> None:
        kind = str(dtype).removeprefix("torch.")
        self.say.print(f"[dim]checking {', '.join(names)} on {backend} in {kind}[/]")
        request = verify.VerifyRequest(names=tuple(names), backend=backend, device=self.device, dtype=kind)
        outcome = verify.verify(request, self.say)
        if outcome.interrupted:
            raise KeyboardInterrupt
        for entry in outcome.entries:
            report = entry.report
            if report is None:
                verdict: Verdict = False, f"nothing could be checked: {entry.reason}"
            elif entry.verdict == "pass":
                verdict = True, f"goldsmith verify, {len(judged(report.to_json()))} cases, {kind}"
            else:
                texts = [f.text for f in report.findings] or [report.partial or entry.verdict]
                verdict = False, texts[0]
            self.verdicts[entry.operator, backend, dtype] = verdict

    def verdict(self, subject: Subject, backend: str) -> Verdict:
        """(passed, how it was checked), or (None, reason) if no check was requested."""
        key = (subject.name, backend, subject.entry.dtype)
        if key not in self.verdicts:
            if not self.enabled:
                return NOT_VERIFIED
            with self.say.status(f"[dim]checking {subject.name} on {backend}[/]") as status:
                self.verdicts[key] = self._check(subject, backend, status)
        return self.verdicts[key]

    def _check(self, subject: Subject, backend: str, status: Status) -> Verdict:
        target, dtype, device = subject.target(backend), subject.entry.dtype, subject.device
        done = 0
        for case in target.cases:
            status.update(f"[dim]checking {target.name}: {case.name} ({done} of {len(target.cases)} done)[/]")
            report = check(target, case, dtype=dtype, device=device, probes=MODULE_PROBES, raises=False)
            done += 1
            if not report.ok:
                first = report.findings[0].text if report.findings else report.verdict
                return False, f"{case.name}: {first}"
        return True, f"assay.check, {done} cases, {str(dtype).removeprefix('torch.')}"


def _backend(op: Op, dtype: torch.dtype, device: str, wanted: str) -> str | None:
    """The backend that will run this dtype here, by the operator's small cases; None where none can run.

    Cases are tried from the smallest on until a fast backend takes one: some backends take no odd sizes.
    """
    fallback = None
    for case in sorted((c for c in op.cases if "large" not in c.tags), key=lambda c: sum(map(_size, c.sizes.values()))):
        inputs = case.build(dtype, device, 0)
        try:
            chosen = op.choose(wanted, tuple(inputs.get(n) for n in op.inputs), {o: inputs[o] for o in op.options})
        except BackendUnavailable:
            continue
        fallback = fallback or chosen
        if chosen != "reference" or wanted == "reference":
            return chosen
    return fallback


def _size(value: object) -> int:
    return value if isinstance(value, int) else 0


@torch.no_grad()
def golden_result(subject: Subject) -> torch.Tensor | None:
    """The float64 value of the first result; None where memory runs out."""
    try:
        return subject.golden()
    except torch.OutOfMemoryError:
        return None


@torch.no_grad()
def relative_error(golden: torch.Tensor | None, variant: Variant) -> float | None:
    """|result - golden| / |golden| of the first result, over the rows of golden; None where it means nothing."""
    if golden is None or not variant.comparable:
        return None
    try:
        norm = golden.norm()
        return float((variant.results()[0][: len(golden)].double() - golden).norm() / norm) if norm else None
    except torch.OutOfMemoryError:
        return None
