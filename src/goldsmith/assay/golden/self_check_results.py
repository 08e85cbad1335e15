"""SelfCheck: the problems and notes of a golden's self-check, and the types of the functions that it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

Forward = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # inputs -> outputs, or gradients for fixed cotangents
Gradient = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]  # inputs, cotangents -> gradients


@dataclass
class SelfCheck:
    """The result of a golden's check of itself.

    problems: sentences, each a reason for the verdict reference_fault; notes: kinks, and gradients not confirmed.
    mismatches: output -> a sentence, where the candidate's has another shape. The golden says what is right.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatches: dict[str, str] = field(default_factory=dict)
