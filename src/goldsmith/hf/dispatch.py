"""The experts implementation "goldsmith" of transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..experts import moe
from .experts_spec import experts_modules, name_of, spec_of
from .model_types import base_of
from .peft_factors import lora_of, spare_trials, weight_and_factors

NAME = "goldsmith"
ENGINE = "_goldsmith_engine"  # attribute of an experts module whose weights goldsmith.offload holds: what computes it


def register(model: nn.Module | None = None) -> None:
    """Makes "goldsmith" an experts implementation of transformers; with a model, selects it there, and sees to it.

    Registering is done on import too; afterwards `model.set_experts_implementation("goldsmith")` and
    `from_pretrained(..., experts_implementation="goldsmith")` work. The first does nothing, without a word, for a model
    whose source file has no `@use_experts_implementation`: `register(model)` raises ValueError then, and also for
    experts that "goldsmith" cannot compute, with class and flag.

    On a model with stock peft adapters (`target_parameters`), call it after peft: the wrappers of this model then no
    longer evaluate W + BA once per forward to try it.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if model is None:
        return
    found = list(experts_modules(model))
    if not found:
        raise ValueError(
            f"goldsmith.hf.register: {type(model).__name__} has no experts module that transformers dispatches (a "
            "class under @use_experts_implementation), so set_experts_implementation would do nothing, without a word"
        )
    for _, module in found:
        spec_of(module)
    base = base_of(model)
    base.set_experts_implementation(NAME)
    for path, module in found:
        came = getattr(module.config, "_experts_implementation", None)
        if came != NAME:
            raise ValueError(
                f"goldsmith.hf.register: set_experts_implementation({NAME!r}) did nothing for {path} "
                f"({name_of(module)}), whose implementation is still {came!r}: the source file of "
                f"{type(base).__name__} ({type(base).__module__}) has no @use_experts_implementation. "
                f"Give experts_implementation={NAME!r} when the model is made, or use goldsmith.hf.convert"
            )
    spare_trials(model)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for "goldsmith": y = `experts.moe` of an experts module's own weights.

    Or the engine of `goldsmith.offload`, where the module's weights are in a store.
    """
    engine = module.__dict__.get(ENGINE)
    if engine is not None:
        return engine(hidden_states, top_k_index, top_k_weights)
    spec = spec_of(module)
    gate_up, gate_up_factors = weight_and_factors(module, "gate_up_proj")
    down, down_factors = weight_and_factors(module, "down_proj")
    base: tuple[Tensor, ...] = (spec.rows(gate_up), spec.columns(down))
    if spec.biased:
        gate_up_bias = weight_and_factors(module, "gate_up_proj_bias")[0]
        base = (*base, spec.rows(gate_up_bias), weight_and_factors(module, "down_proj_bias")[0])
    lora, scaling = lora_of(spec, gate_up_factors, down_factors)
    return moe(
        hidden_states,
        without_sentinels(top_k_index, spec.num_experts, is_parallel(module)),
        weights_like(top_k_weights, hidden_states),
        base,
        lora=lora or None,
        lora_scaling=scaling or 1.0,
        **spec.options(),
    )


def is_parallel(module: nn.Module) -> bool:
    """Whether ids >= E are other ranks' experts. Without the flag (5.17) transformers itself takes them for that."""
    return bool(getattr(module, "_is_expert_parallel", True))


def without_sentinels(ids: Tensor, num_experts: int, expert_parallel: bool) -> Tensor:
    """Under expert parallelism ids >= E belong to another rank: -1, which `experts.moe` skips."""
    return torch.where(ids < num_experts, ids, -1) if expert_parallel else ids


def weights_like(weights: Tensor, x: Tensor) -> Tensor:
    """Routing weights in a dtype that `experts.moe` takes beside x."""
    return weights if weights.dtype in (torch.float32, x.dtype) else weights.to(x.dtype)
