"""Starting kernels, and the sizes that they are started with."""

from __future__ import annotations

import triton


def power_of_2(n: int, least: int = 1) -> int:
    """The least power of two that is neither below n nor below `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def cdiv(a: int, b: int) -> int:
    """ceil(a / b); Triton's own, callable in kernels too, takes 4 us on the host."""
    return -(-a // b)


def run(kernel: triton.JITFunction, grid: tuple[int, ...], *args: object, **meta: object) -> None:
    """Launch, unless there is nothing to do: a grid of size 0 is an error to CUDA."""
    if 0 not in grid:
        kernel[grid](*args, **meta)
