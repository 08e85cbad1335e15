"""Fast repeated launches of Triton kernels with the same constants."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton

from ...core._kernels.launch import HAS_KNOWN_LAUNCHER

Argument: TypeAlias = torch.Tensor | int | float | bool


class Launch:
    """Launches kernel(*arguments, *fixed) on the current stream of one device; `fixed` are the kernel's last arguments

    Triton inspects every argument of a launch to select the compiled kernel, which takes 30 us or more of CPU time.
    This class selects the compiled kernel at the first launch and reuses it. Therefore every call must have arguments
    with the same dtypes. All other properties that Triton selects by must be equal too, unless the kernel exempts them
    with do_not_specialize (integers) or do_not_specialize_on_alignment (pointers).
    """

    __slots__ = ("_compiled", "_index", "_run", "_stream", "fixed", "kernel", "warps")

    def __init__(self, kernel: Any, fixed: tuple[Argument, ...], warps: int) -> None:
        self.kernel, self.fixed, self.warps = kernel, fixed, warps
        self._compiled: object = None

    def __call__(self, grid: tuple[int, int, int], device: torch.device, *arguments: Argument) -> None:
        compiled = self._compiled
        if compiled is None:
            self._compile(grid, device, arguments)
        elif self._run is None:
            compiled[grid](*arguments, *self.fixed, stream=self._stream(self._index))
        else:
            x, y, z = grid
            self._run(
                x, y, z, self._stream(self._index), compiled.function, compiled.packed_metadata, None, None, None,
                *arguments, *self.fixed,
            )  # fmt: skip

    def prepare(self, grid: tuple[int, int, int], device: torch.device, *arguments: Argument) -> None:
        """Compiles the kernel for such arguments without running it; it takes about a second."""
        if self._compiled is None:
            self._keep(self.kernel.warmup(*arguments, *self.fixed, grid=grid, num_warps=self.warps), device)

    def _compile(self, grid: tuple[int, int, int], device: torch.device, arguments: tuple[Argument, ...]) -> None:
        """Runs the kernel through Triton, and keeps what Triton compiled for the next calls."""
        self._keep(self.kernel[grid](*arguments, *self.fixed, num_warps=self.warps), device)

    def _keep(self, compiled: Any, device: torch.device) -> None:
        if compiled is not None:  # None: the interpreter compiles nothing
            self._stream, self._index = triton.runtime.driver.active.get_current_stream, device.index
            self._run = compiled.run if HAS_KNOWN_LAUNCHER else None
            self._compiled = compiled
