"""LoRA for the experts of one layer: the parameters of all experts, stacked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..core.shapes import ShapeError
from ._conventions import TARGETS, check_count, finite, number, wide

_OP = "experts.LoRA"


class LoRA(nn.Module):
    """L(v) = scaling * B A (mask * v) for gate, up and down of every expert

    Parameters gate_a [E, r, H], gate_b [E, I, r], up_a, up_b likewise, down_a [E, r, I], down_b [E, H, r]; None for
    projections outside `targets`. A is uniform in +-1/sqrt(in), like a Linear layer for each expert, and B is 0: a new
    LoRA changes nothing.

    rank, alpha   a number, or a dict with one for each target; scaling is alpha / r, or alpha / sqrt(r) with rslora
    dropout       probability that an input of A is dropped in training mode; every route has its own mask
    shared_a      up_a is gate_a: one parameter, whose gradient is the sum of both (peft trains it this way)

    Raises TypeError and ValueError for invalid sizes, ranks, targets and alphas.
    """

    gate_a: nn.Parameter | None
    gate_b: nn.Parameter | None
    up_a: nn.Parameter | None
    up_b: nn.Parameter | None
    down_a: nn.Parameter | None
    down_b: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        rank: int | Mapping[str, int] = 8,
        alpha: float | Mapping[str, float] = 16,
        targets: Sequence[str] = TARGETS,
        dropout: float = 0.0,
        rslora: bool = False,
        shared_a: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        for name, size in (
            ("num_experts", num_experts), ("hidden_size", hidden_size), ("intermediate_size", intermediate_size)
        ):  # fmt: skip
            check_count(_OP, name, size)
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.targets = _targets(targets)
        self.rank = {t: check_count(_OP, f"rank of {t}", r) for t, r in self._each("rank", rank).items()}
        self.alpha = {t: finite(_OP, f"alpha of {t}", a) for t, a in self._each("alpha", alpha).items()}
        self.dropout = number(_OP, "dropout", dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"{_OP}: dropout={dropout!r}, expected a probability of at least 0 and below 1")
        self.rslora, self.shared_a = bool(rslora), bool(shared_a)
        if not dtype.is_floating_point:
            raise TypeError(f"{_OP}: dtype={dtype!r}, expected a floating-point dtype")
        if self.shared_a and not ({"gate", "up"} <= set(self.targets) and self.rank["gate"] == self.rank["up"]):
            raise ValueError(
                f"{_OP}: shared_a=True needs gate and up among the targets, with one rank; got "
                + ", ".join(f"{t} of rank {self.rank[t]}" for t in self.targets)
            )
        for target in TARGETS:
            a, b = self._shapes(target) if target in self.targets else (None, None)
            for name, shape in ((f"{target}_a", a), (f"{target}_b", b)):
                parameter = None if shape is None else nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
                self.register_parameter(name, parameter)
        if self.shared_a:
            self.up_a = self.gate_a
        self.reset_parameters()

    def _each(self, name: str, value: object) -> dict[str, object]:
        if not isinstance(value, Mapping):
            return dict.fromkeys(self.targets, value)
        wrong = sorted(set(value) ^ set(self.targets))
        if wrong:
            raise ValueError(
                f"{_OP}: {name} and targets differ in {wrong[0]!r}; targets are {', '.join(self.targets)}, but {name} "
                f"has the keys {', '.join(map(str, value))}"
            )
        return {t: value[t] for t in self.targets}

    def _shapes(self, target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        E, r = self.num_experts, self.rank[target]
        out, width = self._sizes(target)
        return (E, r, width), (E, out, r)

    def _sizes(self, target: str) -> tuple[int, int]:
        H, I = self.hidden_size, self.intermediate_size
        return (H, I) if target == "down" else (I, H)

    def reset_parameters(self) -> None:
        """Initialise A uniformly in +-1/sqrt(in) (Kaiming with a = sqrt(5) and each expert's fan-in), and B with 0."""
        with torch.no_grad():
            for a, b in self.factors().values():
                a.uniform_(-1 / math.sqrt(a.shape[-1]), 1 / math.sqrt(a.shape[-1]))
                b.zero_()

    @property
    def scaling(self) -> dict[str, float]:
        """{target: alpha / r}, or alpha / sqrt(r) with rslora."""
        return {t: self.alpha[t] / (math.sqrt(self.rank[t]) if self.rslora else self.rank[t]) for t in self.targets}

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{target: (A, B)} with the parameters themselves, in the form that `experts.moe` accepts."""
        return {t: (getattr(self, f"{t}_a"), getattr(self, f"{t}_b")) for t in self.targets}

    @torch.no_grad()
    def merge_into(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """W + scaling * B A, as new tensors: gate_up [E, 2I, H] and down [E, H, I], each number rounded once"""
        E, H, I = self.num_experts, self.hidden_size, self.intermediate_size
        for name, tensor, wanted in (("gate_up", gate_up, (E, 2 * I, H)), ("down", down, (E, H, I))):
            if tuple(tensor.shape) != wanted:
                raise ShapeError(f"{_OP}.merge_into: {name} is {list(tensor.shape)}, expected {list(wanted)}")
        gate_up, down = gate_up.clone(), down.clone()
        places = {"gate": gate_up[:, :I], "up": gate_up[:, I:], "down": down}
        for target, (a, b) in self.factors().items():
            weight = places[target]
            to = wide(weight.dtype)
            for e in range(E):  # one expert at a time, to have only its float copy in memory
                delta = self.scaling[target] * (b[e].to(to) @ a[e].to(to))
                weight[e] = (weight[e].to(to) + delta).to(weight.dtype)
        return gate_up, down

    def num_parameters(self) -> int:
        """Number of trainable elements; a shared A counts once."""
        return sum(p.numel() for p in self.parameters())

    def extra_repr(self) -> str:
        ranks = ", ".join(f"{t}: {r}" for t, r in self.rank.items())
        more = f", dropout={self.dropout}" * bool(self.dropout) + ", shared_a=True" * self.shared_a
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, rank={{{ranks}}}{more}"
        )


def _targets(targets: object) -> tuple[str, ...]:
    if isinstance(targets, str) or not isinstance(targets, Sequence) or not targets:
        raise TypeError(f"{_OP}: targets={targets!r}, expected a sequence of: {', '.join(TARGETS)}")
    for target in targets:
        if target not in TARGETS:
            raise ValueError(f"{_OP}: target {target!r} is unknown; known: {', '.join(TARGETS)}")
    return tuple(t for t in TARGETS if t in targets)
