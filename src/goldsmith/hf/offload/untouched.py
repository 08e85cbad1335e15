"""Whether a model is as transformers made it: its classes, their code, and no hooks; and whether it is so still."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...experts import PackedLinear
from .adapters import PREFIX
from .decoder import is_lora_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIBRARIES = ("transformers", "torch", "goldsmith", "peft")
LAYERS = (nn.Linear, nn.Embedding, nn.ModuleList, PackedLinear)
OWN = "_forward_hooks", "_forward_pre_hooks"
PARTS = (nn.ModuleDict, nn.ParameterDict, nn.Identity, nn.Dropout)  # of a layer with LoRA
OF_LORA = "scaling", "lora_variant", "merged_adapters", "_active_adapter"  # what peft changes in place


class Touched(Exception):
    """Somebody has changed the model; the message says where."""


class Untouched:
    """The state of a model that nobody has changed: raises Touched, unless every module is of the model's own file or
    torch's, or LoRA that `offload` has put there, with its class's own forward, no hooks, and not in training

    hooks   ids of hooks that may be there; those on the model itself are called with it
    """

    def __init__(self, model: PreTrainedModel, hooks: Collection[int]) -> None:
        self._model = model
        lora = {id(part) for layer in model.modules() if is_lora_layer(layer) for part in layer.modules()}
        for path, module in model.named_modules():
            if module is not model:
                _check_module(path, module, type(model), hooks, id(module) in lora)
        self._classes = [(kind, kind.forward) for kind in {type(module) for module in model.modules()}]
        for kind, forward in self._classes:
            if not _of_a_library(forward):
                raise Touched(f"the forward of {kind.__name__} is not its own")
        file = sys.modules[type(model).__module__]
        self._functions = {name: value for name, value in vars(file).items() if isinstance(value, FunctionType)}
        for name, function in self._functions.items():
            if not _of_a_library(function):
                raise Touched(f"{name} of {type(model).__module__} was replaced")
        self._file = file
        self._kinds = [(module, type(module)) for module in model.modules()]
        states = [module.__dict__ for module in model.modules()]
        dicts = states + [state[name] for state in states for name in ("_modules", *OWN)]
        dicts += [state[name] for state in states for name in OF_LORA if "lora_A" in state["_modules"]]
        self._dicts = [(state, copy.copy(state)) for state in dicts]
        self._tensors = [
            (tensors, copied, {name: _place(tensor, copied) for name, tensor in tensors.items()})
            for module in model.modules()
            for tensors, copied in ((module._parameters, id(module) in lora), (module._buffers, True))
            if tensors
        ]
        self._attention = _attention(model)
        if self._attention is not None and not _of_a_library(self._attention):
            raise Touched("its attention function was replaced")

    @property
    def still(self) -> bool:
        """Whether nothing has changed since; numbers that were written in place are no change."""
        if _has_any_global_hook() or any(kind.forward is not forward for kind, forward in self._classes):
            return False
        if any(vars(self._file).get(name) is not function for name, function in self._functions.items()):
            return False
        if self._attention is not _attention(self._model):
            return False
        if any(type(module) is not kind for module, kind in self._kinds):
            return False
        if any(
            {name: _place(tensor, copied) for name, tensor in tensors.items()} != places
            for tensors, copied, places in self._tensors
        ):
            return False
        try:
            return all(now == before for now, before in self._dicts)
        except RuntimeError:  # two tensors were compared, so one was replaced
            return False


def _check_module(path: str, module: nn.Module, model: type, hooks: Collection[int], of_lora: bool) -> None:
    if _has_any_global_hook():
        raise Touched("torch has hooks on every module")
    state = module.__dict__
    if any(number not in hooks for name in OWN for number in state[name]) or "forward" in state:
        raise Touched(f"{path} has a hook, or a forward of its own")
    if getattr(module, "parametrizations", None):
        raise Touched(f"{path} has parametrizations")
    kind = type(module)
    if state.get("_compiled_call_impl") is not None or (module.training and kind.__module__ == model.__module__):
        raise Touched(f"{path} is in training, or compiled")
    if is_lora_layer(module):
        others = [name for name in cast("Any", module)._get_available_adapters() if not name.startswith(PREFIX)]
        if others:
            raise Touched(f"{path} has the adapter {others[0]!r} of peft")
    elif not (
        kind in LAYERS or kind.__module__ == model.__module__ or _is_activation(kind) or (of_lora and kind in PARTS)
    ):
        raise Touched(f"{path} is a {kind.__module__}.{kind.__name__}")
    for name, tensor in module._parameters.items():
        if tensor is not None and type(tensor) not in (nn.Parameter, torch.Tensor):
            raise Touched(f"{path}.{name} is a {type(tensor).__name__}")


def _is_activation(kind: type) -> bool:
    return kind.__module__ in ("transformers.activations", "torch.nn.modules.activation")


def _of_a_library(function: object) -> bool:
    """Whether a function, and all that it wraps, are code of a library whose numbers the step computes."""
    while function is not None:
        file = getattr(function, "__globals__", {"__name__": getattr(function, "__module__", "")})["__name__"]
        if str(file).partition(".")[0] not in LIBRARIES:
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _attention(model: PreTrainedModel) -> object:
    return ALL_ATTENTION_FUNCTIONS.get(model.config._attn_implementation)


def _place(tensor: torch.Tensor | None, copied: bool) -> tuple[object, ...]:
    """Where a tensor is; and if the step has a copy of its numbers, how often they were written."""
    if tensor is None or tensor.is_meta:
        return (id(tensor),)
    return id(tensor), tensor.data_ptr(), tensor._version if copied and not tensor.is_inference() else 0
