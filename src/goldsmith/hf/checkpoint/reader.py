"""A folder of safetensors files, read tensor by tensor under the names of a transformers model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from . import quantisation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# quant_method of config.json -> what an experts' importer is called for; formats as in `experts.pack`
METHODS = {"compressed-tensors": "int4", "awq": "int4_asym", "fp8": "fp8_block", "mxfp4": "mxfp4"}
Progress = Callable[[int, int | None, str], None]


class ModelCheckpoint:
    """Tensors of a folder by the model's own names; nothing is read before it is asked for.

    The names in the files go through transformers' renamings for this model (`.block_sparse_moe.` is `.mlp.`), and
    with or without the base model's prefix. Raises ValueError for a folder without safetensors, a damaged file, a
    missing shard, and a quantisation that is not read here.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._model = cast("PreTrainedModel", model)
        self._open: dict[str, safe_open] = {}
        self._file_of = self._index()
        self.quantisation = _quantisation(self._model.config)
        self.method: str | None = self.quantisation.get("quant_method")
        self._check_quantisation()

    def check_format(self, format: str) -> None:
        own = METHODS.get(self.method or "")
        if own and format not in ("auto", own):
            raise ValueError(
                f"goldsmith.hf.convert: format is {format!r}, but {self.folder} holds {own} codes ({self.method}), "
                f'which are never quantised again: take format="auto" or {own!r}'
            )

    @cached_property
    def names(self) -> dict[str, str]:
        """The model's name -> the file's name."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        renamings = [t for t in get_model_conversion_mapping(self._model) if isinstance(t, WeightRenaming)]
        prefix = self._model.base_model_prefix + "."
        top = {name.partition(".")[0] + "." for name, _ in self._model.named_children()}
        found: dict[str, str] = {}
        for key in self._file_of:
            name = key
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            if name.partition(".")[0] + "." not in top:
                if prefix in top:  # the files are those of the base model
                    name = prefix + name
                elif name.startswith(prefix):  # the model is the base model
                    name = name.removeprefix(prefix)
            found[name] = key
        return found

    def below(self, path: str) -> set[str]:
        """The names below a module's path, relative to it."""
        return {name[len(path) + 1 :] for name in self.names if name.startswith(path + ".")}

    def get(self, name: str) -> Tensor:
        """A tensor by the model's name."""
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
        found: dict[str, str] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name.startswith("adapter_"):
                continue
            try:
                found |= dict.fromkeys(self._shard(path.name).keys(), path.name)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
        if not found:
            raise ValueError(f"{self.folder}: no safetensors file with weights here")
        return found

    def _check_quantisation(self) -> None:
        if self.method is None:
            return
        if self.method not in METHODS:
            raise ValueError(
                f"{self.folder}: quantised with {self.method!r}; read here are {', '.join(METHODS)}, and plain weights"
            )
        reason = quantisation.refusal(self.method, self.quantisation)
        if reason:
            raise ValueError(f"{self.folder}: {reason}")


def _quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    for holder in (config, config.get_text_config()):
        found = getattr(holder, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return {}
