"""What the evidence cannot tell, in sentences, each with what would tell it."""

from __future__ import annotations

from collections.abc import Sequence

from .evidence import OBSERVED, Evidence


def undecided(evidence: Evidence, suspects: Sequence[str]) -> list[str]:
    """Ends of the evidence that a reader should know of; empty where nothing is open."""
    said = []
    table = {s.name: s for s in evidence.stages}
    first = table.get(evidence.first_wrong or "")
    if first is not None and first.state == OBSERVED:
        said.append(f"{first.name} could not be isolated ({first.text}): an earlier stage may be the one at fault. "
                    "Let the kernel go on with what assay.stage returns.")  # fmt: skip
    if suspects and first is not None:
        names = ", ".join(suspects[:4])
        said.append(f"Between the last right stage and {first.name} the kernel names nothing: {names} could be wrong, "
                    "too. Name them with assay.stage to tell.")  # fmt: skip
    exact = [w for w in evidence.whatif if w.exact]
    others = sorted({w.cause for w in exact})
    if len(others) > 1:
        said.append(f"These explain the numbers equally well in this case: {', '.join(others)}. A case of other sizes "
                    "may tell them apart.")  # fmt: skip
    for fit in evidence.fits:
        if fit.condition > 1e6:
            said.append(f"The terms of {fit.tensor} are nearly dependent (condition {fit.condition:.1g}): their "
                        "coefficients cannot be told apart.")  # fmt: skip
            break
    for name, why in evidence.left_out.items():
        said.append(f"Left out: {name} ({why}).")
    return said
