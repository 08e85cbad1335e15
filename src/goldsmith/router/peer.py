"""PEER, a product-key layer of tiny experts, as a module; with values_only it is a product-key memory."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.shapes import check_choice
from ._common import check_count, check_flag, check_fraction, sum_dtype
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
from .product_topk.op import product_topk

PEER_WEIGHTS = ("softmax", "relu")
QUERY_NORMS = ("none", "layer", "batch")
PRE_NORMS = ("none", "rms", "layer")


class PEER(nn.Module):
    """y = atomic_experts(h', w_in, w_out, weights, indices), with the lists of all heads joined;  h' = pre_norm(h)
    weights, indices of head m = product_topk(<q_0m, keys_0m>, <q_1m, keys_1m>, k),   q = query_norm(query h')

    h [..., D] -> y [..., D]; forward(h, return_router=True) gives (y, RouterOutput), whose tensors are [..., heads, s]
    and [..., heads, k]. num_experts = s * s. Parameters: query.weight [2*heads*key_dim, D], rows by (axis, head, dim);
    keys [2, heads, s, key_dim]; w_in, w_out [N, D], or [heads*N, D] with separate_tables=True (head m uses rows from
    m*N on); those of the norms. values_only=True is a product-key memory: no w_in, y = sum of weights * w_out.

    weights: "softmax" over a head's k sums, or "relu" of the raw sums, which then do not compete. query_norm: "none",
    "layer" (a LayerNorm over key_dim, shared by heads and axes) or "batch" (a BatchNorm over the tokens, as in PEER's
    paper; not causal in training). pre_norm: "none", "rms", "layer". output_norm: a LayerNorm of y. dropout: of act(a),
    as in PEER. activation, strategy, sparse_grad: see atomic_experts. Raises ShapeError, TypeError, ValueError,
    BackendUnavailable. Source: He 2024, arXiv 2407.04153; Lample et al. 2019, arXiv 1907.05242.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        *,
        heads: int = 8,
        key_dim: int | None = None,
        activation: str = "gelu",
        weights: str = "softmax",
        query_norm: str = "none",
        separate_tables: bool = False,
        pre_norm: str = "none",
        output_norm: bool = False,
        values_only: bool = False,
        dropout: float = 0.0,
        strategy: str = "auto",
        sparse_grad: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "router.PEER"
        check_count(name, "hidden_size", hidden_size)
        sizes = axis_sizes(name, num_experts)
        if sizes[0] != sizes[1]:
            raise ValueError(f"{name}: num_experts={tuple(sizes)}, expected a square: both axes have keys of one shape")
        check_k(name, k, sizes)
        check_count(name, "heads", heads)
        key_dim = max(1, hidden_size // 2) if key_dim is None else key_dim
        check_count(name, "key_dim", key_dim)
        check_choice(name, "weights", weights, PEER_WEIGHTS)
        check_choice(name, "query_norm", query_norm, QUERY_NORMS)
        check_choice(name, "pre_norm", pre_norm, PRE_NORMS)
        for flag, value in (("separate_tables", separate_tables), ("output_norm", output_norm)):
            check_flag(name, flag, value)
        check_flag(name, "values_only", values_only)
        check_experts(name, activation, strategy, sparse_grad, backend)
        check_fraction(name, "dropout", dropout)
        check_placement(name, device, dtype)
        self.hidden_size, self.size, self.k, self.heads, self.key_dim = hidden_size, sizes[0], k, heads, key_dim
        self.activation, self.weights, self.query_norm, self.pre_norm_kind = activation, weights, query_norm, pre_norm
        self.separate_tables, self.values_only, self.dropout = separate_tables, values_only, dropout
        self.strategy, self.sparse_grad, self.backend = strategy, sparse_grad, backend
        factory: Placement = {"device": device, "dtype": dtype}
        precise: Placement = {"device": device, "dtype": sum_dtype(dtype or torch.get_default_dtype())}
        rows = self.size**2 * (heads if separate_tables else 1)
        self.pre_norm = {"rms": _RMSNorm, "layer": nn.LayerNorm}.get(pre_norm, _no_norm)(hidden_size, **factory)
        self.query = nn.Linear(hidden_size, 2 * heads * key_dim, bias=False, **factory)
        self.norm: Any = (
            Float32BatchNorm(key_dim, **precise)
            if query_norm == "batch"
            else (nn.LayerNorm if query_norm == "layer" else _no_norm)(key_dim, **factory)
        )
        self.keys = nn.Parameter(torch.empty(2, heads, self.size, key_dim, **factory))
        self.w_in = None if values_only else nn.Parameter(torch.empty(rows, hidden_size, **factory))
        self.w_out = nn.Parameter(torch.empty(rows, hidden_size, **factory))
        self.output_norm = (nn.LayerNorm if output_norm else _no_norm)(hidden_size, **factory)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights so that h of RMS 1 gives logits and preactivations of variance 1."""
        nn.init.normal_(self.query.weight, std=self.hidden_size**-0.5)
        nn.init.normal_(self.keys, std=self.key_dim**-0.5)
        if self.w_in is not None:
            nn.init.normal_(self.w_in, std=self.hidden_size**-0.5)
        nn.init.normal_(self.w_out, std=self.heads**-0.5)
        for norm in (self.pre_norm, self.norm, self.output_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(self, h: Tensor, *, return_router: bool = False) -> Tensor | tuple[Tensor, RouterOutput]:
        check_h("router.PEER", h, self.hidden_size, self.query.weight, return_router)
        normed = h if self.pre_norm is None else self.pre_norm(h)
        x, y = self._logits(normed)
        soft = self.weights == "softmax"
        scores, indices = product_topk(x, y, self.k, weights="softmax" if soft else "none", backend=self.backend)
        weights = scores if soft else torch.relu(scores)
        out = apply_experts(
            self, normed, functional.dropout(weights, self.dropout, self.training), self._folded(indices)
        )
        if self.output_norm is not None:
            out = self.output_norm(out)
        return (out, RouterOutput(x, y, weights, indices)) if return_router else out

    def _logits(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y), the logits [..., heads, s] of each axis, in float32 or wider."""
        queries = self.query(h).unflatten(-1, (2, self.heads, self.key_dim))
        if self.query_norm == "batch":
            queries = over_tokens("router.PEER", "query_norm", self.norm, queries)
        elif self.norm is not None:
            queries = self.norm(queries)
        logits = torch.einsum("...ahd,ahsd->...ahs", queries, self.keys.to(queries.dtype))
        x, y = logits.to(sum_dtype(logits.dtype)).unbind(-3)
        return x, y

    def _folded(self, indices: Tensor) -> Tensor:
        """[..., heads * k] row indices of the tables; with separate tables head m's rows start at m * N."""
        if self.separate_tables:
            n = self.size**2
            first = torch.arange(self.heads, device=indices.device).mul(n).unsqueeze(-1)
            indices = torch.where(indices < 0, -1, indices + first)
        return indices.flatten(-2)

    def extra_repr(self) -> str:
        return f"num_experts={self.size}*{self.size}, k={self.k}, heads={self.heads}, weights={self.weights!r}"


class _RMSNorm(nn.Module):
    """h / max(|h|, 1e-12) * sqrt(D) * (1 + gamma), as in PEER-pytorch: no eps in the root, gamma stored minus 1"""

    def __init__(self, size: int, **factory: Unpack[Placement]) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(size, **factory))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.gamma)

    def forward(self, h: Tensor) -> Tensor:
        to = sum_dtype(h.dtype)
        unit = functional.normalize(h.to(to), dim=-1)
        return (unit * math.sqrt(h.shape[-1]) * (self.gamma.to(to) + 1)).to(h.dtype)


def _no_norm(size: int, **factory: Unpack[Placement]) -> None:
    return None
