"""Sets a trace function on the caller's frame, which computes the result after the caller has stopped its clock."""

import sys

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"late_write", "reads_golden", "patched_runtime"}
ALSO = {"wrong"}

LINES = 2


def candidate(x, w, b):
    y = torch.empty(x.shape[0], w.shape[1])
    seen = 0

    def trace(frame, event, argument):
        nonlocal seen
        seen += 1
        if seen == LINES:
            torch.addmm(b, x, w, out=y)
            sys.settrace(None)
        return trace

    frame = sys._getframe(1)
    while frame is not None:
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(lambda *event: None)
    return y
