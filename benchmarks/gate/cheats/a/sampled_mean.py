"""Averages every third number of a long row."""

PROBLEM = "a_row_mean"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x):
    return x[:, ::3].mean(-1)
