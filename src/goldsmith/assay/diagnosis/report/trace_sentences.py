"""Sentences for a diagnosis: where NaN or Inf begins, and which output gradient makes a tensor wrong."""

from __future__ import annotations

from ..facts.evidence import Evidence, GradientCarriers
from ..facts.spans import say


def trace_sentences(evidence: Evidence) -> list[str]:
    """Sentences about the first NaN or Inf, then about output gradients; empty if there is nothing to report."""
    sentences = [f"{s}." for s in evidence.nonfinite_origin.sentences] if evidence.nonfinite_origin is not None else []
    return sentences + (_gradient_sentences(evidence.carriers) if evidence.carriers is not None else [])


def _gradient_sentences(carriers: GradientCarriers) -> list[str]:
    if carriers.always:
        return [
            f"{carriers.tensor} is wrong with zeros for every output gradient, too: none of them carries the fault."
        ]
    if len(carriers.outputs) != 1:
        return []
    name = f"grad_{carriers.outputs[0]}"
    sentences = []
    if carriers.harmless:
        others = " and ".join(f"grad_{n}" for n in carriers.harmless)
        sentences.append(f"{carriers.tensor} is wrong with {name} alone, and right with {others} alone.")
    if carriers.parts:
        where = ", ".join(f"axis {a} [{say(spans)}]" for a, spans in carriers.parts.items())
        unit = f"; a single 1 in {name} at {list(carriers.unit)} shows it" if carriers.unit is not None else ""
        sentences.append(f"Slice by slice, {name} makes it wrong in {where} alone{unit}.")
    return sentences
