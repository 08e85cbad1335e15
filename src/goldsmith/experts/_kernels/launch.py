"""Launches of Triton kernels that are made again and again with the same constants."""

from __future__ import annotations

from typing import Any

import torch
import triton

_KNOWN = triton.__version__.startswith("3.6.")  # whose launcher's arguments are those below


class Launch:
    """kernel(*given, *fixed) on the current stream; `fixed` are the kernel's last arguments

    Triton looks at every argument of a call to find which compiled kernel it wants, which takes 30 us and more of the
    caller's time. Here it looks once, and what it found is launched from then on. So all that it decides by must be the
    same in every call: the dtypes of `given`, and whatever a kernel does not exempt with do_not_specialize (integers)
    and do_not_specialize_on_alignment (pointers). For one device.
    """

    __slots__ = ("_compiled", "_index", "_run", "_stream", "fixed", "kernel", "warps")

    def __init__(self, kernel: Any, fixed: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.fixed, self.warps = kernel, fixed, warps
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], device: torch.device, *given: Any) -> None:
        compiled = self._compiled
        if compiled is None:
            self._first(grid, device, given)
        elif self._run is None:
            compiled[grid](*given, *self.fixed, stream=self._stream(self._index))
        else:
            x, y, z = grid
            self._run(
                x, y, z, self._stream(self._index), compiled.function, compiled.packed_metadata, None, None, None,
                *given, *self.fixed,
            )  # fmt: skip

    def _first(self, grid: tuple[int, int, int], device: torch.device, given: tuple[Any, ...]) -> None:
        found = self.kernel[grid](*given, *self.fixed, num_warps=self.warps)
        if found is not None:  # None: the interpreter compiles nothing
            self._stream, self._index = triton.runtime.driver.active.get_current_stream, device.index
            self._run = found.run if _KNOWN else None
            self._compiled = found
