"""experts.moe and experts.slots as they are timed: through their public functions, the tokens' experts rotating."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...core.op import Op
from ...experts import PackedExperts, moe, slots
from ...experts._conventions import FACTORS, TARGETS
from ...experts._weights import Weights
from ...experts.benchmarks import DRAWN
from ...experts.packed.layout import Layout
from .subject import OURS, Options, Subject, Tensors, Variant

COMPARED = 4  # tokens compared with float64: a whole layer in float64 takes longer than all its timings
ROWS = ("x", "topk_ids", "topk_weights")


class ExpertSubject(Subject):
    """Experts with packed or plain weights; the reference is compared on the first COMPARED tokens."""

    public: Callable[..., Tensor]

    @property
    def base(self) -> PackedExperts | tuple[Tensor, Tensor]:
        gate_up, down = self.required("gate_up"), self.required("down")
        if not self.options["layout"]:
            return gate_up, down
        return PackedExperts._of(Layout.parse(self.options["layout"]), gate_up, down)

    @property
    def scaling(self) -> float:
        """The scaling of all LoRA pairs: the cases give them the same."""
        return self.options["gate_scale"]

    def required(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if tensor is None:
            raise ValueError(f"{self.name}: the case {self.entry.name} has no {name}")
        return tensor

    def weights(self, experts: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I] of these experts (None: all), decoded where they are packed."""
        layout, dtype = self.options["layout"], dtype or self.entry.dtype
        gate_up, down = self.required("gate_up"), self.required("down")
        if not layout:
            chosen = (gate_up, down) if experts is None else (gate_up[experts], down[experts])
            return chosen[0].to(dtype), chosen[1].to(dtype)
        stored = Weights(gate_up, down, layout, torch.float64)
        if experts is None:
            experts = range(stored.experts)
        drawn = {e % DRAWN for e in experts}
        matrices = {name: {e: stored.matrices(name)[e].to(dtype) for e in drawn} for name in TARGETS}
        gate, up, down = (torch.stack([matrices[name][e % DRAWN] for e in experts]) for name in TARGETS)
        return torch.cat([gate, up], 1), down

    def lora(self, tensors: Tensors) -> dict[str, tuple[Tensor, Tensor]]:
        """The LoRA pairs of the case, by target."""
        pairs = {t: (tensors[f"{t}_a"], tensors[f"{t}_b"]) for t in TARGETS}
        return {t: (a, b) for t, (a, b) in pairs.items() if a is not None and b is not None}

    @torch.no_grad()
    def golden(self) -> Tensor:
        """The reference on the first tokens, with the experts that they use."""
        rows = {name: t[:COMPARED] for name in ROWS if (t := self.tensors.get(name)) is not None}
        used, ids = rows["topk_ids"].unique(return_inverse=True)
        gate_up, down = self.weights(used.tolist(), torch.float64)
        factors = {name: t[used].double() for name in FACTORS if (t := self.tensors[name]) is not None}
        tensors = self.tensors | rows | factors | {"topk_ids": ids, "gate_up": gate_up, "down": down}
        tensors["x"] = rows["x"].double()
        op, options = self.exact()
        return op.reference.forward(*(tensors[n] for n in op.inputs), **options | {"layout": ""})[0]

    def exact(self) -> tuple[Op, Options]:
        """The operator, and its options, whose reference is the golden."""
        return self.op, self.options


class MoeSubject(ExpertSubject):
    """experts.moe over a frozen base, with LoRA where the case has it."""

    compute = "float"

    def ours(self, backend: str) -> Variant:
        tensors, base = self.fresh_leaves(), self.base
        frozen = ("gate_up", "down")  # peers do not differentiate the base either

        def call(tensors: dict[str, Tensor]) -> Tensor:
            return moe(
                tensors["x"], tensors["topk_ids"], tensors["topk_weights"], base,
                lora=self.lora(tensors) or None, lora_scaling=self.scaling if self.lora(tensors) else 1.0,
                activation=self.options["activation"], compute=self.compute, backend=backend,
            )  # fmt: skip

        leaves = [t for name, t in tensors.items() if name not in frozen and t is not None and t.requires_grad]
        return Variant(OURS, self.in_turn(tensors, call), leaves, backend)


class MoeInt8Subject(MoeSubject):
    """experts.moe in int8; its error is against unrounded activations, so it shows what rounding to 8 bits costs."""

    compute = "int8"

    def exact(self) -> tuple[Op, Options]:
        return Op.get("experts.moe"), self.options | {"save": False}


class SlotsSubject(ExpertSubject):
    """experts.slots: the results of each expert separately."""

    def ours(self, backend: str) -> Variant:
        base = self.base

        def call(tensors: dict[str, Tensor]) -> Tensor:
            return slots(
                tensors["x"], tensors["topk_ids"], base, activation=self.options["activation"], backend=backend
            )

        return Variant(OURS, self.in_turn(self.tensors, call), [], backend)
