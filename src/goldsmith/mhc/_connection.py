"""One connection under autograd: pre before the layer, post after it, and a joint backward that writes dx once.

Plain autograd would compute post's share of dx, then pre's share, and add the two in a third pass over the streams.
Here post receives a detached x and passes the gradient G of x_next unchanged to pre's backward. That backward mixes G
by h_res and adds it to its own terms. G travels through the **token**: zeros of x's shape (one stored number) that
`enter` returns and `leave` takes. The token's gradient is G and nothing else. The token must therefore be used once and
have no hook; the caller of both functions keeps it in a local variable, and no public function returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypedDict

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..core.autograd import transformed
from ._common import CoefficientOptions
from .connect_backward.op import CONNECT_BACKWARD
from .independent_pre.op import INDEPENDENT_PRE
from .inject.op import INJECT
from .post.op import POST
from .pre.op import PRE


class PreOptions(CoefficientOptions):
    """Keyword arguments of PRE."""

    backend: str


class IndependentOptions(TypedDict):
    """Keyword arguments of INDEPENDENT_PRE."""

    rms_eps: float
    pre_eps: float
    post_mult: float
    post_eps: float
    backend: str


class PostOptions(TypedDict):
    """Keyword arguments of POST."""

    orientation: str
    backend: str


class BackwardOptions(TypedDict):
    """Keyword arguments of CONNECT_BACKWARD."""

    pre_eps: float
    post_mult: float
    iterations: int
    sinkhorn_eps: float
    form: str
    orientation: str
    rms_form: str
    backend: str


@dataclass(frozen=True)
class ConnectionSettings:
    """The options that a connection passes to pre and post, or to independent_pre and inject."""

    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    post_mult: float = 2.0
    iterations: int = 20
    sinkhorn_eps: float = 1e-6
    form: str = "deepseek"
    orientation: str = "in_out"
    coefficient_dtype: torch.dtype | None = None
    backend: str = "auto"
    kind: str = "manifold"
    post_eps: float = 0.0
    rms_form: str = "inside"

    @property
    def of_independent(self) -> IndependentOptions:
        return {
            "rms_eps": self.rms_eps,
            "pre_eps": self.pre_eps,
            "post_mult": self.post_mult,
            "post_eps": self.post_eps,
            "backend": self.backend,
        }

    @property
    def of_pre(self) -> PreOptions:
        return {
            "rms_eps": self.rms_eps,
            "pre_eps": self.pre_eps,
            "post_mult": self.post_mult,
            "iterations": self.iterations,
            "sinkhorn_eps": self.sinkhorn_eps,
            "form": self.form,
            "sinkhorn": True,
            "rms_form": self.rms_form,
            "backend": self.backend,
        }

    @property
    def of_post(self) -> PostOptions:
        return {"orientation": self.orientation, "backend": self.backend}

    @property
    def of_backward(self) -> BackwardOptions:
        return {
            "pre_eps": self.pre_eps,
            "post_mult": self.post_mult,
            "iterations": self.iterations,
            "sinkhorn_eps": self.sinkhorn_eps,
            "form": self.form,
            "orientation": self.orientation,
            "rms_form": self.rms_form,
            "backend": self.backend,
        }

    def rounded(self, coefficient: Tensor) -> Tensor:
        """The coefficient rounded to coefficient_dtype and converted back, as post receives it."""
        to = self.coefficient_dtype
        return coefficient if to is None else coefficient.to(to).to(coefficient.dtype)

    def pre(self, x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None) -> dict[str, Tensor]:
        """Every result of the operator before the layer, by name; an independent connection has no h_res."""
        if self.kind == "independent":
            return INDEPENDENT_PRE.all_results(x, phi, alpha, bias, gamma, **self.of_independent)
        return PRE.all_results(x, phi, alpha, bias, gamma, **self.of_pre)

    def post(self, x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor | None) -> Tensor:
        if h_res is None:
            return INJECT(x, f, h_post, backend=self.backend)
        return POST(x, f, h_post, h_res, **self.of_post)


def enter(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, settings: ConnectionSettings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """h_in, the rounded h_post and h_res (None in an independent connection), and the token for `leave`.

    The token is None without gradients and under torch.func, which differentiates pre and post separately.
    """
    token: Tensor | None
    if not torch.is_grad_enabled() or transformed():
        results = settings.pre(x, phi, alpha, bias, gamma)
        h_in, h_post, h_res, token = results["h_in"], results["h_post"], results.get("h_res"), None
    else:
        h_in, h_post, h_res, token = _Enter.apply(x, phi, alpha, bias, gamma, settings)
    return h_in, settings.rounded(h_post), None if h_res is None else settings.rounded(h_res), token


def leave(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor | None, token: Tensor | None, settings: ConnectionSettings
) -> Tensor:
    """x_next = post(x, f, h_post, h_res), or inject without h_res. The token must come from `enter` with the same x."""
    if token is None:
        return settings.post(x, f, h_post, h_res)
    return _Leave.apply(settings.post(x.detach(), f, h_post, h_res), token)


class _EnterContext(Protocol):
    """The part of autograd's context that `_Enter` uses."""

    settings: ConnectionSettings
    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _EnterContext,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        gamma: Tensor | None,
        settings: ConnectionSettings,
    ) -> tuple[Tensor | None, ...]:
        results = settings.pre(x, phi, alpha, bias, gamma)
        token = x.new_zeros(()).expand(x.shape)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        h_res = results.get("h_res")
        mixing = None if h_res is None else settings.rounded(h_res)
        ctx.save_for_backward(x, phi, alpha, bias, gamma, mixing, results["inv_rms"], results["h_mix"])
        return results["h_in"], results["h_post"], h_res, token

    @staticmethod
    def backward(ctx: _EnterContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 6
        dx, dphi, dalpha, dbias, dgamma = CONNECT_BACKWARD(*ctx.saved_tensors, *grads, **ctx.settings.of_backward)
        return dx, dphi, dalpha, dbias, dgamma if ctx.needs_input_grad[4] else None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_next: Tensor, token: Tensor) -> Tensor:
        ctx.mark_dirty(x_next)  # otherwise the result would be a view of x_next, which must not be written in place
        return x_next

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
