"""The low-rank factors that stock peft puts on an experts module, read without computing W + BA.

While a module runs, peft's ParamWrapper puts a parametrisation on its parameter. Evaluating it computes W + BA of
every expert. With one adapter, the parametrisation holds both factors, and W is its `original` (peft 0.21). torch
evaluates a parametrisation once when it is registered, and writes to W when it is registered and removed, so that a
backward finds another version of W if a second forward ran in between. `hand_over_factors` avoids both: the wrappers
give their factors to the experts module, and nothing is registered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from .experts_spec import ExpertsSpec, is_experts, is_undispatched, name_of

Factors = tuple[Tensor, Tensor, float]  # lhs, rhs, scaling: W + scaling * lhs @ rhs in the parameter's own layout
_PROXY = "_LoraFactorsProxy"
_HANDED_OVER = "_goldsmith_factors"  # key in an experts module's __dict__ while it runs: {parameter's name: Factors}
_warned: set[str] = set()


def weight_and_factors(module: nn.Module, name: str) -> tuple[Tensor, Factors | None]:
    """A parameter of an experts module, and the factors of what peft adds to it.

    With several active adapters, or a parametrisation from elsewhere: the evaluated weight and None, with one warning.
    """
    parametrizations: Any = getattr(module, "parametrizations", {})
    if name not in parametrizations:
        return getattr(module, name), module.__dict__.get(_HANDED_OVER, {}).get(name)
    parametrization = parametrizations[name]
    if len(parametrization) == 1 and type(parametrization[0]).__name__ == _PROXY:
        original = parametrization.original
        # torch writes the same numbers to W when peft removes the parametrisation: `data` has a version of its own
        return original if original.requires_grad else original.data, (
            parametrization[0].lhs,
            parametrization[0].rhs,
            float(parametrization[0].scaling),
        )
    classes = ", ".join(type(one).__name__ for one in parametrization)
    _warn_once(
        f"goldsmith.hf: {name} of {name_of(module)} is parametrised by {classes}, whose factors are unknown (several "
        "active adapters, or a parametrisation from outside peft): every forward computes W + BA of all experts, which "
        "is correct but slow. Using one adapter at a time avoids it"
    )
    return getattr(module, name), None


def lora_of(
    spec: ExpertsSpec, gate_up: Factors | None, down: Factors | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, float]]:
    """The `lora` and `lora_scaling` arguments of `experts.moe` from peft's factors; gate and up share one A."""
    lora: dict[str, tuple[Tensor, Tensor]] = {}
    scaling: dict[str, float] = {}
    if gate_up is not None and not spec.gated:
        lora["gate"], scaling["gate"] = _upright(spec, gate_up), gate_up[2]
    elif gate_up is not None:
        a, b = _upright(spec, gate_up)
        half = spec.intermediate_size
        gate, up = (b[:, 0::2], b[:, 1::2]) if spec.interleaved else (b[:, :half], b[:, half:])
        lora |= {"gate": (a, gate), "up": (a, up)}
        scaling |= {"gate": gate_up[2], "up": gate_up[2]}
    if down is not None:
        lora["down"], scaling["down"] = _upright(spec, down), down[2]
    return lora, scaling


def hand_over_factors(model: nn.Module) -> None:
    """Makes peft's wrappers of experts in this model give their factors to the experts instead of parametrising W.

    Sets an attribute on each wrapper and patches nothing in peft; `del wrapper._activate_lora` undoes it.
    """
    for wrapper in model.modules():
        if type(wrapper).__name__ == "ParamWrapper" and hasattr(wrapper, "get_delta_factors"):
            inner: Any = wrapper
            if is_experts(inner.get_base_layer()):
                inner._activate_lora = MethodType(_activate_lora, wrapper)


@contextmanager
def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """Hands over the factors of one active adapter; calls peft's own method in every other case."""
    adapters = [name for name in active_adapters if name in self.lora_A]
    param, base = self.get_param(), self.get_base_layer()
    implementation = getattr(getattr(base, "config", None), "_experts_implementation", None)
    ours = implementation == "goldsmith" or is_undispatched(base) and "forward" in base.__dict__
    if not ours or len(adapters) != 1 or self.num_experts == 1 or param.element_size() < 2:
        with type(self)._activate_lora(self, active_adapters):
            yield
        return
    lhs, rhs, scaling = self.get_delta_factors(adapters[0])
    handed_over = base.__dict__.setdefault(_HANDED_OVER, {})
    before = handed_over.get(self.parameter_name)
    handed_over[self.parameter_name] = (lhs, rhs, float(scaling))
    try:
        yield
    finally:
        if before is None:
            handed_over.pop(self.parameter_name, None)
        else:
            handed_over[self.parameter_name] = before


def _upright(spec: ExpertsSpec, factors: Factors) -> tuple[Tensor, Tensor]:
    """A [E, r, in] and B [E, out, r]; for a transposed weight peft stores W^T + A^T B^T."""
    lhs, rhs, _ = factors
    return (lhs.transpose(1, 2), rhs.transpose(1, 2)) if spec.transposed else (rhs, lhs)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=5)
