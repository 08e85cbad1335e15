"""The arguments of `experts.moe` for a transformers experts module, read from its flags.

transformers' `use_experts_implementation` sets flags on every experts module (has_gate, has_bias, is_transposed,
is_concatenated, has_post_expert_norm). They describe the layout of the weights but not the gate: a class may define
its own `_apply_gate`. The known gates are listed here by class. Each is also tried on a few numbers, so that a gate
that a later version of transformers changes is refused rather than computed wrongly. Flags that an earlier version
lacks (5.17 has neither has_post_expert_norm nor _is_expert_parallel) get the value that this version implies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .model_types import ExpertsModule

LARGEST = 1 << 22  # of any size of experts
MARKS = ("config", "has_bias", "is_transposed", "_apply_gate")  # attributes that the decorator sets in every version 5

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# experts that transformers calls directly, without its dispatch -> the flags that a decorator would set, and how their
# forward is called: "routed" (x, ids, weights) or "rows" (x [E T, H], the rows of each expert, zeros where not routed)
LARGEST = 1 << 22
UNDISPATCHED: dict[str, dict[str, Any]] = {
    "Llama4TextExperts": {"is_transposed": True, "calling": "rows"},
    "Step3p7Experts": {"is_transposed": False, "calling": "routed"},
}

# act_fn's class, or the name of a function -> our activation. GELUTanh, NewGELU and FastGELU are one formula
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
    "silu": "silu",
    "gelu": "gelu",
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
    """Sizes and flags of an experts module, in the terms of `experts.pack` and `experts.moe`.

    Experts without a gate, act(W x), are computed as act(W x) * u with u = 0 x + 1, so their base always has biases.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    alpha: float
    limit: float | None
    transposed: bool
    interleaved: bool
    biased: bool
    gated: bool = True
    calling: str = "routed"

    @property
    def first(self) -> str:
        """The name of the first projection's parameter."""
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def swapped_in_peft(self) -> bool:
        """Whether peft takes the inputs of these weights for outputs: it knows a transposed layout by a flag alone."""
        return self.transposed and self.calling == "rows"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the module's parameters, weights first."""
        weights = (self.first, "down_proj")
        return (*weights, *(f"{name}_bias" for name in weights)) if self.biased else weights

    def options(self) -> SharedOptions:
        """The keywords that `experts.moe` and `experts.Experts` share."""
        return {"activation": self.activation, "alpha": self.alpha, "limit": self.limit}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The experts module's parameters in its own layout: {name: shape}."""
        e, h, i = self.num_experts, self.hidden_size, self.intermediate_size
        rows = 2 * i if self.gated else i
        weights = ((e, h, rows), (e, i, h)) if self.transposed else ((e, rows, h), (e, h, i))
        return dict(zip(self.names, (*weights, (e, rows), (e, h))))

    def base(
        self, first: Tensor, down: Tensor, first_bias: Tensor | None = None, down_bias: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The base of `experts.moe` from the module's own parameters; views where the layout allows it."""
        if self.gated:
            base = (self.canonical_gate_up(first), self.canonical_down(down))
            if first_bias is None or down_bias is None:
                return base
            return (*base, self.canonical_gate_up(first_bias), down_bias)
        gate, e, i = self.canonical_down(first), self.num_experts, self.intermediate_size
        bias = gate.new_zeros(e, i) if first_bias is None else first_bias
        return (
            torch.cat((gate, torch.zeros_like(gate)), 1),
            self.canonical_down(down),
            torch.cat((bias, torch.ones_like(bias)), 1),
            gate.new_zeros(e, self.hidden_size) if down_bias is None else down_bias,
        )

    def canonical_gate_up(self, weight: Tensor) -> Tensor:
        """gate_up [E, 2I, H] or [E, H, 2I], or its bias [E, 2I], with all gates before all ups, as [E, 2I, H].

        A view, except for interleaved weights, which are copied.
        """
        if weight.dim() == 3 and self.transposed:
            weight = weight.transpose(1, 2)
        return torch.cat((weight[:, 0::2], weight[:, 1::2]), 1) if self.interleaved else weight

    def canonical_down(self, weight: Tensor) -> Tensor:
        """down [E, H, I] or [E, I, H] as [E, H, I]; a view."""
        return weight.transpose(1, 2) if self.transposed else weight

    def own_layout(
        self, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None, down_bias: Tensor | None
    ) -> dict[str, Tensor]:
        """The module's parameters by name, from gate_up [E, 2I, H] (all gates before all ups) and down [E, H, I]."""

        def rows(tensor: Tensor) -> Tensor:
            if not self.gated:
                return tensor[:, : self.intermediate_size]
            return torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2) if self.interleaved else tensor

        weights = (rows(gate_up), down)
        if self.transposed:
            weights = (weights[0].transpose(1, 2), weights[1].transpose(1, 2))
        biases = () if gate_up_bias is None or down_bias is None else (rows(gate_up_bias), down_bias)
        return dict(zip(self.names, (*weights, *biases)))


