"""ModelCheckpoint: a folder of safetensors files, read tensor by tensor under the model's own names."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...offload.store.source_key import files_of
from ..experts_spec import ExpertsSpec
from .formats.layer import CodedLayer, QuantisedLayer
from .formats.modelopt import settings_beside
from .formats.registry import Schemes
from .formats.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Progress = Callable[[int, int | None, str], None]


class ModelCheckpoint:
    """The tensors of a checkpoint folder by the model's own names, each read when it is requested.

    File names are mapped by transformers' renamings for this model (`.block_sparse_moe.` becomes `.mlp.`), with or
    without the base model's prefix. Raises ValueError for a folder without safetensors files, a damaged file, a missing
    shard, or an unsupported quantisation.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._model = cast("PreTrainedModel", model)
        self._open: dict[str, safe_open] = {}
        self._file_of = self._index()
        settings = _quantisation(self._model.config) or settings_beside(folder)
        self._schemes = Schemes(folder, settings) if settings else None
        self._layers: dict[str, CodedLayer | None] = {}
        self._marks = {part for scheme in (self._schemes.all if self._schemes else []) for part in scheme.marks}
        if self._marks and not any(name.rpartition(".")[2] in self._marks for name in self.names):
            raise ValueError(
                f"{folder}: its config says {self.method!r}, but no tensor is stored so: none is called "
                f"{', '.join(sorted(self._marks))}"
            )

    @property
    def method(self) -> str | None:
        """The quantisation, by transformers' name; None for plain weights."""
        return self._schemes.method if self._schemes else None

    @property
    def label(self) -> str:
        """What messages call this checkpoint."""
        return str(self.folder)

    @property
    def files(self) -> list[Path]:
        """The files that determine the weights."""
        return files_of(self.folder)

    def scheme(self, layer: str) -> Scheme | None:
        """How the linear layer with this name in the model is stored; None if it cannot be quantised."""
        if self._schemes is None:
            return None
        parts = (part for scheme in self._schemes.all for part in scheme.marks)
        key = next((self.names[name] for part in parts if (name := f"{layer}.{part}") in self.names), None)
        return None if key is None else self._schemes.of(key.rpartition(".")[0])

    def siblings(self, name: str) -> dict[str, str]:
        """The tensors of the same layer: the last part of each name -> the name."""
        return self._by_layer.get(name.rpartition(".")[0], {})

    def experts(self, path: str, spec: ExpertsSpec) -> CodedLayer | None:
        """The experts at this path in codes; None if they are plain weights, or gpt-oss's mxfp4."""
        if path not in self._layers:
            coded = any(name.rpartition(".")[2] in self._marks for name in self.below(path))
            self._layers[path] = QuantisedLayer(self, path, spec) if coded else None
        return self._layers[path]

    @cached_property
    def _by_layer(self) -> dict[str, dict[str, str]]:
        layers: dict[str, dict[str, str]] = {}
        for name in self.names:
            layer, _, part = name.rpartition(".")
            layers.setdefault(layer, {})[part] = name
        return layers

    @cached_property
    def names(self) -> dict[str, str]:
        """The model's name of each tensor -> its name in the files."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [t for t in get_model_conversion_mapping(self._model) if isinstance(t, WeightRenaming)]
        prefix = self._model.base_model_prefix + "."
        top = {name.partition(".")[0] + "." for name, _ in self._model.named_children()}
        names: dict[str, str] = {}
        for key in self._file_of:
            name = key
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            if name.partition(".")[0] + "." not in top:
                if prefix in top:  # the files hold the base model
                    name = prefix + name
                elif name.startswith(prefix):  # the model is the base model
                    name = name.removeprefix(prefix)
            names[name] = key
        return names

    def below(self, path: str) -> set[str]:
        """Names of the tensors below a module's path, relative to it."""
        return {name[len(path) + 1 :] for name in self.names if name.startswith(path + ".")}

    def get(self, name: str) -> Tensor:
        """The tensor with this name in the model."""
        key = self.names[name]
        try:
            return self._shard(self._file_of[key]).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder / self._file_of[key]}: {key} cannot be read: {error}") from error

    def _shard(self, file: str) -> safe_open:
        if file not in self._open:
            self._open[file] = safe_open(self.folder / file, "pt")
        return self._open[file]

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise ValueError(f"{index}: not an index of shards: {error}") from error
            missing = sorted({f for f in files.values() if not (self.folder / f).is_file()})
            if missing:
                raise ValueError(f"{self.folder}: {len(missing)} shards of its index are missing, first {missing[0]}")
            return files
        files_by_name: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name.startswith("adapter_"):
                continue
            try:
                files_by_name |= dict.fromkeys(self._shard(path.name).keys(), path.name)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
        if not files_by_name:
            raise ValueError(f"{self.folder}: no safetensors file with weights here")
        return files_by_name


def _quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    for holder in (config, config.get_text_config()):
        settings = getattr(holder, "quantization_config", None)
        if settings is not None:
            return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return {}
