"""Patch: an edit of the candidate's source with which it passes, as data and as a unified diff."""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Equal:
    """Another edit that passes everything, too."""

    line: int
    kind: str
    diff: str
    joins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """A verified edit. The user's file is never written; `save` writes a patched copy.

    file, line   where the edit is; diff: a unified diff
    kind         what the edit does, in a word or two
    cases        number of cases, with fresh draws, that the edited candidate passes
    remaining    findings of other probes, which the candidate has without the edit as well, or which are no more than
                 another formula rounds; () if all probes pass
    tried        number of edits that were run
    equals       other edits that pass as well: no input was found on which they differ from this one
    sizes        the sizes at which they were compared
    narrow       right at the declared sizes and numbers, but not at others
    joins        the kinds of the edits of which it consists, if there are several
    work         how many times the kernel's work it does at some size, if that is much more; otherwise 1
    compiled     False if no compiler has seen its Triton kernels, only Triton's interpreter
    stages       names of stages that still differ from the golden, where every result is right
    block        nothing changes but the size of a block, on which no result should depend
    """

    file: str
    line: int
    kind: str
    diff: str
    cases: int
    remaining: tuple[str, ...] = ()
    tried: int = 0
    equals: tuple[Equal, ...] = ()
    sizes: str = ""
    narrow: bool = False
    text: str = field(default="", repr=False)
    work: float = 1.0
    joins: tuple[str, ...] = ()
    compiled: bool = True
    stages: tuple[str, ...] = ()
    block: bool = False

    @property
    def doubtful(self) -> bool:
        """Whether it may stand for another edit."""
        return self.narrow or self.block or self.work > 1

    @property
    def headline(self) -> str:
        """The edit in half a sentence."""
        verb = "passes every case" if self.doubtful else "mends it"
        return f"an edit of {Path(self.file).name}, line {self.line}, {verb} ({self.kind})"

    @property
    def sentence(self) -> str:
        """What is known about the edit, in one sentence."""
        return self._passes + self._unsure

    @property
    def _unsure(self) -> str:
        parts = [] if self.compiled else ["not compiled: its Triton kernels ran in the interpreter only"]
        if self.stages:
            parts.append(f"{' and '.join(self.stages)} still differ{'s' * (len(self.stages) == 1)} from the golden")
        return "".join(f"; {part}" for part in parts)

    @property
    def _passes(self) -> str:
        number = f"{self.cases} case{'' if self.cases == 1 else 's'}"
        place = f"{Path(self.file).name}, line {self.line}"
        if self.narrow:
            return (
                f"this edit makes the kernel pass at the declared sizes and numbers ({self.sizes}): {number}, all "
                f"probes ({place}: {self.kind}); at others it is wrong, so that it may stand for another one"
            )
        if self.block:
            return (
                f"this edit makes the kernel pass: {number}, all probes ({place}: {self.kind}); but it only gives a "
                "block another size, on which no result should depend, so that it may stand for another edit"
            )
        if self.work > 1:
            return (
                f"this edit makes the kernel pass: {number}, all probes ({place}: {self.kind}); but with it the kernel "
                f"handles {self.work:g} times as many elements at some sizes, as where each block computes the whole "
                "row, so that it may stand for another edit"
            )
        if not self.remaining:
            return f"this edit makes the kernel pass: {number}, all probes ({place}: {self.kind})"
        return (
            f"this edit mends the results of {number} ({place}: {self.kind}); what remains is there without it as "
            "well, or is no more than another formula rounds"
        )

    def save(self, path: str | os.PathLike) -> Path:
        """Write the patched copy of the file; raises ValueError for the user's own file."""
        copy = Path(path)
        if copy.exists() and copy.resolve() == Path(self.file).resolve():
            raise ValueError(f"{path} is the candidate's own file, which is never written; name another one")
        copy.write_text(self.text)
        return copy

    def to_json(self) -> dict[str, object]:
        data = asdict(self)
        del data["text"]
        return {**data, **{n: list(data[n]) for n in ("remaining", "equals", "stages")}}

    @property
    def equals_sentence(self) -> str:
        """What is known about other edits that pass, or ""."""
        if not self.equals:
            return ""
        count = len(self.equals)
        others = f"{count} other edit{'' if count == 1 else 's'} pass{'es' if count == 1 else ''} as well"
        at = f" at the sizes {self.sizes}" if self.sizes else ""
        return f"{others}; no input{at} was found on which they differ, and this is the smallest one"


def unified_diff(path: str, before: str, after: str) -> str:
    shown = _shown(path)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), shown, shown, n=1, lineterm="")
    return "\n".join(lines)


def _shown(path: str) -> str:
    """The path from the current folder, where the file is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def changed_line(before: str, after: str) -> int:
    """The first line that differs, from 1."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 1)
