"""What an experts module of transformers computes, read from its flags: the arguments of `experts.moe`.

transformers' `use_experts_implementation` puts flags on every experts module (has_gate, has_bias, is_transposed,
is_concatenated, has_post_expert_norm). They say how the weights lie, not which gate is applied: a class may bring its
own `_apply_gate`. Those that are known are listed here by class; each is also tried on a few numbers, so that a later
version of transformers that changes one is refused, not computed wrongly. A flag that an earlier version does not have
(5.17 knows neither has_post_expert_norm nor _is_expert_parallel) has the value that such a version takes for granted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model_types import ExpertsModule

MARKS = ("config", "has_bias", "is_transposed", "_apply_gate")  # what the decorator of every version 5 leaves behind

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# act_fn's class -> our activation. GELUTanh, NewGELU and FastGELU are one formula
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}

# class that defines its own _apply_gate -> (activation or None for act_fn's, attribute of alpha, attribute of limit)
GATES: dict[str, tuple[str | None, str | None, str | None]] = {
    "GptOssExperts": ("swiglu_oai", "alpha", "limit"),
    "OpenAIPrivacyFilterExperts": ("swiglu_oai", "alpha", "limit"),
    "MiniMaxM3VLExperts": ("swiglu_oai", "swiglu_alpha", "swiglu_limit"),
    "DeepseekV4Experts": (None, None, "limit"),
    "HYV4Experts": ("silu", None, "swiglu_limit"),
    "Glm5NextTextExperts": ("silu", None, "swiglu_limit"),
    "BeamExperts": (None, None, None),
}


class SharedOptions(TypedDict):
    """The keywords that `experts.moe` and `experts.Experts` share."""

    activation: str
    alpha: float
    limit: float | None


@dataclass(frozen=True)
class ExpertsSpec:
    """Sizes and flags of an experts module, in the words of `experts.pack` and `experts.moe`."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    alpha: float
    limit: float | None
    transposed: bool
    interleaved: bool
    biased: bool

    def options(self) -> SharedOptions:
        """The keywords that `experts.moe` and `experts.Experts` share."""
        return {"activation": self.activation, "alpha": self.alpha, "limit": self.limit}

    def rows(self, weight: Tensor) -> Tensor:
        """gate_up of the model [E, 2I, H] or [E, H, 2I], and its bias [E, 2I], all gates before all ups: [E, 2I, H].

        A view where the model stores them so (a transposed weight is a transposed view), a copy where they alternate.
        """
        if weight.dim() == 3 and self.transposed:
            weight = weight.transpose(1, 2)
        return torch.cat((weight[:, 0::2], weight[:, 1::2]), 1) if self.interleaved else weight

    def columns(self, weight: Tensor) -> Tensor:
        """down of the model, [E, H, I] or [E, I, H], as [E, H, I]."""
        return weight.transpose(1, 2) if self.transposed else weight


