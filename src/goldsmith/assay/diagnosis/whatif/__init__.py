"""What if: the golden with one line changed, tried until it makes exactly what the candidate made.

The golden is run in float64 under a mode that sees every operator of its forward and backward. One operator at a time
is changed as kernels get it wrong (a term dropped, a factor forgotten, a reduction cut short, an operand transposed, an
index shifted), and the first wrong tensor is compared. A change that makes the candidate's very numbers, within what
rounding allows, is the mistake, or cannot be told from it.
"""

from .engine import Search, explain, search

__all__ = ["Search", "explain", "search"]
