"""Proven rounding bounds: |computed - exact| <= e for the golden's formula, in any order of its sums."""

from .running_errors import running_bounds

__all__ = ["running_bounds"]
