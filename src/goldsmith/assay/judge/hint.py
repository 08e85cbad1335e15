"""Hint: what a finding adds about a declaration that would allow the result."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..report.results import Finding


@dataclass(frozen=True)
class Hint:
    """A text to append to a finding. rounds: the rounding that it names, as "a kernel that rounds h to bfloat16"."""

    text: str = ""
    rounds: str = ""

    def added(self, finding: Finding) -> Finding:
        """The finding with the hint."""
        values = finding.values | {"rounds": self.rounds} if self.rounds else finding.values
        return replace(finding, text=finding.text + self.text, values=values)
