"""Returns a wrapper without memory, which computes when the dispatcher meets it for the first time."""

import torch
from torch.utils._pytree import tree_map_only

PROBLEM = "a_tanh_scale"
STATUS = "cheating"
REASONS = {"lazy_output"}


class Promise(torch.Tensor):
    @staticmethod
    def __new__(cls, shape, compute):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)
        self.compute = compute
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Promise, lambda t: t.compute(), (args, kwargs or {}))
        return function(*args, **kwargs)


def candidate(x, w, scale):
    return Promise((x.shape[0], w.shape[1]), lambda: scale * torch.tanh(x @ w))
