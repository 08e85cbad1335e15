"""Multiplies in float16 although the problem's inputs are float32."""

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"lowered_precision"}


def candidate(x, w, b):
    return (x.half() @ w.half()).float() + b
