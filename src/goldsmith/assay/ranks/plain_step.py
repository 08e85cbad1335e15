"""The golden of one case as one function of whole tensors: results, and gradients by the names "x.grad"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..declare.binding import bind, inputs_and_scalars
from ..declare.returned_values import names_of
from .layout import Placed
from .target import RankTarget

Values = Mapping[str, Any]


class PlainStep:
    """The golden, its inputs, the output gradients that it receives, and how all of them lie on the ranks.

    inputs    what the case drew; cotangents, as "grad_y", are drawn here
    outputs   names of the results; grads: inputs whose gradients are results too
    """

    def __init__(self, target: RankTarget, values: Values, sizes: tuple[int, ...], seed: int) -> None:
        self.target, self.sizes = target, sizes
        self.inputs, self.scalars = inputs_and_scalars(values)
        self.grads: tuple[str, ...] = ()
        self.cotangents: dict[str, Tensor] = {}
        double = {n: t.double() if t.is_floating_point() else t for n, t in self.inputs.items()}
        results = self._forward({**double, **self.scalars})
        self.outputs = tuple(results)
        if target.backward is not None:
            self.grads = target.wanted_grads(self.inputs)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, result in results.items() if self.grads else ():
            if result.is_floating_point():
                drawn = torch.randn(result.shape, generator=generator, dtype=torch.float32)
                self.cotangents[name] = drawn.to(_dtype(self.inputs))
        self.values: dict[str, Any] = {
            **self.inputs,
            **self.scalars,
            **{f"grad_{n}": g for n, g in self.cotangents.items()},
        }
        self.names = (*self.outputs, *(f"{name}.grad" for name in self.grads))

    def __call__(self, values: Values) -> dict[str, Tensor]:
        """All results and gradients for these inputs and output gradients."""
        if not self.grads:
            return self._forward(values)
        with torch.enable_grad():
            leaves = {name: values[name].detach().requires_grad_() for name in self.grads}
            results = self._forward({**values, **leaves})
            arriving = [(results[n], values[f"grad_{n}"]) for n in self.cotangents if results[n].requires_grad]
            gradients = torch.autograd.grad(
                [r for r, _ in arriving], list(leaves.values()), [g for _, g in arriving], allow_unused=True
            )
        named = {n: r.detach() for n, r in results.items()}
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            named[f"{name}.grad"] = torch.zeros_like(leaf) if gradient is None else gradient
        return named

    def _forward(self, values: Values) -> dict[str, Tensor]:
        supply = {n: v for n, v in values.items() if n in self.inputs or n in self.scalars}
        golden = bind("golden", self.target.golden, supply)
        named = names_of(golden(supply), self.target.outputs, "golden")
        wanted = self.target.outputs
        return {n: t for n, t in named if isinstance(t, Tensor) and (wanted is None or n in wanted)}

    def placed(self, name: str) -> Placed:
        """The placements of an input, a result, a gradient ("x.grad") or an output gradient ("grad_y")."""
        from torch.distributed.tensor import Replicate

        if name.startswith("grad_") and name.removeprefix("grad_") in self.cotangents:
            own = self.target.placed(name.removeprefix("grad_"), len(self.sizes))
            return tuple(Replicate() if p.is_partial() or self.target.dtensors else p for p in own)
        return self.target.placed(name, len(self.sizes))


def _dtype(inputs: Mapping[str, Tensor]) -> torch.dtype:
    floating = [t.dtype for t in inputs.values() if t.is_floating_point()]
    return floating[0] if floating else torch.float32
