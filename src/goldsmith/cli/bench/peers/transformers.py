"""transformers' experts under stock peft with the same LoRA, eager and through grouped products; torch's own product.

peft's pair for gate_up_proj has one A: gate and up side by side in twice the rank, as `goldsmith.hf` writes adapters.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..experts import Moe
from ..subject import Subject, Variant

PARAMETERS = ("gate_up_proj", "down_proj")


def _missing() -> str | None:
    for package in ("transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


def _in_bfloat16(subject: Subject) -> bool:
    return isinstance(subject, Moe) and subject.options["layout"].partition(":")[0] in ("", "bf16")


def _prepare(subject: Subject, implementation: str) -> Variant | None:
    if not isinstance(subject, Moe) or not _in_bfloat16(subject):
        return None
    model, leaves = _experts(subject, implementation)
    fresh = subject.fresh_leaves()
    leaves += [t for name in ("x", "topk_weights") if (t := fresh[name]) is not None]

    def call(given: dict[str, Any]) -> Tensor:
        return model(given["x"], given["topk_ids"], given["topk_weights"])

    note = f"transformers, {implementation}" + (", LoRA by peft" if subject.entry.sizes["r"] else "")
    return Variant(_NAMES[implementation], subject.in_turn(fresh, call), leaves, note=note)


def _experts(subject: Moe, implementation: str) -> tuple[nn.Module, list[Tensor]]:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = subject.entry.sizes
    config = Qwen3MoeConfig(
        hidden_size=sizes["H"], moe_intermediate_size=sizes["I"], num_experts=sizes["E"], num_experts_per_tok=sizes["k"]
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    for name, weight in zip(PARAMETERS, subject.weights(), strict=True):
        setattr(experts, name, nn.Parameter(weight.data, requires_grad=False))  # peft writes to it, in its own way
    return _with_peft(subject, experts) if sizes["r"] else (experts, [])


def _with_peft(subject: Moe, experts: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    import peft

    from ....hf.adapter.layout import join, to_peft

    rank, scaling = subject.entry.sizes["r"], subject.scaling
    whole = nn.Module()
    whole.experts = experts
    config = peft.LoraConfig(
        target_parameters=[f"experts.{name}" for name in PARAMETERS], r=rank, lora_alpha=scaling * rank,
        rank_pattern={"experts.gate_up_proj": 2 * rank}, alpha_pattern={"experts.gate_up_proj": scaling * 2 * rank},
    )  # fmt: skip
    with warnings.catch_warnings():  # peft looks for the patterns among modules; it uses them for the parameters
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
        wrapped: Any = peft.get_peft_model(whole, config)
    pairs = subject.lora(subject.tensors)
    half = join(pairs, dict.fromkeys(pairs, scaling), subject.entry.sizes["I"], interleaved=False, shared=False)
    if half is None:
        raise ValueError("the case has no LoRA")
    wanted = {2 * rank: to_peft(half.a, half.b), rank: to_peft(*pairs["down"])}
    leaves: list[Any] = []
    module: Any
    for module in wrapped.modules():
        if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
            for parameter, value in zip(
                (module.lora_A["default"].weight, module.lora_B["default"].weight),
                wanted[module.r["default"]],
                strict=True,
            ):
                parameter.data = value.detach().clone()
                leaves.append(parameter)
    return wrapped.base_model.model.experts, leaves


def _product(subject: Subject) -> Variant | None:
    """The FLOPs of the layer as one dense product: what torch reaches without experts, gathering and LoRA."""
    if not _in_bfloat16(subject) or not subject.entry.sizes["r"]:
        return None
    sizes = subject.entry.sizes
    rows = torch.randn(sizes["T"] * sizes["k"], sizes["H"], dtype=subject.entry.dtype, device=subject.device)
    matrix = torch.randn(3 * sizes["I"], sizes["H"], dtype=subject.entry.dtype, device=subject.device).T

    def product() -> Tensor:
        return rows @ matrix

    note = "one dense product of the same FLOPs"
    return Variant("product", product, [], note=note, comparable=False, gradients=lambda: product)


_NAMES = {"eager": "transformers", "grouped_mm": "grouped_mm"}


def _peer(name: str, missing: Callable[[], str | None], prepare: Callable[[Subject], Variant | None]) -> Any:
    return SimpleNamespace(NAME=name, missing=missing, prepare=prepare)


PEERS: list[ModuleType] = [
    _peer("transformers", _missing, lambda subject: _prepare(subject, "eager")),
    _peer("grouped_mm", _missing, lambda subject: _prepare(subject, "grouped_mm")),
    _peer("product", lambda: None, _product),
]
