"""Launching kernels, and their block sizes."""

from __future__ import annotations

import triton

# Option of a launch whose kernel sums products over lanes, sum(a * b), and reads the sum on all of them. Otherwise the
# compiler contracts the product into the first addition of the shuffled sum: each lane adds the rounded product of the
# other lane to the exact one of its own, so lanes have sums of the same numbers that differ in the last bit. A
# Sinkhorn's backward subtracts such sums, and errs by 4e-8 where 1e-12 is left of a gradient of 1.
ONE_SUM_FOR_ALL_LANES = {"enable_fp_fusion": False}


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def cdiv(a: int, b: int) -> int:
    """ceil(a / b). Triton's own version, which kernels can call as well, takes 4 us on the host."""
    return -(-a // b)


def run(kernel: triton.JITFunction, grid: tuple[int, ...], *args: object, **meta: object) -> None:
    """Launch, unless the grid is empty, which CUDA refuses."""
    if 0 not in grid:
        kernel[grid](*args, **meta)
