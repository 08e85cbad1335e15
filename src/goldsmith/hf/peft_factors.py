"""Stock peft around an experts module: its low-rank factors, read without making W + BA.

peft's ParamWrapper puts a parametrisation on a parameter while the module runs. Evaluating it makes W + BA of every
expert; with one adapter it holds both factors, and W is its `original` (peft 0.21). torch evaluates a parametrisation
once more by itself, when it is put on, to see that dtype and shape stay: `spare_trials` leaves that out.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .experts_spec import ExpertsSpec, is_experts, name_of

Factors = tuple[Tensor, Tensor, float]  # lhs, rhs, scaling: W + scaling * lhs @ rhs in the parameter's own layout
_PROXY = "_LoraFactorsProxy"
_warned: set[str] = set()


def weight_and_factors(module: nn.Module, name: str) -> tuple[Tensor, Factors | None]:
    """A parameter of an experts module, and what peft would add to it.

    Several active adapters, or a parametrisation that is not peft's: the evaluated weight, with one warning.
    """
    parametrizations: Any = getattr(module, "parametrizations", {})
    if name not in parametrizations:
        return getattr(module, name), None
    added = parametrizations[name]
    if len(added) == 1 and type(added[0]).__name__ == _PROXY:
        return added.original, (added[0].lhs, added[0].rhs, float(added[0].scaling))
    what = ", ".join(type(one).__name__ for one in added)
    _warn_once(
        f"goldsmith.hf: {name} of {name_of(module)} goes through {what}, whose factors are not known (several active "
        "adapters, or a parametrisation that is not peft's): W + BA of all experts is made at every forward, which is "
        "right, and slow. One adapter at a time avoids it"
    )
    return getattr(module, name), None


def lora_of(
    spec: ExpertsSpec, gate_up: Factors | None, down: Factors | None
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, float]]:
    """peft's factors as the dict that `experts.moe` takes, and its scalings: gate and up share one A."""
    lora: dict[str, tuple[Tensor, Tensor]] = {}
    scaling: dict[str, float] = {}
    if gate_up is not None:
        a, b = _upright(spec, gate_up)
        half = spec.intermediate_size
        gate, up = (b[:, 0::2], b[:, 1::2]) if spec.interleaved else (b[:, :half], b[:, half:])
        lora |= {"gate": (a, gate), "up": (a, up)}
        scaling |= {"gate": gate_up[2], "up": gate_up[2]}
    if down is not None:
        lora["down"], scaling["down"] = _upright(spec, down), down[2]
    return lora, scaling


def spare_trials(model: nn.Module) -> None:
    """peft's wrappers of experts in this model, one by one, put their parametrisation on without torch's trial of it.

    An attribute of each wrapper, not of peft: `del wrapper._activate_lora` undoes it.
    """
    for wrapper in model.modules():
        if type(wrapper).__name__ == "ParamWrapper" and hasattr(wrapper, "get_delta_factors"):
            inner: Any = wrapper
            if is_experts(inner.get_base_layer()):
                inner._activate_lora = MethodType(_activate_lora, wrapper)


@contextmanager
def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """As peft's own, which is called where there is not exactly one adapter; and `unsafe`: no trial."""
    from peft.tuners.lora import layer

    adapters = [name for name in active_adapters if name in self.lora_A]
    param = self.get_param()
    if len(adapters) != 1 or self.num_experts == 1 or param.element_size() < 2 or not hasattr(layer, _PROXY):
        with type(self)._activate_lora(self, active_adapters):
            yield
        return
    base, trained = self.get_base_layer(), param.requires_grad
    proxy = getattr(layer, _PROXY)(*self.get_delta_factors(adapters[0]))
    parametrize.register_parametrization(base, self.parameter_name, proxy, unsafe=True)
    base.parametrizations[self.parameter_name].original.requires_grad_(trained)
    try:
        with parametrize.cached():
            yield
    finally:
        self._remove_parametrizations()


def _upright(spec: ExpertsSpec, factors: Factors) -> tuple[Tensor, Tensor]:
    """A [E, r, in] and B [E, out, r]; for a transposed weight peft keeps W^T + A^T B^T."""
    lhs, rhs, _ = factors
    return (lhs.transpose(1, 2), rhs.transpose(1, 2)) if spec.transposed else (rhs, lhs)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=5)
