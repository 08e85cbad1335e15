"""Gated connections (Qwen4's form): low-rank gates collapse the normalised streams; the streams are not mixed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core.shapes import check_choice
from ._common import check_numbers
from .gated_pre.op import GATED_PRE
from .inject.op import INJECT
from .modules import Output, check_x, join, normed, sizes, split


class _Gated(nn.Module):
    """The parameters of the gates, and the operator before the layer; `injects` adds injection weights."""

    inject: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        n: int,
        rank: int,
        rms_eps: float,
        backend: str,
        *,
        injects: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        name = f"mhc.{type(self).__name__}"
        self.dim, self.n, self.rank = sizes(name, dim=dim, n=n, rank=rank)
        check_numbers(name, rms_eps=rms_eps)
        check_choice(name, "backend", backend, ("auto", *GATED_PRE.backends))
        self.rms_eps, self.backend = rms_eps, backend
        new = lambda *shape: nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))  # noqa: E731
        self.norm_weight = new(n * dim)
        self.down, self.up = new(rank, n * dim), new(n * dim, rank)
        self.inject = new(n, n * dim) if injects else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.norm_weight.zero_()
        for weight in (self.down, self.up, self.inject):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """h_in and h_post"""
        check_x(f"mhc.{type(self).__name__}", x, self.n, self.dim)
        gamma = 1.0 + self.norm_weight.to(torch.promote_types(torch.float32, self.norm_weight.dtype))
        weights = (gamma, self.down, self.up, self.inject)
        h_in, h_post = GATED_PRE(x, *weights, rms_eps=self.rms_eps, post_mult=2.0, backend=self.backend)
        return h_in, h_post

    def extra_repr(self) -> str:
        return f"dim={self.dim}, n={self.n}, rank={self.rank}"


class GatedConnection(_Gated):
    """h_in, h_post = gated_pre(x);  f = layer(norm(h_in));  x_next[i] = x[i] + h_post[i] * f

    x [..., n, dim] -> x_next, the same shape. `layer` and `norm` as in HyperConnection. Parameters norm_weight [n*dim],
    zero at first (gamma = 1 + norm_weight), down [rank, n*dim], up [n*dim, rank] and inject [n, n*dim]; they follow the
    model's dtype. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    Source: huggingface/transformers qwen4_exp.
    """

    def __init__(
        self,
        dim: int,
        layer: Callable[..., object],
        *,
        rank: int,
        n: int = 4,
        norm: Callable[[Tensor], Tensor] | None = None,
        rms_eps: float = 1e-6,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, n, rank, rms_eps, backend, injects=True, device=device, dtype=dtype)
        self.layer, self.norm = layer, norm

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Output:
        h_in, h_post = self.enter(x)
        f, rest = split(self.layer(normed(h_in, self.norm), *args, **kwargs))
        return join(INJECT(x, f, h_post, backend=self.backend), rest)


class GatedHead(_Gated):
    """h = gated_pre(x) without injection weights: the mixer at the model's end, [..., n, dim] -> [..., dim]

    Parameters norm_weight [n*dim], down [rank, n*dim] and up [n*dim, rank]. Source: huggingface/transformers qwen4_exp.
    """

    def __init__(
        self,
        dim: int,
        *,
        rank: int,
        n: int = 4,
        rms_eps: float = 1e-6,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, n, rank, rms_eps, backend, injects=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.enter(x)[0]
