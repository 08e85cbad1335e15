"""Experts: the experts of a layer as a module."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.shapes import check_choice
from ._arguments import Base, base_of
from ._checks import check_activation
from ._conventions import finite
from ._weights import sizes
from .lora import LoRA
from .moe.op import MOE, moe


class Experts(nn.Module):
    """y = sum_j weights[j] * expert[ids[j]](x): `experts.moe` over a frozen base, with trainable LoRA

    base is a PackedExperts or the plain tensors of `experts.moe`; activation, alpha, limit and backend are those of
    `experts.moe`. The state dict, `parameters()`, `.to()` and `deepcopy` include only the LoRA: the base is not
    copied, moved or converted. To train a plain base too, call `experts.moe` with the parameters of your own module.

    Raises TypeError and ValueError if the sizes of LoRA and base differ.
    """

    lora: LoRA | None

    def __init__(
        self,
        base: Base,
        lora: LoRA | None = None,
        *,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        gate_up, down, _, _, layout = base_of("experts.Experts", base)
        experts, hidden, inner = sizes(gate_up, down, layout)
        if lora is not None:
            if not isinstance(lora, LoRA):
                raise TypeError(f"experts.Experts: lora is a {type(lora).__name__}, expected an experts.LoRA or None")
            has = (lora.num_experts, lora.hidden_size, lora.intermediate_size)
            if has != (experts, hidden, inner):
                raise ValueError(
                    f"experts.Experts: lora has num_experts={has[0]}, hidden_size={has[1]}, "
                    f"intermediate_size={has[2]}, but the base has {experts}, {hidden}, {inner}"
                )
        check_activation("experts.Experts", activation, limit)
        check_choice("experts.Experts", "backend", backend, ("auto", *MOE.backends))
        self._base = _SharedBase(base)
        self.lora = lora
        self.activation, self.alpha, self.limit = activation, finite("experts.Experts", "alpha", alpha), limit
        self.backend = backend

    @property
    def base(self) -> Base:
        """The base that was passed to the constructor (the same object)."""
        return self._base.value

    @property
    def active_lora(self) -> LoRA | None:
        """The LoRA that `forward` adds."""
        return self.lora

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """hidden_states [..., H], topk_ids [..., k], topk_weights [..., k] -> [..., H] in hidden_states' dtype"""
        return moe(
            hidden_states, topk_ids, topk_weights, self.base,
            lora=self.active_lora, activation=self.activation, alpha=self.alpha, limit=self.limit, backend=self.backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        limit = f", limit={self.limit}" if self.limit is not None else ""
        return f"activation={self.activation!r}{limit}, backend={self.backend!r}"


class _SharedBase:
    """Holds a base outside a module's parameters; deep copies of the module share it."""

    def __init__(self, value: Base) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict) -> _SharedBase:
        return self


_Held = _SharedBase  # whole modules that version 0.1 pickled refer to this name
