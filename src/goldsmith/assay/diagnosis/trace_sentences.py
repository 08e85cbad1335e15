"""Sentences about traces: where NaN and Inf begin, and which output gradient carries the fault."""

from __future__ import annotations

from .evidence import Carried, Evidence


def trace_sentences(evidence: Evidence) -> list[str]:
    """Sentences about the first NaN or Inf, then about output gradients; empty if there is nothing to report."""
    sentences = [f"{s}." for s in evidence.born.sentences] if evidence.born is not None else []
    return sentences + (_gradient_sentences(evidence.carried) if evidence.carried is not None else [])


def _gradient_sentences(fact: Carried) -> list[str]:
    if fact.always:
        return [f"{fact.tensor} is wrong with zeros for every output gradient, too: none of them carries the fault."]
    if len(fact.outputs) != 1:
        return []
    name = f"grad_{fact.outputs[0]}"
    sentences = []
    if fact.quiet:
        others = " and ".join(f"grad_{n}" for n in fact.quiet)
        sentences.append(f"{fact.tensor} is wrong with {name} alone, and right with {others} alone.")
    if fact.parts:
        where = ", ".join(f"axis {a} [{_ranges(spans)}]" for a, spans in fact.parts.items())
        unit = f"; a single 1 in {name} at {list(fact.unit)} shows it" if fact.unit is not None else ""
        sentences.append(f"Slice by slice, {name} makes it wrong in {where} alone{unit}.")
    return sentences


def _ranges(spans: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo}..{hi}" for lo, hi in spans)
