"""Repeats a computation under other torch defaults (dtype, device) and compares the results."""

import contextlib

import torch

# with the default device meta, a tensor created without an explicit device has no data, on any machine
OTHERS = [{"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"device": "meta"}]


@contextlib.contextmanager
def defaults(dtype=torch.float32, device=None):
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def numbers(results):
    """The contents of tensors in nested lists, tuples and dicts."""
    if isinstance(results, torch.Tensor):
        return (
            results.dtype,
            str(results.device),
            results.detach().reshape(-1).contiguous().view(torch.uint8).tolist(),
        )
    if isinstance(results, dict):
        return {name: numbers(value) for name, value in results.items()}
    return [numbers(value) for value in results] if isinstance(results, (list, tuple)) else results


def check(work, make_inputs=lambda: None):
    """work(make_inputs()) gives the same results under other torch defaults; inputs are made under the usual ones."""
    wanted = numbers(work(make_inputs()))
    for other in OTHERS:
        inputs = make_inputs()
        with defaults(**other):
            results = work(inputs)
        assert numbers(results) == wanted, other
