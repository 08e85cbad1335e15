"""Sentences about what the evidence leaves open, each with an experiment that would decide it."""

from __future__ import annotations

from collections.abc import Sequence

from ..facts.evidence import NO_TIME, OBSERVED, Evidence, GradientCarriers


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
    sentences += _gradient_sentences(evidence.carriers)
    for name, why in evidence.left_out.items():
        sentences += [f"Left out: {name} ({why})."] if why != NO_TIME else []
    hurried = [name for name, why in evidence.left_out.items() if why == NO_TIME]
    sentences += [f"Left out, or ended early, for lack of time: {', '.join(hurried)}."] if hurried else []
    return sentences


def _gradient_sentences(carriers: GradientCarriers | None) -> list[str]:
    if carriers is None or carriers.always:
        return []
    text = ""
    if len(carriers.outputs) > 1:
        text = (
            f"The gradients of {' and '.join(carriers.outputs)} each make {carriers.tensor} wrong. It is open whether "
            "that is one fault in what they share or one fault in each. Name backward stages with assay.stage to find "
            "out."
        )
    elif not carriers.outputs and len(carriers.harmless) > 1:
        text = (
            f"No output's gradient alone makes {carriers.tensor} wrong: it takes several at once. It is open where "
            "they meet."
        )
    elif carriers.together:
        axes = " or ".join(str(a) for a in carriers.together)
        text = (
            f"No slice of grad_{carriers.outputs[0]} along axis {axes} alone makes {carriers.tensor} wrong: it "
            "takes several at once, as in a sum of them. It is open which ones."
        )
    return [text] if text else []
