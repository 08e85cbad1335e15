"""Modes that leave torch's stacks of modes for a while, and return to their former position."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode


class DispatchStack:
    """The stack of dispatch modes; `take` empties it, outermost mode first."""

    @staticmethod
    def take() -> list[object]:
        return [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())][::-1]

    @staticmethod
    def put(modes: list[Any]) -> None:
        for mode in modes:
            _push_mode(mode)


class FunctionStack:
    """The stack of function modes; `take` empties it, outermost mode first."""

    @staticmethod
    def take() -> list[object]:
        return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]

    @staticmethod
    def put(modes: list[object]) -> None:
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)


class SleepingMode:
    """Mixin of a mode on `stack`: a mode there costs each operator as much as a small operator."""

    stack: type[DispatchStack] | type[FunctionStack]
    depth: int | None = None  # the position on the stack while the mode is asleep

    def sleep(self) -> None:
        """Leave the stack, from any position."""
        if self.depth is None:
            modes = self.stack.take()
            self.depth = modes.index(self)
            self.stack.put(modes[: self.depth] + modes[self.depth + 1 :])

    def wake(self) -> None:
        """Return to the former position."""
        if self.depth is not None:
            modes = self.stack.take()
            self.stack.put([*modes[: self.depth], self, *modes[self.depth :]])
            self.depth = None
