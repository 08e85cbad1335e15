"""Hints for a failing result: the declaration that would make it right, if the rounding is intended.

By default a kernel promises sums and intermediates in float32. One that keeps its probabilities in bfloat16 breaks that
promise. Only its author knows whether on purpose, so the finding stays and names the declaration that would allow it.
Another hint follows an error as large as another formula's rounding: a golden by that formula would allow it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..bounds.bounded import unit_roundoff
from ..execute.records import CandidateRun
from ..golden.golden_results import GoldenResults
from ..judge import ladder
from ..judge.examination import Examination
from ..judge.hint import Hint
from ..noise import formula_rounding
from ..report.results import Finding
from ..support import deadline

NARROW = (torch.bfloat16, torch.float16)
OUT_OF_RANGE = "; where such inputs never come, exclude them by where= of the case, or choose the probes quick"
LEFT_OUT = "the declarations that would allow rounding to 16 bits"
SINGLE = 8  # stages of the golden that are tried one by one


def hint(
    examination: Examination,
    run: CandidateRun,
    reference: GoldenResults,
    name: str,
    kind: str,
    tensor: Tensor | None,
    *,
    scaled: bool,
) -> Hint:
    """What to append to a finding on `name`; empty if no declaration of 16 bits makes the run right.

    scaled: the inputs have another magnitude, at which the golden itself may overflow in 16 bits.
    """
    phrase = examination.hints.get(name, Hint())
    if not phrase.text and tensor is not None:
        text = _formula_hint(reference, name, tensor)  # the narrower hint of the two
        phrase = Hint(text, another_formula=bool(text))
        if not phrase.text:
            phrase = _declaration_hint(examination, run, reference, name, kind, tensor, scaled)
        examination.hints[name] = phrase
    if not phrase.text and scaled and tensor is not None and not bool(torch.isfinite(tensor).all()):
        return Hint(OUT_OF_RANGE)
    return phrase


def all_added(
    examination: Examination, run: CandidateRun, reference: GoldenResults, findings: Sequence[Finding], *, scaled: bool
) -> list[Finding]:
    """Findings on results of one run, with their hints."""
    results = {n: (k, t) for n, k, t in run.results()}
    rows = [(f, *results.get(f.tensor, ("output", None))) for f in findings]
    return [hint(examination, run, reference, f.tensor, k, t, scaled=scaled).added(f) for f, k, t in rows]


def _formula_hint(reference: GoldenResults, name: str, tensor: Tensor) -> str:
    """The hint for an error no larger than another formula's rounding; otherwise empty."""
    bounded = reference.bounded.get(name)
    if bounded is None or tensor.shape != bounded.value.shape or not tensor.is_floating_point():
        return ""
    error = (tensor.double() - bounded.value).abs()
    least = formula_rounding.terms(name, reference.bounded, reference.leaves).usual
    return formula_rounding.hint(bounded, error, reference.compute, reference.leaves.values(), least)


def _declaration_hint(
    examination: Examination,
    run: CandidateRun,
    reference: GoldenResults,
    name: str,
    kind: str,
    tensor: Tensor,
    scaled: bool,
) -> Hint:
    inputs = {n: t.dtype for n, t in reference.material.inputs.items() if t.dtype in NARROW}
    if not inputs or unit_roundoff(reference.compute) >= unit_roundoff(next(iter(inputs.values()))):
        return Hint()
    input, dtype = next(iter(inputs.items()))
    spelt = str(dtype).removeprefix("torch.")

    durations = [0.0]  # seconds of each attempt

    def right(compute: torch.dtype | None, stages: tuple[str, ...] = ()) -> bool:
        if deadline.lacks(max(durations), LEFT_OUT):
            return False
        began = time.perf_counter()
        allowed = allows(compute, stages)
        durations.append(time.perf_counter() - began)
        return allowed

    def allows(compute: torch.dtype | None, stages: tuple[str, ...]) -> bool:
        against = _declared(examination, run, reference, compute, stages, dtype).reference(name, kind)
        if against is None or not ladder.judge(name, tensor, against).ok:
            return False
        return against.noise.usable and not ladder.stands_out(name, tensor, against)

    stages = _stages(examination, reference)
    if stages and right(None, stages):
        alone = [s for s in stages[-SINGLE:] if right(None, (s,))] if len(stages) > 1 else []
        needed = tuple(alone[-1:]) or stages
        stores = ", ".join(f"{s!r}: {input!r}" for s in needed)
        rounded = (
            f"stage {' or '.join(alone or stages)}" if alone or len(stages) == 1 else f"stages {', '.join(stages)}"
        )
        rounds = f"a kernel that rounds {rounded} to {spelt}"
        return Hint(f"; right for {rounds}: if it is meant to, declare stored={{{stores}}}", rounds)
    if right(dtype) or (scaled and _overflows(_declared(examination, run, reference, dtype, (), dtype), name)):
        rounds = f"a kernel that rounds its intermediates to {spelt}"
        return Hint(f"; right for {rounds}: if it is meant to, declare compute=torch.{spelt}", rounds)
    return Hint()


def _overflows(reference: GoldenResults, name: str) -> bool:
    """Whether the unmodified golden, run in that compute precision, fails as well."""
    against, value = reference.reference(name, "output", noise=False), reference.unmodified(False).get(name)
    return against is None or value is None or not ladder.judge(name, value.to(against.store), against).ok


def _declared(
    examination: Examination, run: CandidateRun, reference: GoldenResults, compute: torch.dtype | None,
    stages: tuple[str, ...], dtype: torch.dtype,
) -> GoldenResults:  # fmt: skip
    """The golden's results under another declaration; cached for all tensors of the run."""
    examination.declared = [d for d in examination.declared if d[0] is run]
    for _, how, results in examination.declared:
        if how == (compute, stages):
            return results
    results = GoldenResults(
        reference.material, run, reference.decisions, reference.seed, compute, dict.fromkeys(stages, dtype)
    )
    examination.declared.append((run, (compute, stages), results))
    return results


def _stages(examination: Examination, reference: GoldenResults) -> tuple[str, ...]:
    """The golden's own floating stages of the forward that are not declared as stored in 16 bits."""
    values, stored = reference.values, reference.stores
    return tuple(
        n
        for n in reference.order
        if n in values
        and not n.endswith(".grad")
        and "#" not in n
        and n not in reference.outputs
        and n not in examination.target.decisions
        and values[n].is_floating_point()
        and stored.get(n) not in NARROW
    )
