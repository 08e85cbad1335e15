"""Returns a subclass that computes when somebody looks at it, which is after the clock has stopped."""

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"lazy_output"}


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [a.compute() if isinstance(a, Lazy) else a for a in args]
        return function(*args, **(kwargs or {}))


def candidate(x, w, b):
    y = torch.Tensor._make_subclass(Lazy, torch.empty(len(x), w.shape[1]))
    y.compute = lambda: torch.addmm(b, x, w)
    return y
