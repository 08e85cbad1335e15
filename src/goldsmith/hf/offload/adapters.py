"""Adapters of an offloaded model: LoRA on experts goes to the engine, everything else of an adapter to peft's layers.

An adapter is read and checked before anything is built or changed. The packed weights never change: the engine adds the
LoRA to what it computes. Modules that an adapter replaces whole (a router) are overwritten while it is active.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.shapes import kind
from ...experts._factors import LayerLora
from ..adapter.coverage import lora_config
from ..adapter.files import CONFIG, ROOT
from ..adapter.fitting import FittedAdapter, fitted
from ..adapter.peft_layers import remove_peft_layers, tensors_of, torch_defaults
from ..adapter.reading import split_factors
from .layers import ExpertsLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...offload.engine import Engine

AdapterArgument = str | Path | Mapping[str, str | Path] | Sequence[str | Path] | None
_OP = "offload"
PREFIX = "goldsmith_"  # of peft's names of our adapters


@dataclass(frozen=True)
class OffloadedAdapter:
    """An adapter that fits the model, with the LoRA of its experts by layer."""

    fitted: FittedAdapter
    experts: dict[int, LayerLora]


def folders_of(adapter: AdapterArgument) -> dict[str, Path]:
    """The argument `adapter` as {name: folder}; the name of a folder given without one is its own."""
    if adapter is None:
        return {}
    if isinstance(adapter, (str, Path)):
        adapter = [adapter]
    if isinstance(adapter, Mapping):
        pairs = list(adapter.items())
    elif isinstance(adapter, Sequence):
        pairs = [(Path(path).resolve().name, path) for path in adapter if isinstance(path, (str, Path))]
        if len(pairs) < len(adapter):
            wrong = next(path for path in adapter if not isinstance(path, (str, Path)))
            raise TypeError(f"{_OP}: adapter has {kind(wrong)}, expected folders")
    else:
        raise TypeError(f"{_OP}: adapter is {kind(adapter)}, expected a folder, several, or {{name: folder}}")
    folders: dict[str, Path] = {}
    for name, path in pairs:
        if not isinstance(name, str) or not name or not isinstance(path, (str, Path)):
            raise TypeError(f"{_OP}: adapter has {name!r}: {path!r}, expected a name and a folder")
        if name in folders:
            raise ValueError(f"{_OP}: two adapters are called {name!r}: give {{name: folder}} with other names")
        folders[name] = adapter_folder(path)
    return folders


def adapter_folder(name: str | Path) -> Path:
    """An adapter's folder, or this machine's copy of an adapter from the hub; ValueError if there is neither."""
    if Path(name).is_dir():
        return Path(name)
    text = str(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise ValueError(f"{_OP}: there is no folder {text!r} with an adapter")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{_OP}: the adapter {text} is not a folder here, and this machine has no copy of a hub model with that "
            f"name: `hf download {text}` fetches it"
        ) from error


def read(model: nn.Module, layers: Sequence[ExpertsLayer], folder: Path) -> OffloadedAdapter:
    """The adapter in this folder. Raises ValueError, with nothing changed, unless all of it fits the model."""
    adapter = fitted(model, {layer.path: layer.spec for layer in layers}, folder, _OP)
    experts: dict[int, LayerLora] = {}
    for layer in layers:
        if layer.path in adapter.experts:
            by_parameter, ranks = adapter.experts[layer.path], adapter.ranks.get(layer.path)
            factors, scaling, _ = split_factors(layer.spec, by_parameter, ranks)
            experts[layer.index] = LayerLora(factors, scaling)
    return OffloadedAdapter(adapter, experts)


class ModelAdapters:
    """The adapters of one offloaded model by name; `use` selects what the model computes with."""

    def __init__(self, model: PreTrainedModel, adapters: Mapping[str, OffloadedAdapter]) -> None:
        self.model = model
        self._by_name = dict(adapters)
        self._original: dict[str, Tensor] = {}  # the model's own tensors of the modules that are replaced now
        self.active: tuple[str, ...] = ()
        self.injecting = False  # whether peft adds its layers to the model at this moment
        # peft's layers, and their parameters: to look for them takes longer than a token
        self._layers: list[Any] = []
        self._parameters: list[nn.Parameter] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def fitted(self, name: str) -> FittedAdapter:
        return self._by_name[name].fitted

    def for_engine(self) -> dict[str, dict[int, LayerLora]]:
        return {name: adapter.experts for name, adapter in self._by_name.items()}

    def install(self) -> None:
        """Adds peft's layers of all adapters, disabled."""
        if not self._by_name:
            return
        self._check_no_others()
        for name in self._by_name:
            self._inject(name)
        self._switch(())

    def add(self, name: str, adapter: OffloadedAdapter, engine: Engine) -> None:
        self._check_no_others()
        engine.adapters.add(name, adapter.experts)
        self._by_name[name] = adapter
        self._inject(name)
        self._switch(self.active)

    def use(self, names: str | Sequence[str] | None, engine: Engine) -> None:
        """Selects adapters: one, the sum of several, or none. Raises ValueError, with nothing changed."""
        chosen = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        unknown = [name for name in chosen if name not in self._by_name]
        if unknown:
            known = ", ".join(map(repr, self._by_name)) or "none"
            raise ValueError(f"{_OP}: there is no adapter {unknown[0]!r}; known: {known}")
        replaced: dict[str, Tensor] = {}
        for name in chosen:
            twice = sorted(set(replaced) & set(self._by_name[name].fitted.whole))
            if twice:
                raise ValueError(f"{_OP}: adapters {list(chosen)} both replace {twice[0]} whole: use one of them")
            replaced |= self._by_name[name].fitted.whole
        engine.set_adapter(chosen)
        self._switch(chosen)
        self._replace(replaced)
        self.active = chosen

    def remove(self) -> None:
        """Takes everything of the adapters out of the model."""
        self._replace({})
        self._layers, self._parameters = [], []
        if any(adapter.fitted.peft for adapter in self._by_name.values()):
            remove_peft_layers(self.model)

    def _inject(self, name: str) -> None:
        adapter = self._by_name[name].fitted
        if not adapter.peft:
            return
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import cast_adapter_dtype

        ours = self._peft_name(name)
        self.injecting = True
        try:
            with torch_defaults():
                inject_adapter_in_model(lora_config(adapter.config, self.model), self.model, ours)
        except ValueError as error:
            raise ValueError(f"{adapter.folder / CONFIG}: {error}") from error
        finally:
            self.injecting = False
        cast_adapter_dtype(self.model, ours)  # to float32, as PeftModel.from_pretrained does
        self._layers = [layer for _, layer in _peft_layers(self.model)]
        self._parameters = [p for name, p in self.model.named_parameters() if ".lora_" in name]
        for layer in self._layers:
            layer.train(self.model.training)  # peft's new modules are in training, and their dropout would draw
        there = dict(self.model.named_parameters())
        with torch.no_grad():
            for key, tensor in adapter.peft.items():
                parameter = re.sub(r"\.(lora_\w+)(\.|$)", rf".\1.{ours}\2", key.removeprefix(ROOT))
                there[parameter].copy_(tensor)

    def _check_no_others(self) -> None:
        """Raises ValueError if a user has put layers of peft into the model: they have one set of active adapters."""
        for path, layer in _peft_layers(self.model):
            others = [name for name in layer._get_available_adapters() if not name.startswith(PREFIX)]
            if others:
                raise ValueError(
                    f"{_OP}: {path} has the adapter {others[0]!r} of peft already: unload it, and give its folder as "
                    "well, or give no adapter"
                )

    def _switch(self, names: Sequence[str]) -> None:
        peft_names = [self._peft_name(name) for name in names if self._by_name[name].fitted.peft]
        for layer in self._layers:
            layer.enable_adapters(bool(peft_names))
            if peft_names:
                layer.set_adapter(peft_names)
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def _replace(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors and not self._original:
            return
        there = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors_of(self.model)}
        with torch.no_grad():
            for name, original in self._original.items():
                there[name].copy_(original)
            self._original = {name: there[name].to("cpu", copy=True) for name in tensors}
            for name, tensor in tensors.items():
                there[name].copy_(tensor)

    def _peft_name(self, name: str) -> str:
        """peft's name of an adapter: torch's module names may not have dots."""
        return f"{PREFIX}{list(self._by_name).index(name)}"


def _peft_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return ((path, module) for path, module in model.named_modules() if isinstance(module, BaseTunerLayer))
