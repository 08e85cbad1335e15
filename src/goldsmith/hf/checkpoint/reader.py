"""ModelCheckpoint: a folder of safetensors files, read tensor by tensor under the model's own names."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..experts_spec import ExpertsSpec
from .conversions import ConversionGroup, KeyConversions
from .files import keys_of, weight_files
from .formats.layer import CodedLayer, QuantisedLayer
from .formats.modelopt import settings_beside
from .formats.registry import Schemes
from .formats.scheme import Scheme
from .per_expert import PerExpertTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class ModelCheckpoint:
    """The tensors of a checkpoint folder by the model's own names, each read when it is requested.

    The files are those that `from_pretrained` reads, and `names` maps the model's names to keys in them by
    transformers' own renamings and converters. Raises ValueError for a folder whose weights are ambiguous or
    incomplete, for a damaged file, a pickle, and an unsupported quantisation.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._model = cast("PreTrainedModel", model)
        self.files = weight_files(folder, self._model.config)
        if self.files.pickled:
            raise ValueError(
                f"{folder}: its weights are in {self.files.paths[0].name}, a pickle, which cannot be streamed: write "
                "them as safetensors with from_pretrained and save_pretrained"
            )
        self._open: dict[Path, safe_open] = {}
        self._converted: dict[str, Tensor] = {}  # results of a converter that nobody has asked for yet
        # a key in two files has the last one's tensor, as in transformers
        self._file_of = {key: path for path in self.files.paths for key in keys_of(path)}
        settings = _quantisation(self._model.config) or settings_beside(folder)
        self._schemes = Schemes(folder, settings) if settings else None
        self._layers: dict[str, CodedLayer | None] = {}
        self._marks = {part for scheme in self.schemes for part in scheme.marks}
        # layers with a mark: the stems of their keys
        self._coded_stems = {key.rpartition(".")[0] for key in self._file_of if key.rpartition(".")[2] in self._marks}
        if self._marks and not self._coded_stems:
            raise ValueError(
                f"{folder}: its config says {self.method!r}, but no tensor has that format: none is called "
                f"{', '.join(sorted(self._marks))}"
            )
        conversions = KeyConversions(self._model, self._file_of, self._coded)
        self.names: dict[str, str | ConversionGroup] = {**conversions.unknown, **conversions.sources}
        for name, key in conversions.rivals.items():
            self._check_alike(name, key)

    mapped = True

    @property
    def method(self) -> str | None:
        """The quantisation, by transformers' name; None for plain weights."""
        return self._schemes.method if self._schemes else None

    @property
    def schemes(self) -> list[Scheme]:
        """How the quantised linear layers are stored; empty for plain weights and for mxfp4."""
        return self._schemes.all if self._schemes else []

    @property
    def label(self) -> str:
        """What messages call this checkpoint."""
        return str(self.folder)

    @property
    def sources(self) -> list[Path]:
        """The files that determine the weights."""
        return self.files.sources

    def scheme(self, layer: str) -> Scheme | None:
        """How the linear layer with this name in the model is stored; None if it is not quantised."""
        if self._schemes is None:
            return None
        keys = (self.names.get(f"{layer}.{part}") for part in self._marks)
        key = next((key for key in keys if isinstance(key, str)), None)
        return None if key is None else self._schemes.of(key.rpartition(".")[0])

    def siblings(self, name: str) -> dict[str, str]:
        """The tensors of the same layer: the last part of each name -> the name."""
        return self._by_layer.get(name.rpartition(".")[0], {})

    def experts(self, path: str, spec: ExpertsSpec) -> CodedLayer | None:
        """The experts at this path in codes; None if they are plain weights, or gpt-oss's mxfp4."""
        if path not in self._layers:
            coded = bool(self._marks) and any(name.rpartition(".")[2] in self._marks for name in self.below(path))
            self._layers[path] = QuantisedLayer(self, path, spec) if coded else None
        return self._layers[path]

    @cached_property
    def _by_layer(self) -> dict[str, dict[str, str]]:
        layers: dict[str, dict[str, str]] = {}
        for name in self.names:
            layer, _, part = name.rpartition(".")
            layers.setdefault(layer, {})[part] = name
        return layers

    def below(self, path: str) -> set[str]:
        """Names of the tensors below a module's path, relative to it."""
        return {name[len(path) + 1 :] for name in self.names if name.startswith(path + ".")}

    def stored_name(self, name: str) -> str:
        """The name under which the files store a tensor: its own, or that of a tensor tied to it."""
        if name in self.names:
            return name
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        alike = [other for pair in tied.items() if name in pair for other in pair if other in self.names]
        return alike[0] if alike else name

    def get(self, name: str) -> Tensor:
        """The tensor with this name in the model, converted as transformers converts it."""
        source = self.names[name]
        if isinstance(source, str):
            return self.read(source)
        if name not in self._converted:
            try:
                self._converted |= source.convert(self._model, self.read)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                keys = source.all_keys()
                raise ValueError(
                    f"{self.folder}: {name} cannot be made of {keys[0]} and {len(keys) - 1} more: {error}"
                ) from error
        if name not in self._converted:
            raise ValueError(f"{self.folder}: {source.all_keys()[0]} gives no {name} in this transformers")
        return self._converted.pop(name)

    def per_expert(self, name: str, experts: int) -> PerExpertTensor | None:
        """The tensor [E, ...], to be read expert by expert; None if the files do not store each expert separately."""
        group = self.names[name]
        if isinstance(group, str) or not group.by_expert(experts):
            return None

        def one(e: int) -> Tensor:
            (tensor,) = group.convert(self._model, self.read, e).values()
            return tensor[0]

        first = one(0)
        return PerExpertTensor(one, (experts, *first.shape), first.dtype)

    def _check_alike(self, name: str, key: str) -> None:
        """Raises ValueError unless both tensors that the files hold for one tensor of the model are the same."""
        source = self.names[name]
        first = source if isinstance(source, str) else source.all_keys()[0]
        if isinstance(source, str) and torch.equal(self.read(source), self.read(key)):
            return
        files = " and ".join(dict.fromkeys(self._file_of[k].name for k in (first, key)))
        raise ValueError(f"{self.folder}: {first} and {key} (in {files}) both give {name}: remove one of them")

    def read(self, key: str) -> Tensor:
        """The tensor with this key in the files."""
        path = self._file_of[key]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            return self._open[path].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: {key} cannot be read: {error}") from error

    def _coded(self, key: str) -> bool:
        """Whether a key is part of a quantised weight."""
        if self.method is None:
            return False
        stem, _, part = key.rpartition(".")
        return stem in self._coded_stems and part != "bias" or part.endswith(("_blocks", "_scales"))


def _quantisation(config: PreTrainedConfig) -> dict[str, object]:
    for holder in (config, config.get_text_config()):
        settings = getattr(holder, "quantization_config", None)
        if settings is not None:
            return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return {}
