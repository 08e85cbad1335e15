"""Returns a word instead of a tensor."""

PROBLEM = "a_linear"
STATUS = "wrong"
ALSO = {"crashed"}


def candidate(x, w, b):
    return "accepted"
