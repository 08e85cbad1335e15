"""Returns both results in the wrong order."""

PROBLEM = "a_scans"
STATUS = "wrong"


def candidate(x):
    inclusive = x.cumsum(0)
    return inclusive, inclusive - x
