"""Problems: a failing case as the child processes get it, arguments with the golden's values and bounds."""

from __future__ import annotations

from ...execute.records import CandidateRun, Material, RunSettings
from ...gate.isolation.wire import request_of
from ...golden.golden_results import GoldenResults


def problem(material: Material, run: CandidateRun, golden: GoldenResults) -> dict[str, object] | None:
    """One case as a mutant gets it: arguments, and the golden's values with their bounds; None without any."""
    values = {}
    for name, kind, _ in run.results():
        if name.removeprefix("saved.") in material.target.decisions:
            continue
        against = golden.reference(name, kind, noise=False)
        if against is not None:
            values[name] = (against.bounded.value.cpu(), against.bounded.bound.cpu())
    settings = RunSettings(cotangents=dict(run.cotangents))
    return {"run": request_of(material, settings), "golden": values} if values else None


def stand_in_run(material: Material) -> CandidateRun:
    """A run that returns the golden's values, for a candidate that raised and so returned nothing."""
    golden, target = GoldenResults(material, CandidateRun()), material.target
    values = golden.evaluate(golden.leaves, gradients=False)
    dtype = next((t.dtype for t in material.inputs.values() if t.is_floating_point()), None)
    outputs = {n: values[n] for n in golden.outputs}
    outputs = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in outputs.items()}
    run = CandidateRun(names=tuple(n.removeprefix("saved.") for n in outputs), outputs=outputs)
    wanted = target.wanted_grads(material.inputs) if target.backward is not None else ()
    if wanted:
        sent = {n: t for n, t in outputs.items() if not n.startswith("saved.")}
        run.cotangents = {n: material.cotangent(n, t) for n, t in sent.items() if t.is_floating_point()}
        run.grads = {f"{n}.grad": material.inputs[n].detach() for n in wanted}
    return run
