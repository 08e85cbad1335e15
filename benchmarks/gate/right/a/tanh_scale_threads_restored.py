"""Right: takes one thread for the product and restores the number of threads before it returns."""

import contextlib

import torch

PROBLEM = "a_tanh_scale"
STATUS = "accepted"


@contextlib.contextmanager
def _threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def candidate(x, w, scale):
    with _threads(1):
        return scale * torch.tanh(x @ w)
