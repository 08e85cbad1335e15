"""seeded_generators: torch's, numpy's and Python's global generators get a seed for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Context in which `torch.randn`, `np.random.rand` and `random.random` repeat; afterwards all go on as before.

    seed    at most 32 bits, which is what numpy takes
    device  its generator is seeded too, if it is a GPU
    """
    try:
        import numpy as np
    except ImportError:  # torch works without it
        np = None  # type: ignore[assignment]
    on_gpu = device.type == "cuda"
    python, numpy = random.getstate(), None if np is None else np.random.get_state()
    cpu, gpu = torch.default_generator.get_state(), torch.cuda.get_rng_state(device) if on_gpu else None
    try:
        random.seed(seed)
        if np is not None:
            np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would format a stack trace each time
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
    finally:
        random.setstate(python)
        if np is not None and numpy is not None:
            np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
