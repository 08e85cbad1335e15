"""Hint: what a finding adds about a declaration that would allow the result."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..report.results import Finding


@dataclass(frozen=True)
class Hint:
    """A text to append to a finding.

    rounds: the rounding that it names, as "a kernel that rounds h to bfloat16"; another_formula: whether the error is
    as small as another formula's rounding.
    """

    text: str = ""
    rounds: str = ""
    another_formula: bool = False

    def added(self, finding: Finding) -> Finding:
        """The finding with the hint."""
        more = {"rounds": self.rounds, "another_formula": self.another_formula}
        values = finding.values | {name: value for name, value in more.items() if value}
        return replace(finding, text=finding.text + self.text, values=values)