def is_experts(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward to a registered experts implementation."""
    return all(hasattr(module, mark) for mark in MARKS)


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every experts module that dispatches; a peft wrapper's inner module has its own path."""
    for path, module in model.named_modules():
        if is_experts(module):
            yield path, module


def spec_of(module: nn.Module) -> ExpertsSpec:
    """The spec of an experts module. Raises ValueError with its class and the flag that we cannot compute."""
    known = module.__dict__.get("_goldsmith_spec")
    if known is not None:
        return known
    spec = _read(module)
    if (
        torch.compiler.is_compiling()
    ):  # a trial depends on numbers, which a graph may not; `register(model)` has made it
        return spec
    _try(module, spec)
    module.__dict__["_goldsmith_spec"] = spec
    return spec


def name_of(module: nn.Module) -> str:
    """The class's name; torch renames a class while one of its parameters is parametrised."""
    return _class(module).__name__


def _class(module: nn.Module) -> type:
    made_by_torch = hasattr(module, "parametrizations")
    return type(module).__mro__[1] if made_by_torch else type(module)


def _refuse(module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"goldsmith.hf: {name_of(module)} cannot be computed here: {why}. "
        'Take experts_implementation="grouped_mm" or "eager" for this model'
    )


def _read(module: nn.Module) -> ExpertsSpec:
    if not getattr(module, "has_gate", True):
        raise _refuse(module, "has_gate=False (an expert without a gate)")
    if getattr(module, "has_post_expert_norm", False):
        raise _refuse(module, "has_post_expert_norm=True (a norm after each expert)")
    activation, alpha, limit = _gate(module)
    experts, first, second = _shape(module, "gate_up_proj")
    hidden, double = (first, second) if module.is_transposed else (second, first)
    return ExpertsSpec(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=double // 2,
        activation=activation,
        alpha=alpha,
        limit=limit,
        transposed=bool(module.is_transposed),
        interleaved=not getattr(module, "is_concatenated", True),
        biased=bool(module.has_bias),
    )


def _shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """The shape of a parameter, without evaluating a parametrisation of it."""
    parametrizations: Any = getattr(module, "parametrizations", {})
    weight = parametrizations[name].original if name in parametrizations else getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.dim() != 3:
        came = "none" if weight is None else f"{type(weight).__name__} {list(getattr(weight, 'shape', []))}"
        raise _refuse(module, f"{name} is {came}, wanted one tensor [experts, out, in]")
    if weight.dtype not in FLOATS:
        raise _refuse(module, f"{name} is {weight.dtype}, wanted plain floats; codes are read from their checkpoint")
    return weight.shape[0], weight.shape[1], weight.shape[2]


def _gate(module: nn.Module) -> tuple[str, float, float | None]:
    owner = next(c for c in _class(module).__mro__ if "_apply_gate" in vars(c))
    written_by = vars(owner)["_apply_gate"]
    if written_by.__name__ == "_default_apply_gate" and written_by.__module__ == "transformers.integrations.moe":
        return _activation(module), 1.702, None
    if owner.__name__ not in GATES or not owner.__module__.startswith("transformers.models."):
        raise _refuse(module, f"_apply_gate is overridden by {owner.__module__}.{owner.__name__}, which is not known")
    activation, alpha, limit = GATES[owner.__name__]
    return (
        activation or _activation(module),
        float(getattr(module, alpha)) if alpha else 1.702,
        float(getattr(module, limit)) if limit else None,
    )


def _activation(module: nn.Module) -> str:
    act = cast("ExpertsModule", module).act_fn
    name = type(act).__name__
    if name == "GELU":
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if name not in ACTIVATIONS:
        raise _refuse(module, f"act_fn is {name}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _try(module: nn.Module, spec: ExpertsSpec) -> None:
    """Holds the module's own gate to the formula that we would compute, on numbers within and beyond the limit."""
    reach = 2.0 * spec.limit if spec.limit else 4.0
    values = torch.linspace(-reach, reach, 9, dtype=torch.float32, device="cpu")
    g, u = (v.reshape(-1) for v in torch.meshgrid(values, values, indexing="ij"))
    together = torch.stack((g, u), -1).reshape(-1) if spec.interleaved else torch.cat((g, u))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        came = cast("ExpertsModule", module)._apply_gate(together.unsqueeze(0)).squeeze(0).double()
        wanted = activate(g.double(), u.double(), spec)
    # loose on purpose: this tells formulas apart, it does not judge their rounding
    if came.shape != wanted.shape or not torch.allclose(came, wanted, rtol=1e-3, atol=1e-3):
        raise _refuse(module, f"its _apply_gate is not {spec.activation} with {spec.limit=} in this transformers")


def activate(g: Tensor, u: Tensor, spec: ExpertsSpec) -> Tensor:
    """act(g, u) of `experts.moe`'s formulas."""
    if spec.limit is not None:
        g, u = g.clamp(max=spec.limit), u.clamp(-spec.limit, spec.limit)
    if spec.activation == "swiglu_oai":
        return g * torch.sigmoid(spec.alpha * g) * (u + 1)
    if spec.activation == "relu2":
        return F.relu(g).square() * u
    if spec.activation == "silu":
        return F.silu(g) * u
    return F.gelu(g, approximate="tanh" if spec.activation == "gelu_tanh" else "none") * u
