"""ConvertedExperts: the module that `convert` puts in place of an experts module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..experts import Experts, LoRA, PackedExperts
from .dispatch import routed, weights_like, without_sentinels
from .experts_spec import ExpertsSpec


class ConvertedExperts(Experts):
    """`experts.Experts` with the signature of transformers' experts modules: y = moe(x) over packed weights.

    forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H] in hidden_states' dtype (Llama 4:
    as `dispatch.routed` says). Only the
    LoRA's tensors are parameters. `spec` describes the layout of the model's own weights, which peft's files use.
    """

    lora_enabled = True  # peft's `disable_adapter` turns the LoRA off for a while

    def __init__(
        self, base: PackedExperts, lora: LoRA | None, *, spec: ExpertsSpec, expert_parallel: bool, backend: str = "auto"
    ) -> None:
        super().__init__(base, lora, **spec.options(), backend=backend)
        self.nbytes = base.nbytes
        self.spec = spec
        self.num_experts = spec.num_experts
        self._is_expert_parallel = expert_parallel

    @property
    def active_lora(self) -> LoRA | None:
        return self.lora if self.lora_enabled else None

    def set_base(self, base: Sequence[Tensor | None], backend: str) -> None:
        """Replaces the base by the same experts as plain tensors, and sets the backend that computes with them."""
        self._base = type(self._base)(base)
        self.backend = backend

    @property
    def base_tensors(self) -> list[Tensor]:
        """The tensors that hold the base."""
        base = self.base
        if isinstance(base, PackedExperts):
            base = (base.gate_up, base.down, base.gate_up_bias, base.down_bias)
        return [tensor for tensor in base if tensor is not None]

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, local_metadata: dict[str, object], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Refuses the plain weights of these experts, which `strict=False` would drop without a word."""
        plain = next((n for n in state_dict if n.startswith(prefix) and not n.startswith(f"{prefix}lora.")), None)
        if plain is not None:
            error_msgs.append(
                f"goldsmith.hf: {plain} is a plain weight, and these experts are packed: it would be ignored, and the "
                "LoRA would keep its present values. Read the LoRA with goldsmith.hf.load_adapter. Trainer resumes a "
                "run whose checkpoints hold the adapter alone: give the model to peft.get_peft_model, then to convert"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def forward(self, *arguments: Tensor) -> Tensor:
        return routed(self.spec, arguments, self._run)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ids = without_sentinels(top_k_index, self.num_experts, self._is_expert_parallel)
        return super().forward(hidden_states, ids, weights_like(top_k_weights, hidden_states))


def converted_modules(model: nn.Module) -> dict[str, ConvertedExperts]:
    """{path: module} of every converted experts module."""
    return {path: module for path, module in model.named_modules() if isinstance(module, ConvertedExperts)}


def freeze_other_parameters(model: nn.Module) -> None:
    """Freezes every parameter except the experts' LoRA and peft's adapters, which stay as they are."""
    ours = {id(p) for module in converted_modules(model).values() for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in ours and "lora_" not in name:
            parameter.requires_grad_(False)