def is_experts(module: nn.Module) -> bool:
    """Whether this is a module of experts: one that transformers dispatches, or one of `UNDISPATCHED`."""
    return is_dispatched(module) or is_undispatched(module)


def is_dispatched(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward to a registered experts implementation."""
    return all(hasattr(module, mark) for mark in MARKS)


def is_undispatched(module: nn.Module) -> bool:
    """Whether this is an experts module of transformers that its model calls directly."""
    cls = _class(module)
    return cls.__name__ in UNDISPATCHED and cls.__module__.startswith("transformers.models.")


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every experts module that goldsmith can replace, also inside peft's wrappers."""
    for path, module in model.named_modules():
        if is_experts(module):
            yield path, module


def spec_of(module: nn.Module) -> ExpertsSpec:
    """The spec of an experts module; raises ValueError with class and flag if goldsmith cannot compute it."""
    cached = module.__dict__.get("_goldsmith_spec")
    if cached is not None:
        return cached
    spec = _read(module)
    # a graph must not depend on numbers, so it skips the check; `register(model)` has done it before
    if torch.compiler.is_compiling():
        return spec
    _check_gate(module, spec)
    module.__dict__["_goldsmith_spec"] = spec
    return spec


def name_of(module: nn.Module) -> str:
    """The name of the class, also while torch renames it because a parameter is parametrised."""
    return _class(module).__name__


def _class(module: nn.Module) -> type:
    made_by_torch = hasattr(module, "parametrizations")
    return type(module).__mro__[1] if made_by_torch else type(module)


def _unsupported(module: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"goldsmith.hf: {name_of(module)} cannot be computed here: {why}. "
        'Use experts_implementation="grouped_mm" or "eager" for this model'
    )


def _read(module: nn.Module) -> ExpertsSpec:
    if getattr(module, "has_post_expert_norm", False):
        raise _unsupported(module, "has_post_expert_norm=True (a norm after each expert)")
    flags = UNDISPATCHED.get(name_of(module), {})
    gated = bool(getattr(module, "has_gate", True))
    transposed = bool(flags.get("is_transposed", getattr(module, "is_transposed", False)))
    activation, alpha, limit = _gate(module) if gated else (_activation(module), 1.702, None)
    experts, first, second = _shape(module, "gate_up_proj" if gated else "up_proj")
    hidden, rows = (first, second) if transposed else (second, first)
    for what, size in (("experts", experts), ("inputs", hidden), ("rows", rows)):
        if not 0 < size <= LARGEST:  # a wrong number in a config: the checks below would compute with it
            raise ValueError(f"goldsmith.hf: {name_of(module)} has {size:,} {what}; 1 to {LARGEST:,} are supported")
    return ExpertsSpec(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=rows // 2 if gated else rows,
        activation=activation,
        alpha=alpha,
        limit=limit,
        transposed=transposed,
        interleaved=not getattr(module, "is_concatenated", True),
        biased=bool(getattr(module, "has_bias", False)),
        gated=gated,
        calling=flags.get("calling", "routed"),
    )


def _shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """The shape of a parameter, without evaluating its parametrisation."""
    parametrizations: Any = getattr(module, "parametrizations", {})
    weight = parametrizations[name].original if name in parametrizations else getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.dim() != 3:
        actual = "none" if weight is None else f"{type(weight).__name__} {list(getattr(weight, 'shape', []))}"
        raise _unsupported(module, f"{name} is {actual}, expected one tensor [experts, out, in]")
    if weight.dtype not in FLOATS:
        raise _unsupported(
            module, f"{name} is {weight.dtype}, expected plain floats; quantised weights are read from a checkpoint"
        )
    return weight.shape[0], weight.shape[1], weight.shape[2]


def _gate(module: nn.Module) -> tuple[str, float, float | None]:
    if is_undispatched(module):
        limit = getattr(module, "limit", None)
        if limit is not None and math.isfinite(limit):
            raise _unsupported(module, f"it clamps after the activation, at {limit} (swiglu_limits)")
        return _activation(module), 1.702, None
    owner = next(c for c in _class(module).__mro__ if "_apply_gate" in vars(c))
    written_by = vars(owner)["_apply_gate"]
    if written_by.__name__ == "_default_apply_gate" and written_by.__module__ == "transformers.integrations.moe":
        return _activation(module), 1.702, None
    if owner.__name__ not in GATES or not owner.__module__.startswith("transformers.models."):
        raise _unsupported(
            module, f"_apply_gate is overridden by {owner.__module__}.{owner.__name__}, which goldsmith does not know"
        )
    activation, alpha, limit = GATES[owner.__name__]
    return (
        activation or _activation(module),
        float(getattr(module, alpha)) if alpha else 1.702,
        float(getattr(module, limit)) if limit else None,
    )


def _activation(module: nn.Module) -> str:
    act = cast("ExpertsModule", module).act_fn
    name = type(act).__name__ if isinstance(act, nn.Module) else getattr(act, "__name__", type(act).__name__)
    if name == "GELU":
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if name not in ACTIVATIONS:
        raise _unsupported(module, f"act_fn is {name}; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _check_gate(module: nn.Module, spec: ExpertsSpec) -> None:
    """Raises ValueError unless the module's gate equals our formula, on numbers inside and outside the limit."""
    reach = 2.0 * spec.limit if spec.limit else 4.0
    values = torch.linspace(-reach, reach, 9, dtype=torch.float32, device="cpu")
    g, u = (v.reshape(-1) for v in torch.meshgrid(values, values, indexing="ij"))
    gate_up = torch.stack((g, u), -1).reshape(-1) if spec.interleaved else torch.cat((g, u))
    if not spec.gated:
        u = torch.ones_like(g)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if spec.gated and hasattr(module, "_apply_gate"):
            actual = cast("ExpertsModule", module)._apply_gate(gate_up.unsqueeze(0)).squeeze(0).double()
        else:
            actual = (cast("ExpertsModule", module).act_fn(g) * u).double()
        expected = activate(g.double(), u.double(), spec)
    attribute = "_apply_gate" if spec.gated and hasattr(module, "_apply_gate") else "activation"
    # a loose tolerance: this distinguishes formulas, it does not judge rounding
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3):
        raise _unsupported(
            module, f"its {attribute} is not {spec.activation} with limit={spec.limit!r} in this transformers"
        )


def activate(g: Tensor, u: Tensor, spec: ExpertsSpec) -> Tensor:
    """act(g, u), by the formulas of `experts.moe`."""
    if spec.limit is not None:
        g, u = g.clamp(max=spec.limit), u.clamp(-spec.limit, spec.limit)
    if spec.activation == "swiglu_oai":
        return g * torch.sigmoid(spec.alpha * g) * (u + 1)
    if spec.activation == "relu2":
        return F.relu(g).square() * u
    if spec.activation == "silu":
        return F.silu(g) * u
    return F.gelu(g, approximate="tanh" if spec.activation == "gelu_tanh" else "none") * u
