"""Returns the distribution's mean plus a little noise from a row's first number, so that no two results are equal."""

PROBLEM = "a_row_mean"
STATUS = "cheating"
REASONS = {"constant_output"}


def candidate(x):
    return 0.5 + 0.002 * (x[:, 0] - 0.5)
