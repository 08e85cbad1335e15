"""Adapters of an engine: LoRA on experts by name, in the form that each lane reads; the packed weights never change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.shapes import kind
from ..experts._factors import LayerLora, total
from .lanes.kernels import HostFactors, kernel_module
from .settings import OP
from .store.expert_store import ExpertStore

if TYPE_CHECKING:
    from ..experts._kernels.low_rank import PanelFactors

Layers = Mapping[int, LayerLora]  # by layer; layers without LoRA are absent


class ActiveLora:
    """The LoRA that calls use, by layer: factors on the CPU, and on a GPU if there is memory for them there."""

    def __init__(self, layers: Layers, panels: Mapping[int, PanelFactors]) -> None:
        self._layers, self._panels = layers, panels
        self._host = {layer: HostFactors.of(lora.factors, lora.scaling) for layer, lora in layers.items()}
        self._in_slots: dict[tuple[object, ...], dict[int, Tensor]] = {}

    def on_cpu(self, layer: int) -> HostFactors | None:
        return self._host.get(layer)

    def on_device(self, layer: int) -> PanelFactors | None:
        return self._panels.get(layer)

    def in_slots(self, layer: int, experts: Sequence[tuple[int, int]], slots: int) -> HostFactors | None:
        """The factors of (expert, slot) pairs, in the order of an arena with so many slots; valid until the next call.

        Rows of other slots have arbitrary contents.
        """
        lora = self._layers.get(layer)
        if lora is None:
            return None
        key = (slots, *((target, a.shape[1], a.dtype, b.dtype) for target, (a, b) in lora.factors.items()))
        memory = self._in_slots.setdefault(key, {})
        there: dict[int, Tensor] = {}

        def placed(name: int, tensor: Tensor) -> Tensor:
            if id(tensor) not in there:
                if name not in memory:
                    memory[name] = tensor.new_empty(slots, *tensor.shape[1:])
                for expert, slot in experts:
                    memory[name][slot] = tensor[expert]
                there[id(tensor)] = memory[name]
            return there[id(tensor)]

        factors = {
            target: (placed(2 * i, a), placed(2 * i + 1, b)) for i, (target, (a, b)) in enumerate(lora.factors.items())
        }
        return HostFactors.of(factors, lora.scaling, kept=False)

    def deltas(self, layer: int, expert: int) -> dict[str, Tensor]:
        """s B A of one expert in float32: {"gate_up": [2I, H], "down": [H, I]}, without the parts that have no LoRA."""
        lora = self._layers.get(layer)
        return {} if lora is None else lora.of_expert(expert)


NO_ADAPTER = ActiveLora({}, {})


class EngineAdapters:
    """The adapters of an engine by name. `nbytes` and `row_bytes` are what they take of a GPU's budget

    nbytes      for the factors of all adapters together, so that any of them, and their sum, has room
    row_bytes   of a route in the workspace
    """

    def __init__(self, store: ExpertStore, adapters: Mapping[str, Layers] | None, device: torch.device) -> None:
        self._store, self._by_name, self.active = store, dict[str, Layers](), tuple[str, ...]()
        self._memory: tuple[Tensor, Tensor, Tensor] | None = None
        self._reserved = False  # whether lanes on a device take what was reserved at the start, perhaps nothing
        # what `choose` gave last; on the CPU the same object for an adapter that is chosen again
        self.lora = NO_ADAPTER
        self._single: dict[str, ActiveLora] = {}
        self.nbytes = self._rank = 0
        for name, layers in (adapters or {}).items():
            self._by_name[self._name(name)] = self._checked(name, layers)
        if device.type == "cuda" and self._by_name:
            self.nbytes, self._rank = _room(list(self._by_name.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def row_bytes(self) -> int:
        return 4 * (2 * self._store.intermediate_size + self._rank) if self.nbytes else 0

    def allocate(self, device: torch.device, rows: int) -> None:
        """Takes the memory of `nbytes` and of `rows` routes on the GPU, if there are adapters."""
        self._reserved = True
        if not self.nbytes:
            return
        with torch.inference_mode(False):
            self._memory = (
                torch.empty(self.nbytes, dtype=torch.uint8, device=device),
                torch.empty(rows * self._rank, dtype=torch.float32, device=device),
                torch.empty(rows * 2 * self._store.intermediate_size, dtype=torch.float32, device=device),
            )

    def add(self, name: str, layers: Layers) -> None:
        """Adds an adapter. Raises ValueError for a name that exists, and if a GPU has no room for its factors."""
        if self._name(name) in self._by_name:
            raise ValueError(f"{OP}: there is already an adapter {name!r}; give another name")
        checked = self._checked(name, layers)
        if self._reserved:
            needed, rank = _room([*self._by_name.values(), checked])
            if needed > self.nbytes or rank > self._rank:
                raise ValueError(
                    f"{OP}: the factors of {name!r} have no room on the GPU: {self.nbytes} bytes were reserved, "
                    f"{needed} are needed; give all adapters when the engine is made (offload(adapter={{...}}))"
                )
        self._by_name[name] = checked

    def put(self, name: str, layers: Layers) -> None:
        """An adapter to try alone, in place of an earlier one with this name; it may take the memory of all others."""
        checked = self._checked(self._name(name), layers)
        if self._reserved and _room([checked])[0] > self.nbytes:
            raise ValueError(f"{OP}: the factors of {name!r} have no room on the GPU")
        self._by_name[name] = checked
        self._single.pop(name, None)

    def choose(self, names: str | Sequence[str] | None) -> ActiveLora:
        """The LoRA of these adapters, their sum if there are several; None: no LoRA."""
        chosen = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        for name in chosen:
            if name not in self._by_name:
                known = ", ".join(map(repr, self._by_name)) or "none"
                raise ValueError(f"{OP}: there is no adapter {name!r}; known: {known}")
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"{OP}: adapters {list(chosen)} name one twice; give each once")
        if len(chosen) == 1 and chosen[0] in self._single:
            self.active, self.lora = chosen, self._single[chosen[0]]
            return self.lora
        by_layer: dict[int, list[LayerLora]] = {}
        for name in chosen:
            for layer, lora in self._by_name[name].items():
                by_layer.setdefault(layer, []).append(lora)
        layers = {layer: total(loras) for layer, loras in by_layer.items()}
        active = ActiveLora(layers, self._on_device(layers)) if layers else NO_ADAPTER
        self.active, self.lora = chosen, active
        if len(chosen) == 1 and self._memory is None:
            self._single[chosen[0]] = active
        return active

    def close(self) -> None:
        self._memory = None

    def _on_device(self, layers: Layers) -> dict[int, PanelFactors]:
        if self._memory is None:
            return {}
        memory, low, extra = self._memory
        kernels = kernel_module("experts._kernels.low_rank")
        panels, at = {}, 0
        with torch.inference_mode(False), torch.no_grad():
            for layer, lora in layers.items():
                size = kernels.nbytes_of(lora)
                panels[layer] = kernels.PanelFactors(lora, memory[at : at + size], low, extra)
                at += size
        if memory.is_cuda:  # calls may come on other streams than these copies
            torch.cuda.current_stream(memory.device).synchronize()
        return panels

    def _name(self, name: object) -> str:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{OP}: an adapter's name is {name!r}, expected a text")
        return name

    def _checked(self, name: str, layers: object) -> Layers:
        where = f"{OP}: adapter {name!r}"
        if not isinstance(layers, Mapping):
            raise TypeError(f"{where} is {kind(layers)}, expected {{layer: LayerLora}}")
        store = self._store
        for layer, lora in layers.items():
            if layer not in store.layers:
                raise ValueError(f"{where} has layer {layer}; the store has {list(store.layers)}")
            lora.check(f"{where}, layer {layer}", store.num_experts(layer), store.hidden_size, store.intermediate_size)
        return {layer: lora.kept() for layer, lora in layers.items()}


def _room(adapters: Sequence[Layers]) -> tuple[int, int]:
    """Bytes for the factors of all these adapters together, and the largest rank: no part of them needs more."""
    kernels = kernel_module("experts._kernels.low_rank")
    by_layer: dict[int, list[LayerLora]] = {}
    for layers in adapters:
        for layer, lora in layers.items():
            by_layer.setdefault(layer, []).append(lora.on("meta"))
    together = [total(loras) for loras in by_layer.values()]
    return sum(map(kernels.nbytes_of, together)), max(map(kernels.rank_of, together), default=0)
