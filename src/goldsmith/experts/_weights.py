"""The weights of a base, a matrix at a time: plain tensors, or a packed base that is decoded."""

from __future__ import annotations

import torch
from torch import Tensor


class Weights:
    """gate and up [I, H], down [H, I] of every expert, in `to`."""

    def __init__(self, gate_up: Tensor, down: Tensor, layout: str, to: torch.dtype) -> None:
        self._gate_up, self._down, self._to = gate_up, down, to
        self.experts, self.hidden, self.inner = sizes(gate_up, down, layout)

    def sizes(self, name: str) -> tuple[int, int]:
        """(out, in) of a projection."""
        return (self.hidden, self.inner) if name == "down" else (self.inner, self.hidden)

    def weight(self, name: str, expert: int) -> Tensor:
        """[out, in] of one expert."""
        if name == "down":
            return self._down[expert].to(self._to)
        return self._gate_up[expert].chunk(2)[name == "up"].to(self._to)


def sizes(gate_up: Tensor, down: Tensor, layout: str) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) of a base."""
    return down.shape[0], down.shape[1], down.shape[2]
