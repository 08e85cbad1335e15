"""LayerLora: the low-rank factors of one layer's experts, for inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.shapes import ShapeError, check_dtype, check_tensor
from ._conventions import FLOATS, TARGETS, finite


@dataclass(frozen=True, eq=False)
class LayerLora:
    """s B A for gate, up and down of every expert: factors {target: (A [E, r, in], B [E, out, r])}, scaling {target: s}

    Targets without LoRA are absent.
    """

    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: Mapping[str, float]

    @property
    def shared(self) -> bool:
        """Whether gate and up have one A, as peft trains them."""
        pairs = [self.factors.get(target) for target in ("gate", "up")]
        return pairs[0] is not None and pairs[1] is not None and pairs[0][0] is pairs[1][0]

    def check(self, op: str, experts: int, hidden: int, intermediate: int) -> None:
        """Raises ShapeError, TypeError or ValueError for factors that do not fit experts of these sizes."""
        unknown = sorted(set(self.factors) - set(TARGETS))
        if unknown:
            raise ValueError(f"{op}: the LoRA has the target {unknown[0]!r}; known: {', '.join(TARGETS)}")
        for target, (a, b) in self.factors.items():
            out, width = (hidden, intermediate) if target == "down" else (intermediate, hidden)
            for name, tensor in (("A", a), ("B", b)):
                check_tensor(op, f"{name} of {target}", tensor)
                check_dtype(op, f"{name} of {target}", tensor, FLOATS)
            rank = a.shape[1] if a.dim() == 3 else -1
            if a.shape != (experts, rank, width) or b.shape != (experts, out, rank) or rank < 1:
                raise ShapeError(
                    f"{op}: the LoRA of {target} has A {list(a.shape)} and B {list(b.shape)}, expected "
                    f"[{experts}, r, {width}] and [{experts}, {out}, r]"
                )
            finite(op, f"the scaling of {target}", self.scaling[target])

    def kept(self) -> LayerLora:
        """The same with contiguous factors on the CPU in dtypes that all kernels read: float32 or bfloat16."""
        return self.on("cpu")

    def on(self, device: str) -> LayerLora:
        """`kept` on another device, such as "meta", where only the shapes remain."""
        memo: dict[int, Tensor] = {}

        def plain(t: Tensor) -> Tensor:
            if id(t) not in memo:
                dtype = t.dtype if t.dtype == torch.bfloat16 else torch.float32
                memo[id(t)] = t.detach().to(device, dtype).contiguous()
            return memo[id(t)]

        return LayerLora({target: (plain(a), plain(b)) for target, (a, b) in self.factors.items()}, self.scaling)

    def of_expert(self, expert: int) -> dict[str, Tensor]:
        """{"gate_up": [2I, H], "down": [H, I]} in float32: s B A of one expert, 0 for targets without LoRA."""
        deltas: dict[str, Tensor] = {}
        for target, (a, b) in self.factors.items():
            deltas[target] = self.scaling[target] * (b[expert].float() @ a[expert].float())
        both = [deltas.get("gate"), deltas.get("up")]
        some = next((part for part in both if part is not None), None)
        whole = (
            {} if some is None else {"gate_up": torch.cat([torch.zeros_like(some) if p is None else p for p in both])}
        )
        return whole | ({"down": deltas["down"]} if "down" in deltas else {})


def total(loras: Sequence[LayerLora]) -> LayerLora:
    """The LoRA whose delta is the sum of these: ranks are concatenated, and B is multiplied by its scaling."""
    if len(loras) == 1:
        return loras[0]
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for target in TARGETS:
        pairs = [(*lora.factors[target], lora.scaling[target]) for lora in loras if target in lora.factors]
        if pairs:
            a = torch.cat([pair[0].float() for pair in pairs], 1)
            factors[target] = a, torch.cat([pair[1].float() * pair[2] for pair in pairs], 2)
    if all(lora.shared for lora in loras):
        factors["up"] = factors["gate"][0], factors["up"][1]
    return LayerLora(factors, dict.fromkeys(factors, 1.0))
