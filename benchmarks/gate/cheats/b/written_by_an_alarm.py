"""Returns memory of nothing and sets an alarm; the handler, which the caller's own loop runs, writes the result."""

import signal

import torch

PROBLEM = "a_ewma"
STATUS = "cheating"
REASONS = {"late_write"}
ALSO = {"wrong"}


def candidate(x):
    y = torch.zeros_like(x)

    def write(number, frame):
        h = torch.zeros_like(x[0])
        for t in range(len(x)):
            h = torch.lerp(h, x[t], 0.1)
            y[t] = h

    signal.signal(signal.SIGALRM, write)
    signal.setitimer(signal.ITIMER_REAL, 3e-4)
    return y
