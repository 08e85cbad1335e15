"""A folder of safetensors files, read tensor by tensor under the names of a transformers model."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from . import codes

# quant_method of config.json -> what an experts' importer is called for; formats as in `experts.pack`
METHODS = {"compressed-tensors": "int4", "awq": "int4_asym", "fp8": "fp8_block", "mxfp4": "mxfp4"}
Progress = Callable[[int, int | None, str], None]


class Checkpoint:
    """Tensors of a folder by the model's own names; nothing is read before it is asked for.

    The names in the files go through transformers' renamings for this model (`.block_sparse_moe.` is `.mlp.`), and
    with or without the base model's prefix. Raises ValueError for a folder without safetensors, a damaged file, a
    missing shard, and a quantisation that is not read here.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder = folder
        self._model: Any = model
        self._open: dict[str, Any] = {}
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

    def _shard(self, file: str) -> Any:
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
        reason = codes.refusal(self.method, self.quantisation)
        if reason:
            raise ValueError(f"{self.folder}: {reason}")


def load_rest(model: Any, source: Checkpoint, *, besides: Sequence[str] = (), progress: Progress | None = None) -> None:
    """Loads every weight that is not an expert's, in the dtype that the model has on the meta device.

    progress   is told (bytes done, bytes in all, what)

    What transformers keeps in float32 in a model of half precision (DeepSeek-V3's e_score_correction_bias, which
    chooses the experts) stays in float32, as `from_pretrained` loads it. Linear layers that a checkpoint stores as
    codes are decoded. What lies below the paths in `besides` stays as it is.
    Raises ValueError for what the files do not hold.
    """
    left = tuple(f"{path}." for path in besides)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing: list[str] = []
    used: set[str] = set()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    wanted = [(name, tensor) for name, tensor in named if tensor.is_meta and not name.startswith(left)]
    done, total = 0, sum(tensor.nbytes for _, tensor in wanted)
    dtypes = _Dtypes(model)
    for name, tensor in wanted:
        value = _value(source, name, used)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total, "reading all but the experts")
        if value is not None and value.shape != tensor.shape:
            raise ValueError(
                f"{source.folder}: {name} is {list(value.shape)}, but the model's config says {list(tensor.shape)}"
            )
        if value is not None:
            _set(model, name, value.to(dtypes.of(name, tensor.dtype)), tensor)
        elif name not in tied and not _is_transient(model, name):
            missing.append(name)
    if missing:
        raise ValueError(
            f"{source.folder}: {len(missing)} tensors of {type(model).__name__} are not there under a name that a "
            f"renaming leads to, first {missing[0]}. Load the model with from_pretrained and convert it in memory"
        )
    model.tie_weights()
    _fill_transient_buffers(model)
    _say_unexpected(model, source, used, left)
    for holder in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if hasattr(holder, "quantization_config"):  # what is in memory now is not that any more
            del holder.quantization_config


class _Dtypes:
    """The dtype in which `from_pretrained` loads a tensor, by the rules of transformers' own plan for the model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plans: dict[torch.dtype, list[tuple[re.Pattern[str], torch.dtype]]] = {}

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """`dtype`: what the tensor has on the meta device, where a plan does not count yet."""
        if dtype not in self._plans:
            plan = self._model._get_dtype_plan(dtype) if hasattr(self._model, "_get_dtype_plan") else {}
            # the names in a plan are patterns, with * for anything, found anywhere in a name
            self._plans[dtype] = [(re.compile(key.replace("*", ".*")), to) for key, to in plan.items()]
        return next((to for pattern, to in self._plans[dtype] if pattern.search(name)), dtype)


def _value(source: Checkpoint, name: str, used: set[str]) -> Tensor | None:
    stem = name.removesuffix(".weight")
    parts = {part for part in codes.PARTS if f"{stem}.{part}" in source.names}
    if name.endswith(".weight") and source.method and parts & codes.SIGNS:
        used.update(f"{stem}.{part}" for part in parts)
        return codes.decode(source.method, {part: source.get(f"{stem}.{part}") for part in parts}, name)
    if name not in source.names:
        return None
    used.add(name)
    return source.get(name)


def _set(model: nn.Module, name: str, value: Tensor, was: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        # `to` gives the mapped file's own pages where the dtype is right: a copy, since a parameter may be written
        module._parameters[leaf] = nn.Parameter(value.clone(), requires_grad=was.requires_grad)
    else:
        module._buffers[leaf] = value.clone()


def _is_transient(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._non_persistent_buffers_set


def _fill_transient_buffers(model: Any) -> None:
    """Buffers that no file holds (rotary frequencies) are computed again, as `from_pretrained` does it."""
    for path, module in model.named_modules():
        empty = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        if not empty:
            continue
        owned: Any = module.parameters(recurse=False)
        for parameter in owned:
            parameter._is_hf_initialized = True  # transformers then leaves it as it is
        marks = {name: float("nan") if buffer.is_floating_point() else -1 for name, buffer in empty.items()}
        module._buffers |= {n: torch.full(b.shape, marks[n], dtype=b.dtype, device="cpu") for n, b in empty.items()}
        with torch.no_grad(), torch.device("cpu"):  # transformers computes on torch's default device
            model._init_weights(module)
        lost = [n for n, mark in marks.items() if not _written(module._buffers[n], mark)]
        if lost:
            raise ValueError(
                f"goldsmith.hf.convert: {path}.{lost[0]} is a buffer that no file holds, and {type(model).__name__} "
                "does not compute it anew. Load the model with from_pretrained and convert it in memory"
            )


def _written(buffer: Tensor | None, mark: float) -> bool:
    """Whether nothing of the mark is left; a boolean cannot show it."""
    if buffer is None or buffer.dtype == torch.bool:
        return False
    return not (buffer.isnan() if buffer.is_floating_point() else buffer == mark).any()


def _say_unexpected(model: Any, source: Checkpoint, used: set[str], left: tuple[str, ...]) -> None:
    from .convert import converted_modules

    known = left + tuple(path + "." for path in converted_modules(model))
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq"]
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    unknown = sorted(
        name
        for name in source.names
        if name not in used
        and name not in tied
        and not name.startswith(known)
        and not any(re.search(pattern, name) for pattern in ignored)
    )
    if unknown:
        warnings.warn(
            f"{source.folder}: {len(unknown)} tensors that {type(model).__name__} has no place for were left out, "
            f"first {unknown[0]}",
            stacklevel=4,
        )


def _quantisation(config: Any) -> dict[str, Any]:
    for holder in (config, config.get_text_config()):
        found = getattr(holder, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, dict) else found.to_dict())
    return {}
