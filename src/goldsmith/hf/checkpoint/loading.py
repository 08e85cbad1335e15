"""load_other_weights: loads all weights of a checkpoint outside the experts into a model on the meta device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..converted_experts import converted_modules
from .formats.linear import check_plain, decoded
from .source import Progress, WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_other_weights(
    model: PreTrainedModel, source: WeightSource, *, skip: Sequence[str] = (), progress: Progress | None = None,
    replace: Mapping[str, Callable[[nn.Module], None]] | None = None,
) -> None:  # fmt: skip
    """Loads every weight outside the experts, in the dtype that the model has on the meta device.

    skip       paths of modules that are left as they are
    progress   called with (bytes done, bytes in total, description)
    replace    by path of a module: puts another one in its place, and is called when all its tensors are there; they
               may be pages of the mapped files

    Weights that transformers keeps in float32 in a half-precision model (DeepSeek-V3's e_score_correction_bias, which
    affects the choice of experts) stay in float32, as with `from_pretrained`. Linear layers that the checkpoint stores
    as codes are decoded. Raises ValueError for weights that the files lack.
    """
    skipped = tuple(f"{path}." for path in skip)
    missing: set[str] = set()
    used: set[str] = set()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    wanted = [(name, tensor) for name, tensor in named if tensor.is_meta and not name.startswith(skipped)]
    done, total = 0, sum(tensor.nbytes for _, tensor in wanted)
    dtypes = _Dtypes(model)
    for name, tensor in wanted:
        value = _value(source, name, used)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total, "reading all but the experts")
        if value is not None and value.shape != tensor.shape:
            raise ValueError(
                f"{source.label}: {name} is {list(value.shape)}, but the model's config says {list(tensor.shape)}"
            )
        if value is not None:
            instead = (replace or {}).get(name.rpartition(".")[0])
            # a copy: if the dtype is unchanged, `to` returns the mapped file's own pages, but parameters may be written
            value = value.to(dtypes.of(name, tensor.dtype), copy=source.mapped and instead is None)
            module = _assign(model, name, value, tensor)
            if instead is not None and not any(own.is_meta for own in module.parameters(recurse=False)):
                instead(module)
            del value, module
        elif not _is_transient(model, name):
            missing.add(name)
    experts = (*skipped, *(f"{path}." for path in converted_modules(model)))
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {
        target: origin
        for target, origin in tied.items()
        if not target.startswith(experts) and not origin.startswith(experts)
    }
    # with the missing names transformers ties no two tensors that the files hold with different values
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    if missing:
        tensors, verb = (f"{len(missing)} tensors", "are") if len(missing) > 1 else ("1 tensor", "is")
        raise ValueError(
            f"{source.label}: {tensors} of {type(model).__name__} {verb} missing, even under the names that "
            f"transformers renames, first {min(missing)}. The folder is incomplete, or has another model's config.json"
        )
    fill_transient_buffers(model)
    _warn_unexpected(model, source, used, skipped)
    for holder in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if hasattr(holder, "quantization_config"):  # the weights in memory are no longer quantised
            del holder.quantization_config


class _Dtypes:
    """The dtype in which `from_pretrained` loads each tensor, by transformers' own plan for the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._plans: dict[torch.dtype, list[tuple[re.Pattern[str], torch.dtype]]] = {}

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of tensor `name`, which has `dtype` on the meta device, where the plan is not yet applied."""
        if dtype not in self._plans:
            plan = self._model._get_dtype_plan(dtype) if hasattr(self._model, "_get_dtype_plan") else {}
            # names in a plan are patterns with * for anything, matched anywhere in a name
            self._plans[dtype] = [(re.compile(key.replace("*", ".*")), to) for key, to in plan.items()]
        return next((to for pattern, to in self._plans[dtype] if pattern.search(name)), dtype)


def _value(source: WeightSource, name: str, used: set[str]) -> Tensor | None:
    value = decoded(source, source.siblings(name), name, used)
    if value is not None:
        return value
    if name not in source.names:
        return None
    used.add(name)
    return check_plain(source, name, source.get(name)) if source.method else source.get(name)


def _assign(model: nn.Module, name: str, value: Tensor, old: Tensor) -> nn.Module:
    """Sets the parameter or buffer; returns its module."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = value
    return module


def _is_transient(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._non_persistent_buffers_set


def fill_transient_buffers(model: PreTrainedModel) -> None:
    """Recomputes buffers that no file holds (rotary frequencies), as `from_pretrained` does."""
    for path, module in model.named_modules():
        empty = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        if not empty:
            continue
        for parameter in module.parameters(recurse=False):
            parameter.__dict__["_is_hf_initialized"] = True  # keeps transformers from initialising it again
        marks = {name: float("nan") if buffer.is_floating_point() else -1 for name, buffer in empty.items()}
        module._buffers |= {n: torch.full(b.shape, marks[n], dtype=b.dtype, device="cpu") for n, b in empty.items()}
        with torch.no_grad(), torch.device("cpu"):  # transformers computes on torch's default device
            _owner(model, path)._init_weights(module)
        lost = [n for n, mark in marks.items() if not _written(module._buffers[n], mark)]
        if lost:
            raise ValueError(
                f"goldsmith.hf.convert: {path}.{lost[0]} is a buffer that no file holds, and {type(model).__name__} "
                "does not recompute it. Load the model with from_pretrained and convert it in memory"
            )


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost model of transformers around a module (a vision tower has its own class), which initialises it."""
    from transformers import PreTrainedModel

    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:k])) for k in range(len(parts), 0, -1))
    return next((module for module in around if isinstance(module, PreTrainedModel)), model)


def _written(buffer: Tensor | None, mark: float) -> bool:
    """Whether every mark has been overwritten; a boolean buffer cannot show it and counts as not written."""
    if buffer is None or buffer.dtype == torch.bool:
        return False
    return not (buffer.isnan() if buffer.is_floating_point() else buffer == mark).any()


def _warn_unexpected(model: PreTrainedModel, source: WeightSource, used: set[str], skipped: tuple[str, ...]) -> None:
    known = skipped + tuple(path + "." for path in converted_modules(model))
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
            f"{source.label}: ignored {len(unknown)} tensors that {type(model).__name__} has no place for, "
            f"first {unknown[0]}",
            stacklevel=4,
        )
