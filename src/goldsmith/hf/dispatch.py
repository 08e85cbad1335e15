"""The experts implementation "goldsmith" for transformers."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..experts import moe
from .experts_spec import ExpertsSpec, experts_modules, is_undispatched, name_of, spec_of
from .model_types import base_of
from .peft_factors import hand_over_factors, lora_of, weight_and_factors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

NAME = "goldsmith"
ENGINE = "_goldsmith_engine"  # key in an experts module's __dict__: the offload engine that computes it


def register(model: nn.Module | None = None) -> None:
    """Registers the experts implementation "goldsmith" in transformers; with a model, also selects it there and checks.

    Importing goldsmith.hf registers it too; then `model.set_experts_implementation("goldsmith")` and
    `from_pretrained(..., experts_implementation="goldsmith")` work. But set_experts_implementation silently does
    nothing if the source file of the model's class has no `@use_experts_implementation`; `register(model)` raises
    ValueError in that case, and for experts that goldsmith cannot compute, naming class and flag.

    On a model with stock peft adapters (`target_parameters`), call it after peft: its wrappers then give A and B to the
    experts, and W + BA is never computed.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if model is None:
        return
    modules = list(experts_modules(model))
    if not modules:
        raise ValueError(
            f"goldsmith.hf.register: {type(model).__name__} has no experts module that transformers dispatches (a "
            "class under @use_experts_implementation), so set_experts_implementation would silently do nothing"
        )
    for _, module in modules:
        spec_of(module)
    base = base_of(model)
    if any(not is_undispatched(module) for _, module in modules):
        base.set_experts_implementation(NAME)
    for path, module in modules:
        if is_undispatched(module):
            call_ours(module)
            continue
        config = cast("PreTrainedConfig", module.config)
        if config not in (base.config, base.config.get_text_config()):  # a vision tower's, which is not reached
            config._experts_implementation = NAME
        implementation = getattr(module.config, "_experts_implementation", None)
        if implementation != NAME:
            raise ValueError(
                f"goldsmith.hf.register: set_experts_implementation({NAME!r}) did nothing for {path} "
                f"({name_of(module)}), whose implementation is still {implementation!r}: the source file of "
                f"{type(base).__name__} ({type(base).__module__}) has no @use_experts_implementation. "
                f"Give experts_implementation={NAME!r} when the model is made, or use goldsmith.hf.convert"
            )
    hand_over_factors(model)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls for "goldsmith": y = `experts.moe` with the module's own weights.

    If goldsmith.offload holds the module's weights in a store, its engine computes y instead.
    """
    engine = module.__dict__.get(ENGINE)
    if engine is not None:
        if getattr(module, "parametrizations", None):
            raise ValueError(
                f"goldsmith.offload: peft has wrapped the parameters of {name_of(module)}, but an engine computes "
                "these experts from their store and would not see the adapter: give it to offload(adapter=...) or to "
                "load_adapter of what offload() returned"
            )
        return engine(hidden_states, top_k_index, top_k_weights)
    spec = spec_of(module)
    first, first_factors = weight_and_factors(module, spec.first)
    down, down_factors = weight_and_factors(module, "down_proj")
    biases = [weight_and_factors(module, name)[0] for name in spec.names[2:]]
    lora, scaling = lora_of(spec, first_factors, down_factors)
    return moe(
        hidden_states,
        without_sentinels(top_k_index, spec.num_experts, is_parallel(module)),
        weights_like(top_k_weights, hidden_states),
        spec.base(first, down, *biases),
        lora=lora or None,
        lora_scaling=scaling or 1.0,
        **spec.options(),
    )


def call_ours(module: nn.Module) -> None:
    """Makes an experts module that transformers does not dispatch compute with `experts_forward`.

    Sets an attribute on the module; `del module.forward` undoes it.
    """
    cast("Any", module).forward = MethodType(_undispatched_forward, module)


def _undispatched_forward(module: nn.Module, *arguments: Tensor) -> Tensor:
    spec = module.__dict__.get("_goldsmith_spec") or spec_of(module)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts_forward(module, x, ids, weights)

    return routed(spec, arguments, run)


def routed(spec: ExpertsSpec, arguments: tuple[Tensor, ...], run: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """run(x, ids, weights) for the arguments of the module's own forward.

    "rows" (Llama 4): x [E T, H] holds T rows for each expert, already multiplied by the router's score, and zeros for
    tokens that do not visit it. An expert without biases maps zeros to zeros, so these rows are skipped.
    """
    if spec.calling == "routed":
        return run(*arguments)
    rows = arguments[0].reshape(-1, spec.hidden_size)
    experts = torch.arange(spec.num_experts, device=rows.device).repeat_interleave(rows.shape[0] // spec.num_experts)
    ids = torch.where((rows != 0).any(-1), experts, -1)
    return run(rows, ids.unsqueeze(1), rows.new_ones(rows.shape[0], 1))


def is_parallel(module: nn.Module) -> bool:
    """Whether ids >= E mean experts of other ranks; without the flag (transformers 5.17) they always do."""
    return bool(getattr(module, "_is_expert_parallel", True))


def without_sentinels(ids: Tensor, num_experts: int, expert_parallel: bool) -> Tensor:
    """ids with -1, which `experts.moe` skips, for ids >= E if these are experts of other ranks."""
    return torch.where(ids < num_experts, ids, -1) if expert_parallel else ids


def weights_like(weights: Tensor, x: Tensor) -> Tensor:
    """The routing weights in a dtype that `experts.moe` accepts together with x."""
    return weights if weights.dtype in (torch.float32, x.dtype) else weights.to(x.dtype)
