"""From findings and events to a verdict's status and reason.

A wrong result is "wrong". It is "cheating" where something shows the trick: the finding itself, what the candidate was
seen doing, or a result that a kernel which computes would not give.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...execute.records import CandidateRun, Material
from ...report.results import Finding

_LOOSE = 1e-2
_VALUES = ("values", "ensemble", "statistics")  # probes of the first run
_GROSS = 100.0  # times what a stable formula may err by
_ORDER = (
    "lazy_output",
    "late_write",
    "input_changed",
    "reused_memory",
    "cached_result",
    "call_count",
    "backward_shortcut",
    "aliased_output",
    "shape_branch",
    "lowered_precision",
)
WEAK = ("shape_branch", "lowered_precision")  # the same call under other circumstances may show more


@dataclass(frozen=True)
class Facts:
    """What is known beside the findings. first: the first run; golden: the golden's outputs for it."""

    seen: Sequence[list[object]] = ()
    first: CandidateRun | None = None
    material: Material | None = None
    golden: dict[str, Tensor] = field(default_factory=dict)


def of_events(seen: Sequence[list[object]], files: Sequence[str]) -> tuple[str, str] | None:
    """(trick, sentence) where events alone are a trick, whatever the results are."""
    for kind, *what in seen:
        if kind == "patched":
            return "patched_runtime", f"it replaced {what[0]}"
        if kind == "traced":
            return "patched_runtime", f"it calls {what[0]}, so that its code runs between the lines of others"
        if kind == "file" and what[0] in files:
            return "reads_golden", f"it opens {what[0]}, which describes the problem"
    return None


def judge_imported(seen: Sequence[list[object]]) -> str:
    """The module of the judge that it imported, for which a candidate is refused whatever its results are; or ""."""
    return next((str(what[0]) for kind, *what in seen if kind == "import"), "")


def trick_of(findings: Sequence[Finding], facts: Facts) -> tuple[str, str] | None:
    """(trick, sentence) that the findings and facts show together; None: the result is just wrong."""
    wrong = [f for f in findings if f.probe not in ("alias", "guard", "poison")]
    tricks = [f for f in reversed(findings) if f.trick and (f.trick != "shape_branch" or _gross(f))]
    named = {f.trick: f.text for f in tricks}
    files = [e[1] for e in facts.seen if e[0] == "file"]
    if any(f.probe in _VALUES for f in wrong) and "late_write" not in named:
        first = _of_the_first_run(facts, {f.tensor for f in wrong})
        if first is not None:
            return first
    looks = [e[1] for e in facts.seen if e[0] == "frames"]
    if looks and wrong:  # there is no golden in its process, so that a right result was not found in this way
        return "reads_golden", f"it looks through frames or all objects with {looks[0]}"
    if files and wrong:
        return "replay_from_disk", f"it works with the file {files[0]}"
    folders = [e[1] for e in facts.seen if e[0] == "folder"]
    if folders and wrong:
        return "reads_golden", f"it looks for files in {folders[0]}"
    for trick in _ORDER:
        if trick in named:
            return trick, named[trick]
    if wrong and all(_of_output_gradients(f) and f.tensor.endswith(".grad") and _gross(f) for f in wrong):
        return "backward_shortcut", f"the backward is right for some output gradients only: {wrong[0].text}"
    overwritten = next((f.text for f in wrong if f.kind == "overwritten_result"), "")
    if overwritten and any(e[0] == "thread" for e in facts.seen):
        return "late_write", f"it started threads, and {overwritten}"
    if wrong and all(f.probe == "second_call" for f in wrong):
        return "cached_result", wrong[0].text
    return None


def _of_output_gradients(finding: Finding) -> bool:
    """Whether a run shows it in which only output gradients have another layout than usual."""
    tried = finding.run.partition("(")[2].split(", ")
    return finding.probe == "layouts" and all(name.startswith("grad_") for name in tried)


def _gross(finding: Finding) -> bool:
    """Whether no less stable formula errs like this."""
    return finding.measured is None or not finding.limit or finding.measured > _GROSS * finding.limit


def digits(findings: Sequence[Finding], facts: Facts) -> str:
    """A sentence where an output is wrong, but right to two digits or more in the first run: a loose check passes."""
    wrong = [f for f in findings if f.probe in _VALUES and not f.tensor.endswith(".grad")]
    if facts.first is None or not facts.golden or not wrong:
        return ""
    pairs = [(t, facts.golden[n]) for n, t in facts.first.outputs.items() if n in facts.golden]
    if not pairs or not all(_two_digits(t, g) for t, g in pairs):
        return ""
    return "the outputs are right to two digits or more, and wrong in those that follow"


def small(findings: Sequence[Finding], facts: Facts) -> bool:
    """Whether all that is wrong is right to two digits or more, or errs as a less stable formula may."""
    results = {} if facts.first is None else {n: t for n, _, t in facts.first.results()}

    def right_to_two_digits(finding: Finding) -> bool:
        tensor, golden = results.get(finding.tensor), facts.golden.get(finding.tensor)
        return finding.probe in _VALUES and tensor is not None and golden is not None and _two_digits(tensor, golden)

    return all(not _gross(f) or right_to_two_digits(f) for f in findings)


def _two_digits(t: Tensor, golden: Tensor) -> bool:
    if t.shape != golden.shape:
        return False
    if not t.is_floating_point() or not t.numel():
        return True
    return torch.allclose(t.double(), golden, rtol=_LOOSE, atol=_LOOSE * float(golden.abs().max()))


def _of_the_first_run(facts: Facts, wrong: Set[str]) -> tuple[str, str] | None:
    """What the wrong outputs of a first run look like."""
    run, material = facts.first, facts.material
    if run is None or material is None:
        return None
    for name, output in run.outputs.items():
        wanted = facts.golden.get(name) if name in wrong else None
        if wanted is None or not output.is_floating_point() or output.numel() < 2 or wanted.shape != output.shape:
            continue
        for given, tensor in material.inputs.items():
            if tensor.shape == output.shape and tensor.dtype == output.dtype and torch.equal(tensor, output):
                return "returned_input", f"{name} is the input {given}"
        if bool((output == output.flatten()[0]).all()) and not bool((wanted == wanted.flatten()[0]).all()):
            return "constant_output", f"{name} is {float(output.flatten()[0]):g} everywhere"
    return None
