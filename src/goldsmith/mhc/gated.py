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


class GatedConnection(nn.Module):
    """h_in, h_post = gated_pre(x);  f = layer(norm(h_in));  x_next[i] = x[i] + h_post[i] * f

    x [..., n, dim] -> x_next, the same shape. `layer` and `norm` as in HyperConnection. Parameters norm_weight [n*dim],
    zero at first (gamma = 1 + norm_weight), down [rank, n*dim], up [n*dim, rank] and inject [n, n*dim]; they follow the
    model's dtype. Raises ShapeError, TypeError, ValueError, BackendUnavailable.
    Source: huggingface/transformers qwen4_exp.
    """

    inject: nn.Parameter | None

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
        super().__init__()
        _declare(self, dim, n, rank, rms_eps, backend, {"device": device, "dtype": dtype})
        self.inject = nn.Parameter(torch.empty(n, n * dim, device=device, dtype=dtype))
        self.layer, self.norm = layer, norm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Output:
        h_in, h_post = _pre(self, x)
        f, rest = split(self.layer(normed(h_in, self.norm), *args, **kwargs))
        return join(INJECT(x, f, h_post, backend=self.backend), rest)

    def extra_repr(self) -> str:
        return _repr(self)


class GatedHead(nn.Module):
    """h = gated_pre(x) without injection weights: the mixer at the model's end, [..., n, dim] -> [..., dim]

    Parameters norm_weight [n*dim], down [rank, n*dim] and up [n*dim, rank]. Source: huggingface/transformers qwen4_exp.
    """

    inject = None

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
        super().__init__()
        _declare(self, dim, n, rank, rms_eps, backend, {"device": device, "dtype": dtype})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset(self)

    def forward(self, x: Tensor) -> Tensor:
        return _pre(self, x)[0]

    def extra_repr(self) -> str:
        return _repr(self)


Gated = GatedConnection | GatedHead


def _declare(module: Gated, dim: int, n: int, rank: int, rms_eps: float, backend: str, place: dict) -> None:
    name = f"mhc.{type(module).__name__}"
    module.dim, module.n, module.rank = sizes(name, dim=dim, n=n, rank=rank)
    check_numbers(name, rms_eps=rms_eps)
    check_choice(name, "backend", backend, ("auto", *GATED_PRE.backends))
    module.rms_eps, module.backend = rms_eps, backend
    module.norm_weight = nn.Parameter(torch.empty(n * dim, **place))
    module.down = nn.Parameter(torch.empty(rank, n * dim, **place))
    module.up = nn.Parameter(torch.empty(n * dim, rank, **place))


@torch.no_grad()
def _reset(module: Gated) -> None:
    module.norm_weight.zero_()
    for weight in (module.down, module.up, module.inject):
        if weight is not None:
            nn.init.normal_(weight, std=0.02)


def _pre(module: Gated, x: Tensor) -> tuple[Tensor, Tensor]:
    check_x(f"mhc.{type(module).__name__}", x, module.n, module.dim)
    gamma = 1.0 + module.norm_weight.to(torch.promote_types(torch.float32, module.norm_weight.dtype))
    options = {"rms_eps": module.rms_eps, "post_mult": 2.0, "backend": module.backend}
    return GATED_PRE(x, gamma, module.down, module.up, module.inject, **options)


def _repr(module: Gated) -> str:
    return f"dim={module.dim}, n={module.n}, rank={module.rank}"
