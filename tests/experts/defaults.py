"""Work that is done once more under other defaults of torch's, and has to come out the same."""

import contextlib

import torch

# on meta a tensor that was made without a place has no numbers, on any machine
OTHERS = [{"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"device": "meta"}]


@contextlib.contextmanager
def defaults(dtype=torch.float32, device=None):
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def numbers(found):
    """What stands in tensors, however they are nested."""
    if isinstance(found, torch.Tensor):
        return (found.dtype, str(found.device), found.detach().reshape(-1).contiguous().view(torch.uint8).tolist())
    if isinstance(found, dict):
        return {name: numbers(value) for name, value in found.items()}
    return [numbers(value) for value in found] if isinstance(found, (list, tuple)) else found


def check(work, given=lambda: None):
    """The same of work(given()), but for torch's defaults in `work`."""
    wanted = numbers(work(given()))
    for other in OTHERS:
        mine = given()
        with defaults(**other):
            came = work(mine)
        assert numbers(came) == wanted, other
