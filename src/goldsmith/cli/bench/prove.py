"""The proof before the timing: nothing is timed that the assay rejects."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from ...assay.check import check
from ...core.op import Op
from .subject import Subject, Variant

Proof = tuple[bool | None, str]


class Prover:
    """Proves each operator, backend and dtype once a run."""

    def __init__(self, wanted: bool, say: Console) -> None:
        self.wanted, self.say = wanted, say
        self.proved: dict[tuple[str, str, torch.dtype], Proof] = {}

    @property
    def rejected(self) -> bool:
        return any(verdict is False for verdict, _ in self.proved.values())

    def prove(self, subject: Subject, backend: str) -> Proof:
        """Whether the assay passes it, and by what; (None, why) when no proof was wanted."""
        if not self.wanted:
            return None, "not verified (--no-verify)"
        key = (subject.name, backend, subject.entry.dtype)
        if key not in self.proved:
            with self.say.status(f"[dim]proving {subject.name} on {backend}[/]") as status:
                self.proved[key] = self._prove(subject, backend, status)
        return self.proved[key]

    def _prove(self, subject: Subject, backend: str, status: Any) -> Proof:
        target, dtype, device = subject.target(backend), subject.entry.dtype, subject.device
        on_gpu = device.startswith("cuda")
        cases = [c for c in target.cases if on_gpu or "large" not in c.tags]
        left_out: dict[str, int] = {}
        done = 0
        for case in cases:
            status.update(f"[dim]proving {target.name}: {case.name} ({done} of {len(cases)} done)[/]")
            reason = case_reason(subject.op, backend, case, dtype, device)
            if reason is not None:
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            report = check(target, case, dtype=dtype, device=device, raises=False)
            done += 1
            if not report.ok:
                first = report.findings[0].text if report.findings else report.verdict
                return False, f"{case.name}: {first}"
            if on_gpu:
                torch.cuda.empty_cache()
        for reason, number in left_out.items():
            self.say.print(f"[dim]{target.name}: {number} of {len(cases)} cases left out: {reason}[/]")
        return True, f"assay.check, {done} cases, {str(dtype).removeprefix('torch.')}"


def case_reason(op: Op, backend: str, case: Any, dtype: torch.dtype, device: str) -> str | None:
    """Why this case cannot run on the backend, or None."""
    given = case.build(dtype, device, 0)
    return op.why_not(backend, *(given.get(n) for n in op.inputs), **{o: given[o] for o in op.options})


@torch.no_grad()
def relative_error(subject: Subject, variant: Variant) -> float | None:
    """|got - golden| / |golden| of the first result against the float64 reference on the very inputs that are timed.

    None where memory is short, and for zeros.
    """
    try:
        wide = {
            name: t.double() if t is not None and t.is_floating_point() else t for name, t in subject.tensors.items()
        }
        golden = subject.reference()(wide)[0]
        got = variant.results()[0].double()
        norm = golden.norm()
        return float((got - golden).norm() / norm) if norm else None
    except torch.OutOfMemoryError:
        return None
