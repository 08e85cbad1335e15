"""The layers of a model whose experts the engine can compute."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...experts import moe
from ...offload.errors import UnsupportedModel
from ..dispatch import routed
from ..experts_spec import ExpertsSpec, experts_modules, is_undispatched, name_of, spec_of

TOKENS, PAIR = 5, 2  # size of the trial: rows, and number of experts


@dataclass(frozen=True)
class ExpertsLayer:
    """An experts module of a model: its decoder layer's number, its path, and its spec."""

    index: int
    path: str
    module: Any
    spec: ExpertsSpec


def layers_of(model: nn.Module) -> list[ExpertsLayer]:
    """All layers with experts, by number; raises UnsupportedModel, naming the class and the property."""
    kind = type(model).__name__
    _check_untouched(model, kind)
    modules = list(experts_modules(model))
    if not modules:
        raise UnsupportedModel(
            f"{kind} has no experts module that transformers dispatches (a class under @use_experts_implementation): "
            "it is a dense model, or one whose experts goldsmith cannot compute"
        )
    layers: dict[int, ExpertsLayer] = {}
    checked_kinds: dict[tuple[type, ExpertsSpec], None] = {}
    for path, module in modules:
        if path.endswith("base_layer"):
            raise UnsupportedModel(
                f"{kind}: peft has wrapped the parameters of {path} (target_parameters). Offload the plain model "
                "and give the adapter's folder: offload(model, adapter=folder)"
            )
        try:
            spec = spec_of(module)
        except ValueError as error:
            raise UnsupportedModel(_reason(error)) from error
        index = _number(path, kind)
        if index in layers and (plain := _of_images(path, layers[index].path)) is not None:
            if plain == path:
                continue
        elif index in layers:
            raise UnsupportedModel(
                f"{kind} has two experts modules in layer {index}, {layers[index].path} and {path}: the engine "
                "supports one for each layer"
            )
        layers[index] = ExpertsLayer(index, path, module, spec)
        if (type(module), spec) not in checked_kinds:
            _check_eager_forward(module, spec)
            checked_kinds[type(module), spec] = None
    return [layers[index] for index in sorted(layers)]


def _of_images(*paths: str) -> str | None:
    """The path of a layer's second experts, for images (ernie4_5_vl_moe); text never visits them: they stay plain."""
    images = [path for path in paths if "vision" in path]
    return images[0] if len(images) == 1 else None


def _check_untouched(model: nn.Module, kind: str) -> None:
    from ..converted_experts import converted_modules

    if converted_modules(model):
        raise UnsupportedModel(
            f"the experts of this {kind} were packed by goldsmith.hf.convert already: offload the plain model instead"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModel(
            f"{kind} was loaded with quantised parameters ({type(model.hf_quantizer).__name__}): load it with float "
            "weights, and let cpu_format= quantise its experts"
        )
    hooked = next((path for path, module in model.named_modules() if hasattr(module, "_hf_hook")), None)
    if hooked is not None:
        raise UnsupportedModel(
            f"{kind} has accelerate's hooks on {hooked or 'it'} (device_map): load it without device_map; goldsmith "
            "places its parts"
        )


def _reason(error: ValueError) -> str:
    """The message of `spec_of`, without its advice, which is about another way to compute the model."""
    return str(error).removeprefix("goldsmith.hf: ").partition(". Use experts_implementation")[0]


def _number(path: str, kind: str) -> int:
    numbers = [int(part) for part in path.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise UnsupportedModel(
            f"{kind}: {path} contains {len(numbers)} numbers, expected one, the decoder layer's: the layer of these "
            "experts is unknown"
        )
    return numbers[0]


def _check_eager_forward(module: Any, spec: ExpertsSpec) -> None:
    """Raises UnsupportedModel unless the class's eager forward equals the engine's formula, on two small experts."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    small = copy.copy(module)
    small.__dict__ = {name: value for name, value in module.__dict__.items() if not name.startswith("_goldsmith")}
    small._parameters = {
        name: nn.Parameter(draw(PAIR, *parameter.shape[1:]) * parameter.shape[-1] ** -0.5, requires_grad=False)
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    small.num_experts = PAIR
    x, weights = draw(TOKENS, spec.hidden_size), draw(TOKENS, 1).abs() + 0.5
    ids = torch.arange(TOKENS, device="cpu").remainder(PAIR).unsqueeze(1)
    spec = replace(spec, num_experts=PAIR)
    base = spec.base(*(getattr(small, name) for name in spec.names))
    forward = type(module).forward
    eager = forward if is_undispatched(module) else getattr(forward, "__wrapped__", None)
    arguments: tuple[Tensor, ...] = (x, ids, weights)
    if spec.calling == "rows":
        routes = torch.nn.functional.one_hot(ids.squeeze(1), PAIR).T
        arguments = ((x * routes.unsqueeze(2)).flatten(0, 1),)
    if eager is None:
        raise UnsupportedModel(f"{name_of(module)} has no eager forward to compare with")
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        try:
            actual = eager(small, *arguments)
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            raise UnsupportedModel(
                f"{name_of(module)} cannot be tried: its eager forward on {PAIR} experts raised "
                f"{type(error).__name__}: {error}"
            ) from error
        expected = routed(
            spec, arguments, lambda x, ids, w: moe(x, ids, w, base, backend="reference", **spec.options())
        )
    # a loose tolerance: this distinguishes formulas, it does not judge rounding
    if actual.shape != expected.shape or not torch.allclose(
        actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    ):
        raise UnsupportedModel(
            f"{name_of(module)} does not compute a weighted sum of {spec.activation} experts: its eager forward "
            f"differs from that sum by {float((actual - expected).abs().max()):.3g} in a trial with {PAIR} experts"
        )
