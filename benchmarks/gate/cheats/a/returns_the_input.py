"""Returns the input itself, because the update that it skips is below the tolerance."""

PROBLEM = "a_residual"
STATUS = "cheating"
REASONS = {"returned_input", "aliased_output"}


def candidate(x, w, gamma):
    return x
