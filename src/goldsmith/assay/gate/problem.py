"""Problem: what candidates are to compute. A Target without a candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

import torch

from ..declare.decisions import Decision
from ..declare.target import Target
from ..golden.golden_cache import GoldenCache


@dataclass(frozen=True, eq=False)
class Problem:
    """A golden and cases; arguments as those of a Target. Candidates may use any stable formula.

    backward    "auto", None (forward only), or "present": judge it where a candidate has one for every input
    construct   how a candidate's callable is found and called: `candidate_call.CandidateCall` as data
    files       files that describe the problem, which candidates may not read
    wants_kernel  candidates whose results come from plain torch alone are cheating (plain_torch)
    """

    golden: Callable
    cases: object
    _: KW_ONLY
    name: str = ""
    outputs: tuple[str, ...] | None = None
    saved: tuple[str, ...] = ()
    backward: str | None = "auto"
    golden_backward: Callable | None = None
    grads: tuple[str, ...] | None = None
    surrogate: tuple[str, ...] = ()
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    stored: Mapping[str, str] = field(default_factory=dict)
    segments: Mapping[str, object] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    compute: torch.dtype | str | None = None
    dot: str = "ieee"
    formula: str = "any"
    layouts: str = "any"
    mutates: tuple[str, ...] = ()
    holds_nan: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    construct: Mapping[str, object] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    wants_kernel: bool = False
    declared: Target = field(init=False, repr=False)
    known: GoldenCache = field(init=False, repr=False, default_factory=GoldenCache)

    def __post_init__(self) -> None:
        if self.backward not in (None, "auto", "present"):
            raise TypeError(f"backward: expected 'auto', 'present' or None, got {self.backward!r}")
        if not isinstance(self.wants_kernel, bool):
            raise TypeError(f"wants_kernel: expected True or False, got {self.wants_kernel!r}")
        name = self.name or getattr(self.golden, "__name__", "problem")
        object.__setattr__(self, "name", name)
        # the golden stands in for the candidate: so a mistake in the declaration shows before any candidate
        object.__setattr__(self, "declared", Target(self.golden, self.golden, **self._arguments()))
        object.__setattr__(self, "cases", self.declared.cases)

    def _arguments(self) -> dict[str, Any]:
        known = {f.name for f in fields(Target) if f.init} - {"candidate", "golden"}
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.name in known}
        return {**arguments, "backward": None if self.backward is None else "auto"}

    @staticmethod
    def of(target: Target, **more: object) -> Problem:
        """The problem of a target, without its candidate and its candidate's formula."""
        known = {f.name for f in fields(Problem) if f.init} & {f.name for f in fields(Target) if f.init}
        arguments = {name: getattr(target, name) for name in known}
        if callable(arguments["backward"]):
            arguments["backward"] = "auto"
        return Problem(**{**arguments, "formula": "any", **more})

    def target(self, candidate: Callable, runner: Callable[[Any, Any], object] | None = None) -> Target:
        """The target with a candidate: a callable of this process, or a stand-in whose calls a runner makes."""
        return replace(self.declared, candidate=candidate, name=self.name, runner=runner)
