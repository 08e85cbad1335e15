"""What was followed, in sentences: where NaN and Inf begin, and which output gradient carries the fault."""

from __future__ import annotations

from .evidence import Carried, Evidence


def traced(evidence: Evidence) -> list[str]:
    """Of the first NaN or Inf, then of output gradients; empty where neither has anything to tell."""
    said = [f"{s}." for s in evidence.born.sentences] if evidence.born is not None else []
    return said + (_sent(evidence.carried) if evidence.carried is not None else [])


def _sent(found: Carried) -> list[str]:
    if found.always:
        return [f"{found.tensor} is wrong with zeros for every output gradient, too: none of them carries the fault."]
    if len(found.outputs) != 1:
        return []
    name = f"grad_{found.outputs[0]}"
    said = []
    if found.quiet:
        others = " and ".join(f"grad_{n}" for n in found.quiet)
        said.append(f"{found.tensor} is wrong with {name} alone, and right with {others} alone.")
    if found.parts:
        where = ", ".join(f"axis {a} [{_ranges(spans)}]" for a, spans in found.parts.items())
        unit = f"; a single 1 in {name} at {list(found.unit)} shows it" if found.unit is not None else ""
        said.append(f"Slice by slice, {name} makes it wrong in {where} alone{unit}.")
    return said


def _ranges(spans: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo}..{hi}" for lo, hi in spans)
