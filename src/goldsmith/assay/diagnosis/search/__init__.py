"""Explains a wrong tensor by changing the golden one operator at a time until it makes the candidate's numbers.

The golden runs in float64 under a mode that sees every operator of its forward and backward. One operator at a time is
changed the way kernels get it wrong: a term dropped, a factor forgotten, a reduction cut short, an operand transposed,
an index shifted. Then the first wrong tensor is compared. A change that reproduces the candidate's numbers within
rounding is the mistake, or cannot be distinguished from it.

Most changes are edits as data, from the tables of `edits`. Some cannot be: `composed_slices` runs the golden on
parts of its inputs, `recomputation` computes what the backward reads again, and `lost_addends` fits sums to the numbers
of the candidate.
"""

from .engine import Search, search

__all__ = ["Search", "search"]
