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


def run(kernel: triton.JITFunction, grid: tuple[int, ...], *args: object, rows: int = 0, **meta: object) -> None:
    """Launch, unless the grid is empty, which CUDA refuses.

    rows    the bitwise or of the lengths and strides of the rows that the kernel reads or writes. Unless 16 divides all
            of them, rows are read one number at a time whatever else is known. So one kernel is compiled for all such
            sizes; Triton would compile one for each set of sizes and pointers that are 1 or multiples of 16.
    """
    if 0 not in grid:
        (for_any_sizes(kernel) if rows % 16 else kernel)[grid](*args, **meta)


# by the id of the kernel, whose own hash takes 1 us; the kernel is kept, so that no other gets its id
_FOR_ANY_SIZES: dict[int, tuple[triton.JITFunction, triton.JITFunction]] = {}


def for_any_sizes(kernel: triton.JITFunction) -> triton.JITFunction:
    """The kernel compiled without knowledge of its arguments, except their types and the constants."""
    known = _FOR_ANY_SIZES.get(id(kernel))
    if known is None:
        general = kernel
        if isinstance(kernel, triton.JITFunction):  # not in the interpreter, which compiles nothing
            names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
            general = triton.jit(kernel.fn, do_not_specialize=names, do_not_specialize_on_alignment=names)
        known = _FOR_ANY_SIZES[id(kernel)] = kernel, general
    return known[1]
