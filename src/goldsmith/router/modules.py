"""OmniMoE as a module; the routing is computed in float32, whatever the dtype of the projections."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.shapes import check_choice
from ._common import check_count, check_flag, sum_dtype
from ._layers import (
    Float32BatchNorm,
    Placement,
    RouterOutput,
    apply_experts,
    axis_sizes,
    check_experts,
    check_h,
    check_k,
    check_placement,
    over_tokens,
)
from .product_topk.op import WEIGHTS, product_topk

NORM_EPS = 1e-5
ROUTER_NORMS = ("layer", "none", "batch")
UNIT_AT = 32  # experts per token at which the initial w_out is N(0, 1), as in the training runs of docs/router.md


class OmniMoE(nn.Module):
    """y = shared(h) + atomic_experts(h, w_in, w_out, weights, indices),   shared(h) = down(silu(gate h) * (up h))
    weights, indices = product_topk(norm(router_x h), norm(router_y h), k)

    h [..., D] -> y [..., D]; forward(h, return_router=True) gives (y, RouterOutput(x, y, weights, indices)).
    num_experts is a square, sx * sx, or (sx, sy); intermediate_size=0 leaves the shared expert out. Parameters:
    router_x.weight [sx, D], router_y.weight [sy, D], w_in [N, D], w_out [N, D], shared_gate.weight, shared_up.weight
    [I, D], shared_down.weight [D, I].

    router_norm: "layer" normalises each token's s logits (float32, no parameters); "none"; "batch" is a BatchNorm over
    the tokens without parameters, as in the paper. "batch" is not causal in training: a token's routing depends on
    every token of the batch, including later ones. With "layer" and "none", changing a token does not change another
    token's output by a bit. Except with the dense strategy, unselected experts are not read. k, log_softmax, weights:
    see product_topk; activation, strategy, sparse_grad: see atomic_experts. Raises ShapeError, TypeError, ValueError,
    BackendUnavailable. Source: OmniMoE, arXiv 2602.05711; `OmniMoE.paper` makes its choices.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int | tuple[int, int],
        k: int,
        *,
        intermediate_size: int,
        activation: str = "silu",
        router_norm: str = "layer",
        log_softmax: bool = False,
        weights: str = "softmax",
        strategy: str = "auto",
        sparse_grad: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "router.OmniMoE"
        check_count(name, "hidden_size", hidden_size)
        self.sizes = axis_sizes(name, num_experts)
        check_k(name, k, self.sizes)
        if intermediate_size != 0 or type(intermediate_size) is not int:
            check_count(name, "intermediate_size", intermediate_size, ", or 0 for no shared expert")
        check_choice(name, "router_norm", router_norm, ROUTER_NORMS)
        check_choice(name, "weights", weights, WEIGHTS)
        check_flag(name, "log_softmax", log_softmax)
        check_experts(name, activation, strategy, sparse_grad, backend)
        check_placement(name, device, dtype)
        self.hidden_size, self.k, self.intermediate_size = hidden_size, k, intermediate_size
        self.activation, self.router_norm, self.strategy = activation, router_norm, strategy
        self.log_softmax, self.weights, self.sparse_grad, self.backend = log_softmax, weights, sparse_grad, backend
        factory: Placement = {"device": device, "dtype": dtype}
        (sx, sy), n = self.sizes, math.prod(self.sizes)
        self.router_x = nn.Linear(hidden_size, sx, bias=False, **factory)
        self.router_y = nn.Linear(hidden_size, sy, bias=False, **factory)
        if router_norm == "batch":
            precise: Placement = {"device": device, "dtype": sum_dtype(dtype or torch.get_default_dtype())}
            self.router_norm_x = Float32BatchNorm(sx, affine=False, **precise)
            self.router_norm_y = Float32BatchNorm(sy, affine=False, **precise)
        self.w_in = nn.Parameter(torch.empty(n, hidden_size, **factory))
        self.w_out = nn.Parameter(torch.empty(n, hidden_size, **factory))
        if intermediate_size:
            self.shared_gate = nn.Linear(hidden_size, intermediate_size, bias=False, **factory)
            self.shared_up = nn.Linear(hidden_size, intermediate_size, bias=False, **factory)
            self.shared_down = nn.Linear(intermediate_size, hidden_size, bias=False, **factory)
        self.reset_parameters()

    @classmethod
    def paper(cls, hidden_size: int, num_experts: int | tuple[int, int], k: int, **options: Any) -> OmniMoE:
        """OmniMoE with the released code's choices: router_norm="batch", log_softmax=True, weights="exp"

        The paper's Eq. 2 normalises the weights over the k; the released code does not, and neither does this. The k
        weights of unit-variance logits then sum to 0.09 (s=64, k=16), 0.027 (s=256, k=32) or 0.0043 (s=1024, k=32):
        at the start the routed branch contributes almost nothing. Not causal in training.
        """
        return cls(hidden_size, num_experts, k, **{**PAPER, **options})

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights so that h of RMS 1 gives logits and preactivations of variance 1

        w_out is N(0, k / 32), or N(0, 1) without softmax weights. The routed branch's RMS is then
        sqrt(k / 32 * sum_j weights_j^2) times that of the shared branch (activation silu). The sum is 1 / k for k equal
        weights, and at most about e^2 / k for a softmax over sums of variance 2. For every k the routed branch is
        therefore about 0.18 to 0.48 times as large as the shared one.
        """
        for linear in (m for m in self.children() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
        nn.init.normal_(self.w_in, std=self.hidden_size**-0.5)
        nn.init.normal_(self.w_out, std=math.sqrt(self.k / UNIT_AT) if self.weights == "softmax" else 1.0)
        for norm in (m for m in self.children() if isinstance(m, nn.BatchNorm1d)):
            norm.reset_running_stats()

    def forward(self, h: Tensor, *, return_router: bool = False) -> Tensor | tuple[Tensor, RouterOutput]:
        check_h("router.OmniMoE", h, self.hidden_size, self.router_x.weight, return_router)
        x = self._normalised(self.router_x(h), "x")
        y = self._normalised(self.router_y(h), "y")
        weights, indices = product_topk(
            x, y, self.k, log_softmax=self.log_softmax, weights=self.weights, backend=self.backend
        )
        out = apply_experts(self, h, weights, indices)
        if self.intermediate_size:
            out = out + self.shared_down(functional.silu(self.shared_gate(h)) * self.shared_up(h))
        return (out, RouterOutput(x, y, weights, indices)) if return_router else out

    def _normalised(self, logits: Tensor, axis: str) -> Tensor:
        logits = logits.to(sum_dtype(logits.dtype))
        if self.router_norm == "layer":
            return functional.layer_norm(logits, logits.shape[-1:], eps=NORM_EPS)
        if self.router_norm == "batch":
            return over_tokens("router.OmniMoE", "router_norm", getattr(self, f"router_norm_{axis}"), logits)
        return logits

    def extra_repr(self) -> str:
        (sx, sy), k = self.sizes, self.k
        return f"hidden_size={self.hidden_size}, num_experts={sx}*{sy}, k={k}, weights={self.weights!r}"


PAPER = {"router_norm": "batch", "log_softmax": True, "weights": "exp"}
