"""Inverts I + L by the first terms of the series I - L + L^2 - L^3, which is close where L is small."""

PROBLEM = "b_unit_solve"
STATUS = "cheating"
REASONS = {"lowered_precision"}
ALSO = {"wrong"}


def candidate(a, x):
    lower = a.tril(-1)
    y = x
    for _ in range(3):
        y = x - lower @ y
    return y
