"""ModelCheckpoint: a folder of safetensors files, read tensor by tensor under the model's own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from . import quantisation
from .conversions import ConversionGroup, ConversionPlan
from .files import keys_of, weight_files
from .per_expert import PerExpertTensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# quant_method in config.json -> the format of `experts.pack` that holds its codes
METHODS = {"compressed-tensors": "int4", "awq": "int4_asym", "fp8": "fp8_block", "mxfp4": "mxfp4"}
Progress = Callable[[int, int | None, str], None]


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
        self._made: dict[str, Tensor] = {}  # results of a converter that nobody has asked for yet
        # a key in two files has the last one's tensor, as in transformers
        self._file_of = {key: path for path in self.files.paths for key in keys_of(path)}
        self.quantisation = _quantisation(self._model.config)
        self.method: str | None = self.quantisation.get("quant_method")
        self._check_quantisation()
        plan = ConversionPlan(self._model, self._file_of, self._coded)
        self.names: dict[str, str | ConversionGroup] = {**plan.unknown, **plan.sources}

    def check_format(self, format: str) -> None:
        stored = METHODS.get(self.method or "")
        if stored and format not in ("auto", stored):
            raise ValueError(
                f"goldsmith.hf.convert: format is {format!r}, but {self.folder} holds {stored} codes ({self.method}), "
                f'which are never requantised: use format="auto" or {stored!r}'
            )

    def below(self, path: str) -> set[str]:
        """Names of the tensors below a module's path, relative to it."""
        return {name[len(path) + 1 :] for name in self.names if name.startswith(path + ".")}

    def stored_name(self, name: str) -> str:
        """The name under which the files hold a tensor: its own, or that of one which the model ties to it."""
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
        if name not in self._made:
            try:
                self._made |= source.convert(self._model, self.read)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                keys = source.all_keys()
                raise ValueError(
                    f"{self.folder}: {name} cannot be made of {keys[0]} and {len(keys) - 1} more: {error}"
                ) from error
        if name not in self._made:
            raise ValueError(f"{self.folder}: {source.all_keys()[0]} gives no {name} in this transformers")
        return self._made.pop(name)

    def per_expert(self, name: str, experts: int) -> PerExpertTensor | None:
        """The tensor [E, ...], if the files hold each expert by itself, so that they can be read one by one."""
        group = self.names[name]
        if isinstance(group, str) or not group.by_expert(experts):
            return None

        def one(e: int) -> Tensor:
            (tensor,) = group.convert(self._model, self.read, e).values()
            return tensor[0]

        first = one(0)
        return PerExpertTensor(one, (experts, *first.shape), first.dtype)

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
        if part in quantisation.PARTS:
            return part != "weight" or any(f"{stem}.{one}" in self._file_of for one in quantisation.CODED_PARTS)
        return part.endswith(("_blocks", "_scales"))

    def _check_quantisation(self) -> None:
        if self.method is None:
            return
        if self.method not in METHODS:
            raise ValueError(
                f"{self.folder}: quantised with {self.method!r}; supported are {', '.join(METHODS)} and plain weights"
            )
        reason = quantisation.unsupported_reason(self.method, self.quantisation)
        if reason:
            raise ValueError(f"{self.folder}: {reason}")


def _quantisation(config: PreTrainedConfig) -> dict[str, Any]:
    for holder in (config, config.get_text_config()):
        settings = getattr(holder, "quantization_config", None)
        if settings is not None:
            return dict(settings if isinstance(settings, dict) else settings.to_dict())
    return {}
