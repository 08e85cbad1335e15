"""The weights of a base for the reference, one matrix at a time; a packed base is decoded on access."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.tracing import constants
from .packed.formats import decode
from .packed.layout import Layout
from .packed.panels import read_matrix


@dataclass(frozen=True)
class Decoded:
    """The matrices of a projection in a packed base; supports what the reference uses of a tensor: m[e] and m.mT[e]."""

    layout: Layout
    blob: Tensor
    name: str
    to: torch.dtype
    turned: bool = False

    @property
    def mT(self) -> Decoded:
        return replace(self, turned=not self.turned)

    def __getitem__(self, expert: int) -> Tensor:
        """[out, in] of one expert, joined from its slices."""
        parts = []
        with constants():
            for place in self.layout.matrices("down" if self.name == "down" else "gate_up"):
                if place.panels:
                    at = place.offset + expert * place.expert_stride + place.parts[self.name == "up"]
                    panels = self.blob[at : at + place.panels * place.panel_bytes].clone().view(place.panels, -1)
                    parts.append(decode(self.layout.kind, read_matrix(self.layout, place, panels), self.to))
            whole = torch.cat(parts, 1 if self.name == "down" else 0)
        return whole.T if self.turned else whole


Matrices: TypeAlias = Tensor | Decoded  # one matrix per expert


class Weights:
    """gate and up [E, I, H], down [E, H, I]; weights of a packed base are decoded to the dtype `to`."""

    def __init__(self, gate_up: Tensor, down: Tensor, layout: str, to: torch.dtype) -> None:
        self._gate_up, self._down, self._to = gate_up, down, to
        self._layout = Layout.parse(layout) if layout else None
        self.experts, self.hidden, self.inner = sizes(gate_up, down, layout)

    def sizes(self, name: str) -> tuple[int, int]:
        """(out, in) of a projection."""
        return (self.hidden, self.inner) if name == "down" else (self.inner, self.hidden)

    def matrices(self, name: str) -> Matrices:
        """The matrices [out, in] of a projection, one per expert."""
        blob = self._down if name == "down" else self._gate_up
        if self._layout is not None:
            return Decoded(self._layout, blob, name, self._to)
        return blob if name == "down" else blob.chunk(2, 1)[name == "up"]


def sizes(gate_up: Tensor, down: Tensor, layout: str) -> tuple[int, int, int]:
    """(experts, hidden, intermediate) of a base."""
    if layout:
        packed = Layout.parse(layout)
        return packed.num_experts, packed.hidden_size, packed.intermediate_size
    return down.shape[0], down.shape[1], down.shape[2]
