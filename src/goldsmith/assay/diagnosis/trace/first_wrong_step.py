"""first_wrong_step: the step whose operands are right and whose result is not, on the way to the wrong results.

A step is right if the golden has its numbers, or if a later step computed the golden's numbers from them. What is left
of the steps behind a wrong result is the region in which the fault lies; its first steps are the candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from .lookup import NumberMatch
from .recorder import TracedStep


@dataclass
class ComparedRun:
    """steps, their matches (None: not known), elements that are evidence, and the steps of each result."""

    steps: Sequence[TracedStep]
    matches: Sequence[NumberMatch | None]
    told: Sequence[int]
    results: Mapping[str, Collection[int]]
    wrong: Collection[str]


@dataclass(frozen=True)
class WrongStep:
    """tensors: the wrong results that depend on it; moved: it has the golden's numbers, but in other places.

    border, instead: a step and another result of it with which a run was right, so that the fault is there or before.
    """

    step: int
    tensors: tuple[str, ...]
    moved: bool = False
    border: int = -1
    instead: str = ""


def first_wrong_step(trace: ComparedRun, within: Collection[int] | None = None) -> WrongStep | None:
    """within: the steps at or before which the fault lies, where a run has shown that; None: not known."""
    steps = trace.steps
    right, ends = right_steps(trace)
    behind = {name: ancestors(steps, trace.results[name]) for name in trace.wrong if trace.results.get(name)}
    if not behind:
        return None
    regions = {name: {s for s in before if not right[s]} for name, before in behind.items()}
    common = set.intersection(*regions.values())
    groups = [common, *sorted(regions.values(), key=len)]
    if within is not None:
        groups = [{s for s in within if not right[s]}]
    for region in groups:
        step = _first(trace, right, region, ends)
        if step is not None:
            tensors = tuple(n for n, r in regions.items() if step in r)
            return WrongStep(step, tensors, step in ends and steps[step].moves)
    return None


def _first(trace: ComparedRun, right: Sequence[bool], region: Collection[int], ends: Collection[int]) -> int | None:
    """The first step of the region that a line made, that computes, and whose operands are all outside of it."""
    steps = trace.steps
    blamable = [
        s for s in sorted(region)
        if steps[s].at is not None and trace.told[s] and not steps[s].factory and (not steps[s].moves or s in ends)
    ]  # fmt: skip
    own = [s for s in blamable if not steps[s].backward] or blamable
    for s in own:
        if all(right[p] or p == s or not trace.told[p] or steps[p].factory for p in steps[s].parents):
            return s
    return next(iter(own), None)


def right_steps(trace: ComparedRun) -> tuple[list[bool], set[int]]:
    """(whether each step is right, the ends: steps whose numbers are those of a wrong result)

    A step is right by its own numbers or by those of a step that was computed from it. An end is wrong, even where the
    golden has its numbers: they are in other places, or another tensor's.
    """
    steps = trace.steps
    known = {s for s, match in enumerate(trace.matches) if match is not None}
    ends = {s for name in trace.wrong for s in _ends(trace, name)}
    for name, made in trace.results.items():
        if name not in trace.wrong:
            known.update(made)
    right = [s in known for s in range(len(steps))]
    pending = sorted(known)
    while pending:
        for p in steps[pending.pop()].parents:
            if not right[p]:
                right[p] = True
                pending.append(p)
    for s, step in enumerate(steps):  # numbers that are moved stay right
        if step.moves and all(right[p] or p == s or not trace.told[p] for p in step.parents):
            right[s] = True
    for s in ends:
        right[s] = False
    return right, ends


def _ends(trace: ComparedRun, name: str) -> set[int]:
    """The steps from a wrong result back to the one that computed it, or that moved its numbers to other places."""
    ends, pending = set[int](), list(trace.results.get(name, ()))
    while pending:
        s = pending.pop()
        step, match = trace.steps[s], trace.matches[s]
        if s in ends or step.factory:
            continue
        ends.add(s)
        misplaced = step.at is not None and step.moves and match is not None and match.name == name
        if step.moves and not misplaced:
            pending += step.parents
    return ends


def ancestors(steps: Sequence[TracedStep], of: Collection[int]) -> set[int]:
    """The steps that these depend on, and themselves."""
    seen, pending = set(of), list(of)
    while pending:
        step = steps[pending.pop()]
        for p in step.parents | step.loose:
            if p not in seen:
                seen.add(p)
                pending.append(p)
    return seen


def region_of(trace: ComparedRun, border: int = -1) -> list[int]:
    """The steps behind the wrong results that are not right, and what says where and whether these read and write.

    border: a step at or before which the fault lies; -1: not known.
    """
    steps, right = trace.steps, right_steps(trace)[0]
    ends = {border} if border >= 0 else {s for name in trace.wrong for s in trace.results.get(name, ())}
    region = {s for s in ancestors(steps, ends) if not right[s]}
    return sorted(region | reads_of(steps, region))


def reads_of(steps: Sequence[TracedStep], of: Collection[int]) -> set[int]:
    """The steps that move numbers to these, and the indices and masks by which they and these read and write.

    A kernel that reads a wrong place has the golden's numbers: the load is right, and the fault is in its address.
    """
    moves, pending = set[int](), [p for s in of for p in steps[s].parents if steps[p].moves]
    while pending:
        p = pending.pop()
        if p not in moves:
            moves.add(p)
            pending += [q for q in steps[p].parents if steps[q].moves and steps[q].at is not None]
    found, pending = set(moves), [p for s in (*of, *moves) for p in steps[s].loose]
    while pending:
        p = pending.pop()
        if p not in found:
            found.add(p)
            pending += () if steps[p].parts else steps[p].parents | steps[p].loose
    return found


def suspects(trace: ComparedRun) -> list[int]:
    """The steps that may be the wrong one, in their order: of the region, and what says where and whether."""
    steps = trace.steps
    right, ends = right_steps(trace)
    behind = [ancestors(steps, trace.results[n]) for n in trace.wrong if trace.results.get(n)]
    if not behind:
        return []
    common = set.intersection(*behind)
    if not any(not right[s] and steps[s].at is not None for s in common):
        common = set.union(*behind)
    region = {s for s in common if not right[s]}
    before = {p for s in region for p in steps[s].parents | steps[s].loose}
    chosen = [
        s for s in sorted(common)
        if steps[s].at is not None and not steps[s].backward and steps[s].numbers
        and not steps[s].factory and (s in region or not trace.told[s] or s in before and steps[s].moves)
    ]  # fmt: skip
    return chosen
