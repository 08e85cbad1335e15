"""Launching kernels, and their block sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
import triton

from ..device import triton_interpreted
from ..signatures import RecordedLaunch, keep, recording

# Option of a launch whose kernel sums products over lanes, sum(a * b), and reads the sum on all of them. Otherwise the
# compiler contracts the product into the first addition of the shuffled sum: each lane adds the rounded product of the
# other lane to the exact one of its own, so lanes have sums of the same numbers that differ in the last bit. A
# Sinkhorn's backward subtracts such sums, and errs by 4e-8 where 1e-12 is left of a gradient of 1.
ONE_SUM_FOR_ALL_LANES = {"enable_fp_fusion": False}

# Triton's launch of a compiled kernel takes the arguments below, and its compiled kernels depend on what `run` looks at
HAS_KNOWN_LAUNCHER = triton.__version__.startswith("3.6.") and not triton_interpreted()

Start: TypeAlias = tuple[Callable[..., object], tuple[object, ...]]  # a launching function, its fixed arguments
_compiled: dict[Hashable, Start] = {}
_pointers: dict[Hashable, int] = {}
_ONES = (1, 1, 1)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def cdiv(a: int, b: int) -> int:
    """ceil(a / b). Triton's own version, which kernels can call as well, takes 4 us on the host."""
    return -(-a // b)


def run(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, rows: int = 0, **meta: object) -> None:
    """Launch, unless the grid is empty, which CUDA refuses.

    args   every argument of the kernel, the pointers (`..._ptr`) first: tensors on the current device
    rows   the bitwise or of the lengths and strides of the rows that the kernel reads or writes. Unless 16 divides all
           of them, rows are read one number at a time whatever else is known. So one kernel is compiled for all such
           sizes; Triton would compile one for each set of sizes and pointers that are 1 or multiples of 16.

    Triton selects the compiled kernel by the dtype and the alignment of each pointer, and by the type of each other
    argument, whether it is 1 and whether 16 divides it; then it asks the driver about each tensor, but not about an
    address. Here a kernel that Triton once selected is found again by dtype and alignment, and by type and value, and
    gets addresses: 4 us of CPU time instead of 8 or more.
    """
    if 0 in grid:
        return
    any_sizes = rows % 16 != 0
    if any_sizes:
        kernel = for_any_sizes(kernel)
    record = recording()
    if not HAS_KNOWN_LAUNCHER or _hooked():
        if record is not None:
            record.repeatable = False
        kernel[grid](*args, **meta)
        return
    count = _pointers.get(kernel.fn)
    if count is None:
        count = _pointers[kernel.fn] = sum(name.endswith("_ptr") for name in kernel.arg_names)
    pointers, values = args[:count], args[count:]
    addresses = [p.data_ptr() for p in pointers]
    types = tuple(map(type, values))
    settings = _settings()
    key = (
        kernel.fn, any_sizes, settings, tuple([p.dtype for p in pointers]), tuple([a % 16 for a in addresses]),
        values, types, tuple(meta.items()),
    )  # fmt: skip
    known = _compiled.get(key)
    if known is None:
        compiled = kernel[grid](*args, **meta)
        # Triton looks at more on other devices, and no tensor may be kept
        complete = len(args) == len(kernel.arg_names) and not any(isinstance(v, torch.Tensor) for v in values)
        if complete and triton.runtime.driver.active.get_current_target().backend == "cuda":
            known = keep(_compiled, key, _starting(compiled))
    else:
        start, fixed = known
        start(*grid, *_ONES[len(grid) :], _stream(), *fixed, *addresses, *values)
    if record is not None:
        record.repeatable &= known is not None
        if known is not None:
            record.launches.append(
                RecordedLaunch(
                    known[0], (*grid, *_ONES[len(grid) :]), known[1], pointers, values, settings, _settings, _stream
                )
            )


def _starting(compiled: Any) -> Start:
    """A function that launches a compiled kernel, and its arguments between the stream and the kernel's own."""
    launcher, nothing = compiled.run, (None, None, None)
    sizes = getattr(launcher, "global_scratch_size", None), getattr(launcher, "profile_scratch_size", None)
    if sizes != (0, 0):
        return launcher, (compiled.function, compiled.packed_metadata, *nothing)
    # without scratch memory the launcher does nothing but to call this function
    fixed = launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, *nothing
    return launcher.launch, (compiled.function, *fixed)


def _settings() -> tuple[object, ...]:
    """What a launch depends on apart from its arguments."""
    knobs = triton.knobs
    device = triton.runtime.driver.active.get_current_device()
    return device, knobs.runtime.debug, knobs.compilation.instrumentation_mode, _hooked()


def _stream() -> int:
    driver = triton.runtime.driver.active
    return driver.get_current_stream(driver.get_current_device())


def _hooked() -> bool:
    """Whether somebody, a profiler, wants to hear of every launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# by the id of the kernel, whose own hash takes 1 us; the kernel is kept, so that no other gets its id
_FOR_ANY_SIZES: dict[int, tuple[triton.JITFunction, triton.JITFunction]] = {}


def for_any_sizes(kernel: triton.JITFunction) -> triton.JITFunction:
    """A copy of the kernel that is compiled for the types of its arguments and its constants only, for no sizes."""
    known = _FOR_ANY_SIZES.get(id(kernel))
    if known is None:
        general = kernel
        if isinstance(kernel, triton.JITFunction):  # not in the interpreter, which compiles nothing
            names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
            general = triton.jit(kernel.fn, do_not_specialize=names, do_not_specialize_on_alignment=names)
        known = _FOR_ANY_SIZES[id(kernel)] = kernel, general
    return known[1]
