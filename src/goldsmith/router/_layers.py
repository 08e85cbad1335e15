"""Parts that the family's modules share: norms, argument checks, and the call of the experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.shapes import ShapeError, check_choice, kind
from ._common import FLOATS, check_count, check_device, check_flag, dtype_name
from ._strategy import STRATEGIES
from .atomic_experts.op import ACTIVATIONS, ATOMIC_EXPERTS, atomic_experts
from .product_topk.op import MOST_PAIRS, PRODUCT_TOPK


class RouterOutput(NamedTuple):
    """Logits x and y of product_topk, and its weights and indices before dropout and the offsets of separate tables."""

    x: Tensor
    y: Tensor
    weights: Tensor
    indices: Tensor


class ExpertLayer(Protocol):
    """The attributes of a module that `apply_experts` reads."""

    activation: str
    strategy: str
    sparse_grad: bool
    backend: str

    @property
    def w_in(self) -> Tensor | None: ...

    @property
    def w_out(self) -> Tensor: ...


class Placement(TypedDict):
    """Where a module's tensors are created, and in what dtype."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class Float32BatchNorm(nn.BatchNorm1d):
    """A BatchNorm that keeps its statistics in float32 when a model is moved to a 16-bit dtype.

    Under activation checkpointing the statistics move once per step, not again when the backward recomputes the batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.running_mean is not None and self.running_var is not None and is_recomputation():
            unseen = self.running_mean.clone(), self.running_var.clone()  # checkpointing counts the saved tensors
            return functional.batch_norm(input, *unseen, self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(input)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32BatchNorm:
        def keep(t: Tensor) -> Tensor:
            moved = fn(t)
            narrowed = t.is_floating_point() and moved.is_floating_point() and moved.element_size() < 4
            return t.to(moved.device, torch.float32) if narrowed else moved

        return super()._apply(keep, recurse)


def is_recomputation() -> bool:
    """Whether a backward is running: activation checkpointing then recomputes a forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def over_tokens(name: str, option: str, norm: nn.BatchNorm1d, values: Tensor) -> Tensor:
    """norm(values) with all leading dimensions as tokens; in training it needs at least 2 tokens."""
    rows = values.reshape(math.prod(values.shape[:-1]), values.shape[-1])
    if norm.training and rows.shape[0] < 2:
        raise ValueError(
            f"{name}: {option}='batch': a BatchNorm over the tokens needs at least 2 of them in training, got "
            f"{rows.shape[0]}; use {option}='layer', or .eval()"
        )
    precise = values.dtype if norm.running_var is None else norm.running_var.dtype
    with torch.autocast(values.device.type, enabled=False):
        return norm(rows.to(precise)).to(values.dtype).view(values.shape)


def axis_sizes(name: str, num_experts: int | tuple[int, int]) -> tuple[int, int]:
    """(sx, sy) from a square number or a pair; their product must fit an int32 index."""
    sizes = _axis_sizes(name, num_experts)
    if math.prod(sizes) > MOST_PAIRS:
        raise ValueError(
            f"{name}: num_experts={sizes[0]} * {sizes[1]}, expected at most 2^31 - 1 in all: indices are int32"
        )
    return sizes


def _axis_sizes(name: str, num_experts: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(num_experts, (tuple, list)):
        if len(num_experts) != 2:
            raise ValueError(
                f"{name}: num_experts={tuple(num_experts)}, expected two sizes (sx, sy), or a square number"
            )
        for size in num_experts:
            check_count(name, "num_experts", size, " for each of (sx, sy)")
        return num_experts[0], num_experts[1]
    check_count(name, "num_experts", num_experts, ", a square, or a pair (sx, sy)")
    root = math.isqrt(num_experts)
    if root * root != num_experts:
        raise ValueError(
            f"{name}: num_experts={num_experts} is not a square; use {root * root} or {(root + 1) ** 2}, "
            "or pass a pair (sx, sy)"
        )
    return root, root


def check_k(name: str, k: int, sizes: tuple[int, int]) -> None:
    check_count(name, "k", k)
    if k > math.prod(sizes):
        raise ValueError(f"{name}: k={k}, but there are only {sizes[0]} * {sizes[1]} experts")


def check_experts(name: str, activation: str, strategy: str, sparse_grad: bool, backend: str) -> None:
    check_choice(name, "activation", activation, ACTIVATIONS)
    check_choice(name, "strategy", strategy, STRATEGIES)
    check_flag(name, "sparse_grad", sparse_grad)
    known = dict.fromkeys(("auto", *PRODUCT_TOPK.backends, *ATOMIC_EXPERTS.backends))
    check_choice(name, "backend", backend, tuple(known))


def check_placement(name: str, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    if device is not None and type(device) is not int:  # torch also accepts the number of a GPU
        check_device(name, device)
    if dtype is not None and dtype not in FLOATS:
        wanted = ", ".join(dtype_name(one) for one in FLOATS)
        raise TypeError(f"{name}: dtype={dtype!r}, expected None or one of: {wanted}")


def check_h(name: str, h: Tensor, hidden_size: int, weight: object, return_router: bool) -> None:
    """Raises for a wrong h. weight: the first projection's, whose dtype h must have unless autocast is on."""
    check_flag(name, "return_router", return_router)
    if not isinstance(h, Tensor):
        raise TypeError(f"{name}: h is {kind(h)}, expected a torch.Tensor")
    if h.dim() == 0 or h.shape[-1] != hidden_size:
        raise ShapeError(f"{name}: h is {list(h.shape)}, expected [*batch, {hidden_size}]")
    like = getattr(weight, "dtype", h.dtype)  # not a float if another library packed the weight
    if h.dtype != like and like.is_floating_point and not torch.is_autocast_enabled(h.device.type):
        raise TypeError(
            f"{name}: h is {dtype_name(h.dtype)}, but the layer is {dtype_name(like)}; "
            f"convert one (h.to(torch.{dtype_name(like)})), or use torch.autocast"
        )


def apply_experts(layer: ExpertLayer, h: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """atomic_experts of the layer's tables, computed in their dtype; under autocast h may have another one."""
    y = atomic_experts(
        h.to(layer.w_out.dtype), layer.w_in, layer.w_out, weights.flatten(h.dim() - 1), indices,
        activation=layer.activation, strategy=layer.strategy, sparse_grad=layer.sparse_grad,
        backend=layer.backend,
    )  # fmt: skip
    return y.to(h.dtype)
