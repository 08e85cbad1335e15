"""Explains a wrong tensor by changing the golden one operator at a time until it makes the candidate's numbers.

The golden runs in float64 under a mode that sees every operator of its forward and backward. One operator at a time is
changed the way kernels get it wrong: a term dropped, a factor forgotten, a reduction cut short, an operand transposed,
an index shifted. Then the first wrong tensor is compared. A change that reproduces the candidate's numbers within
rounding is the mistake, or cannot be distinguished from it.

Most changes are edits as data, from the tables of `edits`. The folders below have those that data cannot say yet: they
run the golden several times, recompute the forward for the backward, or are fitted to the candidate's numbers. Their
functions `changes` take some of these arguments:

    calls     all operators of the run, in order
    among     indices of the operators that the wrong tensor depends on
    by_call   the changes that were tried at each operator alone
    leaves    inputs and output gradients, by name
    numbers   sizes and scalars of the case, by name
    tensor    name of the wrong tensor
    judge     compares a tensor with the candidate's
"""

from .engine import Search, search

__all__ = ["Search", "search"]
