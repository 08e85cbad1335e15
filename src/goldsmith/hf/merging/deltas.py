"""What an adapter adds to each weight, computed as peft's merge computes it, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..adapter import layout
from ..adapter.files import DOWN, ROOT
from ..adapter.fitting import FittedAdapter
from ..adapter.layout import PeftFactors
from ..experts_spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


def experts_delta(factors: PeftFactors, spec: ExpertsSpec) -> Tensor:
    """s B A of every expert in float32, in the model's own layout: the einsum of peft's `get_delta_weight`."""
    experts, pair = factors.a.shape[0], (factors.a, factors.b)
    flat_a, flat_b = layout.to_peft(*(layout.swapped(pair) if spec.swapped_in_peft else pair))
    flat_a, flat_b = (t if t.dtype == torch.float64 else t.float() for t in (flat_a, flat_b))
    a = flat_a.reshape(experts, -1, flat_a.shape[-1])
    b = flat_b.reshape(flat_b.shape[0], -1, experts)
    transposed = spec.transposed and not spec.swapped_in_peft
    order = "o r e, e r i -> e i o" if transposed else "o r e, e r i -> e o i"
    return torch.einsum(order, b, a) * factors.scaling


def by_projection(name: str, stack: Tensor, spec: ExpertsSpec) -> dict[str, Tensor]:
    """A parameter in the model's layout as {"gate": [E, I, H], "up": ...} or {"down": [E, H, I]}; ungated: "up"."""
    if name == DOWN:
        return {"down": spec.canonical_down(stack)}
    if not spec.gated:
        return {"up": spec.canonical_down(stack)}
    gate, up = spec.canonical_gate_up(stack).chunk(2, 1)
    return {"gate": gate, "up": up}


class OtherLayers:
    """peft's layers outside the experts, which merge one weight at a time: `names` are the weights' in the model."""

    def __init__(self, adapter: FittedAdapter) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._adapter = adapter
        self._layers: dict[str, list[tuple[str, Any]]] = {}
        if adapter.layers is None or not adapter.peft:
            return
        for path, module in adapter.layers.named_modules():
            if isinstance(module, BaseTunerLayer) and self._has_tensors(path):
                name = getattr(module, "parameter_name", "weight")
                plain = path.replace(".base_layer", "")
                self._layers.setdefault(f"{plain}.{name}", []).append((path, module))

    @property
    def names(self) -> set[str]:
        return set(self._layers)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The weight with the adapter in it, in its dtype, by peft's own `merge`."""
        for path, layer in reversed(self._layers[name]):  # a parameter's wrappers are nested, the inner one is last
            base = cast("nn.Module", layer.get_base_layer())
            leaf = name.rpartition(".")[2]
            base._parameters[leaf] = nn.Parameter(weight.clone(), requires_grad=False)
            self._fill(path, layer)
            layer.merge(adapter_names=["default"])
            layer.merged_adapters.clear()  # otherwise the next merge would do nothing
            merged = base._parameters[leaf]
            if merged is None:
                raise ValueError(f"{self._adapter.folder}: peft's merge removed {name}")
            weight = merged.detach()
            base._parameters[leaf] = nn.Parameter(weight.to("meta"), requires_grad=False)
        return weight

    def _has_tensors(self, path: str) -> bool:
        return any(key.startswith(f"{ROOT}{path}.lora_") for key in self._adapter.peft)

    def _fill(self, path: str, layer: nn.Module) -> None:
        """Puts the file's tensors into a layer, in float32, as peft's loading does."""
        for key, tensor in self._adapter.peft.items():
            prefix = f"{ROOT}{path}.lora_"
            if not key.startswith(prefix):
                continue
            kind, _, rest = key.removeprefix(f"{ROOT}{path}.").partition(".")
            holder: Mapping[str, Any] = getattr(layer, kind)
            value = nn.Parameter(tensor if tensor.dtype == torch.float64 else tensor.float(), requires_grad=False)
            if rest:
                setattr(holder["default"], rest, value)
            else:
                cast("Any", holder)["default"] = value
