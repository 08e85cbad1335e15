"""Launches of Triton kernels that are made again and again with the same constants."""

from __future__ import annotations

from typing import Any

import torch


class Launch:
    """kernel(*given, *fixed) on the current stream; `fixed` are the kernel's last arguments

    Triton looks at every argument of a call to find which compiled kernel it wants, which takes 30 us and more of the
    caller's time. Here it looks once, and what it found is launched from then on. So all that it decides by must be the
    same in every call: the dtypes of `given`, and whatever a kernel does not exempt with do_not_specialize (integers)
    and do_not_specialize_on_alignment (pointers). For one device.
    """

    __slots__ = ("_compiled", "fixed", "kernel", "warps")

    def __init__(self, kernel: Any, fixed: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.fixed, self.warps = kernel, fixed, warps
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int, int], device: torch.device, *given: Any) -> None:
        if self._compiled is None:
            self._compiled = self.kernel[grid](*given, *self.fixed, num_warps=self.warps)  # None in the interpreter
            return
        stream = torch.cuda.current_stream(device).cuda_stream
        self._compiled[grid](*given, *self.fixed, stream=stream)
