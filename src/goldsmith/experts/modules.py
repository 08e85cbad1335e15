"""Experts: the experts of a layer as a module; PackedLinear: a dense layer with a packed weight."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ..core.shapes import check_choice
from ._arguments import Base, base_of
from ._checks import check_activation
from ._conventions import finite
from ._weights import sizes
from .linear.op import linear
from .lora import LoRA
from .moe.op import MOE, moe
from .packed.matrix import PackedMatrix, pack_matrix

Weights = TypeVar("Weights")


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


class PackedLinear(nn.Module):
    """y = x W^T + bias: `experts.linear` with a frozen weight, in place of a torch.nn.Linear

    The state dict has the bias only, as a buffer: the weight is not copied, moved or converted.
    """

    bias: Tensor | None

    def __init__(self, weight: PackedMatrix, bias: Tensor | None = None) -> None:
        super().__init__()
        self._weight = _SharedBase(weight)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("bias", bias)

    @classmethod
    def of(
        cls,
        layer: nn.Linear,
        *,
        format: str = "bf16",
        group_size: int | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> PackedLinear:
        """The layer with its weight packed by `experts.pack_matrix`, and a copy of its bias."""
        packed = pack_matrix(layer.weight.detach(), format=format, group_size=group_size, scale_dtype=scale_dtype)
        return cls(packed, None if layer.bias is None else layer.bias.detach().clone())

    @property
    def weight(self) -> PackedMatrix:
        """The weight that was passed to the constructor (the same object)."""
        return self._weight.value

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features] in x's dtype"""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight!r}, bias={self.bias is not None}"


class _SharedBase(Generic[Weights]):
    """Holds weights outside a module's parameters; deep copies of the module share them."""

    def __init__(self, value: Weights) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict) -> _SharedBase[Weights]:
        return self


_Held = _SharedBase  # whole modules that version 0.1 pickled refer to this name
