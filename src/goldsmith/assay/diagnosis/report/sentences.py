"""Sentences for a diagnosis: what further runs of the candidate show, and what the evidence leaves open."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts.evidence import NO_TIME, OBSERVED, Evidence, GradientCarriers
from ..facts.spans import say


def trace_sentences(evidence: Evidence) -> list[str]:
    """Sentences about the first NaN or Inf, then about output gradients; empty if there is nothing to report."""
    sentences = [f"{s}." for s in evidence.nonfinite_origin.sentences] if evidence.nonfinite_origin is not None else []
    return sentences + (_gradient_sentences(evidence.carriers) if evidence.carriers is not None else [])


def _gradient_sentences(carriers: GradientCarriers) -> list[str]:
    tensor, names = carriers.tensor, [f"grad_{n}" for n in carriers.outputs]
    if carriers.always:
        return [f"{tensor} is wrong with zeros for every output gradient, too: none of them carries the fault."]
    if not names and len(carriers.harmless) > 1:
        return [f"No output's gradient alone makes {tensor} wrong: it takes several at once."]
    if len(names) > 1:
        return [f"{' and '.join(names)} each make {tensor} wrong: by one fault in what they share, or one in each."]
    sentences = []
    if names and carriers.harmless:
        others = " and ".join(f"grad_{n}" for n in carriers.harmless)
        sentences.append(f"{tensor} is wrong with {names[0]} alone, and right with {others} alone.")
    where = ", ".join(f"axis {a} [{say(spans)}]" for a, spans in carriers.parts.items() if spans)
    if where:
        sentences.append(f"Slice by slice, {names[0]} makes it wrong in {where} alone.")
    axes = " or ".join(str(axis) for axis, spans in carriers.parts.items() if not spans)
    if axes:
        sentences.append(f"No slice of {names[0]} along axis {axes} alone makes {tensor} wrong: it takes several.")
    return sentences


def open_questions(evidence: Evidence, suspects: Sequence[str]) -> list[str]:
    """The open questions that a reader should know; empty if there are none."""
    sentences = []
    table = {s.name: s for s in evidence.stages}
    first = table.get(evidence.first_wrong or "")
    if first is not None and first.state == OBSERVED:
        goes_on = " Let the kernel continue with the value that assay.stage returns." if first.ignored else ""
        sentences.append(f"{first.name} could not be isolated ({first.text}): an earlier stage may be at fault."
                    + goes_on)  # fmt: skip
    if suspects and first is not None:
        names = ", ".join(suspects[:4])
        sentences.append(
            f"The kernel names no stage between the last right one and {first.name}: {names} could be wrong, "
            "too. Name them with assay.stage to find out."
        )
    exact = [w for w in evidence.whatif if w.exact]
    others = sorted({w.cause for w in exact})
    if len(others) > 1:
        sentences.append(
            f"These explain the numbers equally well in this case: {', '.join(others)}. A case of other sizes "
            "may distinguish them."
        )
    for name, why in evidence.left_out.items():
        sentences += [f"Left out: {name} ({why})."] if why != NO_TIME else []
    hurried = [name for name, why in evidence.left_out.items() if why == NO_TIME]
    sentences += [f"Left out, or ended early, for lack of time: {', '.join(hurried)}."] if hurried else []
    return sentences
