"""experts.moe and experts.slots as they are timed: through the public functions, a token's set of experts in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.op import Op
from ...experts import PackedExperts, moe, slots
from ...experts._conventions import FACTORS, TARGETS
from ...experts._weights import Weights
from ...experts.benchmarks import DRAWN
from ...experts.packed.layout import Layout
from .subject import OURS, Subject, Tensors, Variant

COMPARED = 4  # tokens: a whole layer in float64 takes longer than all timings of it
ROWS = ("x", "topk_ids", "topk_weights")


class Experts(Subject):
    public: Callable[..., Tensor]

    @property
    def base(self) -> PackedExperts | tuple[Tensor, Tensor]:
        gate_up, down = self.given("gate_up"), self.given("down")
        if not self.options["layout"]:
            return gate_up, down
        return PackedExperts._of(Layout.parse(self.options["layout"]), gate_up, down)

    @property
    def scaling(self) -> float:
        """Of every LoRA pair: the cases have one for all."""
        return self.options["gate_scale"]

    def given(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if tensor is None:
            raise ValueError(f"{self.name}: the case {self.entry.name} has no {name}")
        return tensor

    def weights(self, experts: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I] of all experts or of some, decoded if they are packed."""
        layout, dtype = self.options["layout"], dtype or self.entry.dtype
        gate_up, down = self.given("gate_up"), self.given("down")
        if not layout:
            chosen = (gate_up, down) if experts is None else (gate_up[experts], down[experts])
            return chosen[0].to(dtype), chosen[1].to(dtype)
        stored = Weights(gate_up, down, layout, torch.float64)
        if experts is None:
            experts = range(stored.experts)
        drawn = {e % DRAWN for e in experts}
        found = {name: {e: stored.matrices(name)[e].to(dtype) for e in drawn} for name in TARGETS}
        gate, up, down = (torch.stack([found[name][e % DRAWN] for e in experts]) for name in TARGETS)
        return torch.cat([gate, up], 1), down

    def lora(self, tensors: Tensors) -> dict[str, tuple[Any, Any]]:
        return {t: (tensors[f"{t}_a"], tensors[f"{t}_b"]) for t in TARGETS if tensors[f"{t}_a"] is not None}

    @torch.no_grad()
    def golden(self) -> Tensor:
        """Of the first tokens, with the experts that they visit."""
        rows = {name: t[:COMPARED] for name in ROWS if (t := self.tensors.get(name)) is not None}
        used, ids = rows["topk_ids"].unique(return_inverse=True)
        gate_up, down = self.weights(used.tolist(), torch.float64)
        factors = {name: t[used].double() for name in FACTORS if (t := self.tensors[name]) is not None}
        tensors = self.tensors | rows | factors | {"topk_ids": ids, "gate_up": gate_up, "down": down}
        tensors["x"] = rows["x"].double()
        op, options = self.exact()
        return op.reference.forward(*(tensors[n] for n in op.inputs), **options | {"layout": ""})[0]

    def exact(self) -> tuple[Op, dict[str, Any]]:
        """What the results are compared with."""
        return self.op, self.options


class Moe(Experts):
    compute = "float"

    def ours(self, backend: str) -> Variant:
        tensors, base = self.fresh_leaves(), self.base
        frozen = {name: None for name in ("gate_up", "down")}  # as peers have the base

        def call(given: dict[str, Any]) -> Tensor:
            return moe(
                given["x"], given["topk_ids"], given["topk_weights"], base,
                lora=self.lora(given) or None, lora_scaling=self.scaling if self.lora(given) else 1.0,
                activation=self.options["activation"], compute=self.compute, backend=backend,
            )  # fmt: skip

        leaves = [t for name, t in tensors.items() if name not in frozen and t is not None and t.requires_grad]
        return Variant(OURS, self.in_turn(tensors, call), leaves, backend)


class MoeInt8(Moe):
    """Its error is that against products of the activations as they are: what rounding them to 8 bits costs."""

    compute = "int8"

    def exact(self) -> tuple[Op, dict[str, Any]]:
        return Op.get("experts.moe"), self.options | {"save": False}


class Slots(Experts):
    def ours(self, backend: str) -> Variant:
        base = self.base

        def call(given: dict[str, Any]) -> Tensor:
            return slots(given["x"], given["topk_ids"], base, activation=self.options["activation"], backend=backend)

        return Variant(OURS, self.in_turn(self.tensors, call), [], backend)
