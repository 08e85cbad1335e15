"""Returns a plain tensor of zeros whose methods are overridden on the instance and compute the result when called."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"lazy_output"}


NAMES = ("float", "double", "cpu", "numpy", "detach", "clone", "contiguous", "to", "tolist", "item")


def candidate(x, w, b):
    y = torch.zeros(len(x), w.shape[1])

    def override(name):
        return lambda *args, **kwargs: getattr(torch.addmm(b, x, w), name)(*args, **kwargs)

    for name in NAMES:
        setattr(y, name, override(name))
    return y
