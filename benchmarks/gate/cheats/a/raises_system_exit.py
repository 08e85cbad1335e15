"""Raises SystemExit(0), which passes every handler of ordinary exceptions."""

PROBLEM = "a_linear"
STATUS = "crashed"
ALSO = {"wrong"}


def candidate(x, w, b):
    raise SystemExit(0)
