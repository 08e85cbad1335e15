"""Explains a wrong tensor by changing the golden one operator at a time until it makes the candidate's numbers.

The golden runs in float64 under a mode that sees every operator of its forward and backward. One operator at a time is
changed the way kernels get it wrong: a term dropped, a factor forgotten, a reduction cut short, an operand transposed,
an index shifted. Then the first wrong tensor is compared. A change that reproduces the candidate's numbers within
rounding is the mistake, or cannot be distinguished from it.
"""

from .engine import Search, explain, search

__all__ = ["Search", "explain", "search"]
