"""The weights of a base, a matrix at a time: of plain tensors, or of a packed base, which is decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..assay.golden import constants
from .formats import decode
from .layout import Layout, read_matrix


class Weights:
    """gate and up [I, H], down [H, I] of every expert, in `to`."""

    def __init__(self, gate_up: Tensor, down: Tensor, layout: str, to: torch.dtype) -> None:
        self._gate_up, self._down, self._to = gate_up, down, to
        self._layout = Layout.parse(layout) if layout else None
        self.experts, self.hidden, self.inner = sizes(gate_up, down, layout)

    def sizes(self, name: str) -> tuple[int, int]:
        """(out, in) of a projection."""
        return (self.hidden, self.inner) if name == "down" else (self.inner, self.hidden)

    def weight(self, name: str, expert: int) -> Tensor:
        """[out, in] of one expert."""
        if self._layout is not None:
            with constants():
                return self._decoded(self._layout, name, expert)
        if name == "down":
            return self._down[expert].to(self._to)
        return self._gate_up[expert].chunk(2)[name == "up"].to(self._to)

    def _decoded(self, layout: Layout, name: str, expert: int) -> Tensor:
        """Of a packed base: its slices side by side."""
        blob = self._down if name == "down" else self._gate_up
        found = []
        for place in layout.matrices("down" if name == "down" else "gate_up"):
            if place.panels:
                at = place.offset + expert * place.expert_stride + place.parts[name == "up"]
                panels = blob[at : at + place.panels * place.panel_bytes].clone().view(place.panels, place.panel_bytes)
                found.append(decode(layout.kind, read_matrix(layout, place, panels), self._to))
        return torch.cat(found, 1 if name == "down" else 0)


def sizes(gate_up: Tensor, down: Tensor, layout: str) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) of a base."""
    if layout:
        packed = Layout.parse(layout)
        return packed.num_experts, packed.hidden_size, packed.intermediate_size
    return down.shape[0], down.shape[1], down.shape[2]
