"""What a run of a candidate leaves behind in torch for everything that runs after it: noticed, and undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored(changed: list[str]) -> Iterator[None]:
    """Inside, the default dtype and the number of threads may be set; afterwards they are as they were.

    changed: takes one sentence for each that was left otherwise.
    """
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_default_dtype() != dtype:
            now = str(torch.get_default_dtype()).removeprefix("torch.")
            changed.append(f"torch's default dtype, which was {str(dtype).removeprefix('torch.')}, is {now}")
            torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            changed.append(f"torch's number of threads, which was {threads}, is {torch.get_num_threads()}")
            torch.set_num_threads(threads)
