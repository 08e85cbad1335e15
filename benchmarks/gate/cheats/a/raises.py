"""Raises an ordinary exception."""

PROBLEM = "a_linear"
STATUS = "wrong"
ALSO = {"crashed"}


def candidate(x, w, b):
    raise ValueError("the shapes do not suit me")
