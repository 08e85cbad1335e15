"""Survivors: edits that are right on the failing cases, judged on everything else, and told apart where they differ."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...judge.examination import Examination
from .acceptance import Acceptance, Accepted, NotAccepted
from .children.mutants import Mutants
from .compilation import compiles
from .edits.edits import Edit
from .patch import Equal, Patch, changed_line, unified_diff
from .problems import Further, further_problems
from .proposals import KIND
from .reading.candidate_source import CandidateSource
from .refusals import only_another_block, refusal

_LEAST = 20.0  # seconds for all cases and probes, at least
_MORE_WORK = 1.5  # times the work of the kernel as it is: a block may compute the whole row
_MOST = 3  # survivors to report
_LAYOUTS = frozenset(("layouts",))
_NUMBER = re.compile(r"\d\.\d|\de-?\d")


@dataclass(frozen=True)
class Survivor:
    """An edit with the texts that it makes. narrow: it is wrong at sizes or numbers other than the declared ones.

    work: how many times the kernel's work it does at one of the other sizes, at most; block: it only changes a block's
    size
    compiled: whether Triton's compiler takes it; stages: names of those that differ from the golden
    """

    edit: Edit
    texts: Mapping[str, str]
    cases: int
    remaining: tuple[str, ...] = ()
    narrow: bool = False
    work: float = 1.0
    compiled: bool = True
    stages: tuple[str, ...] = ()
    block: bool = False

    @property
    def doubtful(self) -> bool:
        """Whether it may stand for another edit: then the search goes on."""
        return self.narrow or self.block or self.work > _MORE_WORK

    @property
    def rank(self) -> tuple[float, ...]:
        unsure = self.narrow, self.doubtful, bool(self.remaining), not self.compiled, len(self.stages)
        more = max(1.0, round(self.work, 2))  # than the kernel does: a part may pass as well as the one element
        return *unsure, self.edit.kind != KIND, self.switches, more, self.edit.size, self.edit.cost

    @property
    def switches(self) -> bool:
        """Whether it changes a condition, which may keep the wrong branch from being taken."""
        line = self.texts.get(self.edit.path, "").splitlines()[self.edit.line - 1 : self.edit.line]
        return any(text.lstrip().startswith(("if ", "elif ", "while ")) for text in line)


@dataclass
class Survivors:
    """What was accepted, would be but for other layouts, or was rejected."""

    acceptance: Acceptance
    source: CandidateSource
    mutants: Mutants
    examination: Examination
    progress: Callable[[str], None]
    accepted: list[Survivor] = field(default_factory=list)
    with_layouts: list[Survivor] = field(default_factory=list)
    rejected: list[Edit] = field(default_factory=list)
    found_at: float | None = None
    _further: list[Further] | None = None

    @property
    def best(self) -> Survivor | None:
        whole = [s for s in self.accepted if not s.doubtful]
        return min(whole, key=lambda s: s.rank, default=None)

    @property
    def full(self) -> bool:
        return len(self.accepted) - sum(s.doubtful for s in self.accepted) >= _MOST

    def judge(self, edit: Edit, left: float, stages: tuple[str, ...] = ()) -> None:
        """Take the edit if it passes everything, or remember it if only other layouts are wrong with it."""
        texts = self.mutants.texts(edit)
        if refusal(self.source, texts) or not self.source.prepare(texts):
            self.rejected.append(edit)
            return
        beside = self._wrong_beside(texts)
        work = 1.0 if beside is None else self.mutants.more_work(texts)
        narrow, block = bool(beside), only_another_block(self.source, texts)
        doubtful = narrow or block or work > _MORE_WORK
        of_case = beside is not None and "numbers" in beside and self._brings_a_number(edit)
        if beside is None or of_case or doubtful and any(s.doubtful for s in self.accepted):
            self.rejected.append(edit)
            return
        self.progress("patch: all cases with an edit that mends this one")
        compiled = compiles(self.source, self.mutants, texts)
        answer = NotAccepted() if compiled is False else self.acceptance.of(texts, max(_LEAST, left))
        if isinstance(answer, Accepted):
            unsure = narrow, work, bool(compiled), stages, block
            self.accepted.append(Survivor(edit, texts, answer.cases, answer.remaining, *unsure))
            # a block of a fixed size may hold the declared sizes only: then the search for a better edit is short
            short = not doubtful or beside == {"above"} and work <= _MORE_WORK
            if short and not stages and self.found_at is None:
                self.found_at = time.monotonic()
            return
        if isinstance(answer, NotAccepted) and answer.probes and answer.probes <= _LAYOUTS and not doubtful:
            self.with_layouts.append(Survivor(edit, texts, answer.cases, answer.remaining))
            self.with_layouts.sort(key=lambda s: s.rank)
            self.found_at = self.found_at or time.monotonic()
        self.rejected.append(edit)

    def _brings_a_number(self, edit: Edit) -> bool:
        """Whether it writes a number that is not whole, as one of the case is."""
        return any(_NUMBER.search(text) for _, _, text in edit.spans)

    def _wrong_beside(self, texts: Mapping[str, str]) -> set[str] | None:
        """On which sides of the declared sizes and numbers the edit is wrong; None if it is wrong within them."""
        known = self._problems()
        outcomes = self.mutants.confirmed(texts) if known else []
        if outcomes is None:  # the process ended, perhaps through an edit before
            outcomes = self.mutants.confirmed(texts)
        if outcomes is None or len(outcomes) != len(known):
            return None
        beside = {f.beside for f, o in zip(known, outcomes, strict=True) if o.state != "right"}
        return None if "" in beside else beside

    def _problems(self) -> list[Further]:
        """Further problems that the files as they are do not end with."""
        if self._further is None:
            self._further = []
            for further in further_problems(self.examination):
                outcome = self.mutants.further(further.problem)
                if outcome is not None and outcome.state in ("right", "wrong"):
                    self._further.append(further)
        return self._further

    def take_what_remains(self) -> None:
        """Without a better one: an edit that leaves other layouts wrong, if they are wrong without it as well."""
        if self.with_layouts and self.mutants.depends_on_layouts():
            self.accepted.append(self.with_layouts[0])

    def none(self) -> Survivors:
        """None yet, for a search of its own, whose time begins anew."""
        return replace(self, accepted=[], with_layouts=[], rejected=[], found_at=None)

    def adopt(self, inner: Survivors) -> None:
        """The survivors of another search, or those among the patches that a program proposed."""
        self.accepted += inner.accepted
        self.found_at = self.found_at or inner.found_at

    def patch(self, tried: int) -> Patch | None:
        """The smallest survivor; the others are its equals, since no input was found on which they differ."""
        ordered = sorted(self.accepted, key=lambda s: s.rank)
        if not ordered:
            return None
        best = ordered[0]
        ((path, text),) = best.texts.items()
        before = self.source.files[path].data.decode(errors="replace")
        equals = [self._equal(s) for s in ordered[1:] if s.doubtful == best.doubtful]
        return Patch(
            path, changed_line(before, text), best.edit.kinds, unified_diff(path, before, text), best.cases,
            best.remaining, tried, tuple(equals), self._tried_sizes() if equals or best.narrow else "", best.narrow,
            text, round(best.work, 1) if best.work > _MORE_WORK else 1.0, best.edit.joins, best.compiled, best.stages,
            best.block,
        )  # fmt: skip

    def _equal(self, survivor: Survivor) -> Equal:
        ((path, text),) = survivor.texts.items()
        before = self.source.files[path].data.decode(errors="replace")
        return Equal(
            changed_line(before, text), survivor.edit.kinds, unified_diff(path, before, text), survivor.edit.joins
        )

    def _tried_sizes(self) -> str:
        """The sizes at which survivors were compared: "D 4 to 5, T 1 to 3"."""
        cases = [dict(c.sizes) for c in self.acceptance.target.cases]
        cases += [dict(f.sizes) for f in self._further or () if not f.beside]
        found: dict[str, list[int]] = {}
        for sizes in cases:
            for name, value in sizes.items():
                if isinstance(value, int) and not isinstance(value, bool):
                    found.setdefault(name, []).append(value)
        spans = {n: (min(v), max(v)) for n, v in found.items()}
        return ", ".join(f"{n} {a}" if a == b else f"{n} {a} to {b}" for n, (a, b) in spans.items())
