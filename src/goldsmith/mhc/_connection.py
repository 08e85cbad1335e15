"""One connection under autograd: pre, then (after the layer) post, with a backward that writes dx once.

Plain autograd would compute post's share of dx, pre's share of dx, and add them in a third pass over the streams. Here
post is given x without its history, and hands the gradient G of x_next, as it is, to pre's backward, which mixes it by
h_res and adds it to its own addends. The way between the two is the **token**: zeros of x's shape (one stored number)
that `enter` returns and `leave` takes. Its gradient is G and not the gradient of anything else, so the token must never
be used twice or get a hook; it stays a local variable of whoever calls both, and no public function returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import transformed
from .connect_backward.op import CONNECT_BACKWARD
from .post.op import POST
from .pre.op import PRE


@dataclass(frozen=True)
class ConnectionSettings:
    """The options of pre and post, as a connection holds them."""

    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    post_mult: float = 2.0
    iterations: int = 20
    sinkhorn_eps: float = 1e-6
    form: str = "deepseek"
    orientation: str = "in_out"
    coefficient_dtype: torch.dtype | None = None
    backend: str = "auto"

    @property
    def of_pre(self) -> dict[str, Any]:
        names = ("rms_eps", "pre_eps", "post_mult", "iterations", "sinkhorn_eps", "form")
        return {name: getattr(self, name) for name in names} | {"sinkhorn": True, "backend": self.backend}

    @property
    def of_post(self) -> dict[str, Any]:
        return {"orientation": self.orientation, "backend": self.backend}

    @property
    def of_backward(self) -> dict[str, Any]:
        names = ("pre_eps", "post_mult", "iterations", "sinkhorn_eps", "form", "orientation", "backend")
        return {name: getattr(self, name) for name in names}

    def rounded(self, coefficient: Tensor) -> Tensor:
        """As post receives it: through coefficient_dtype, back in its own."""
        to = self.coefficient_dtype
        return coefficient if to is None else coefficient.to(to).to(coefficient.dtype)


def enter(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, settings: ConnectionSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """h_in, h_post, h_res (both as post takes them), and the token for `leave`.

    There is no token where nothing is recorded, and under torch.func, which takes pre and post as they are.
    """
    if not torch.is_grad_enabled() or transformed():
        h_in, h_post, h_res = PRE(x, phi, alpha, bias, gamma, **settings.of_pre)
        return h_in, settings.rounded(h_post), settings.rounded(h_res), None
    h_in, h_post, h_res, token = _Enter.apply(x, phi, alpha, bias, gamma, settings)
    return h_in, settings.rounded(h_post), settings.rounded(h_res), token


def leave(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, token: Tensor | None, settings: ConnectionSettings
) -> Tensor:
    """x_next; the token belongs to this x."""
    if token is None:
        return POST(x, f, h_post, h_res, **settings.of_post)
    return _Leave.apply(POST(x.detach(), f, h_post, h_res, **settings.of_post), token)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        gamma: Tensor | None,
        settings: ConnectionSettings,
    ) -> tuple[Tensor, ...]:
        results = PRE.all_results(x, phi, alpha, bias, gamma, **settings.of_pre)
        token = x.new_zeros(()).expand(x.shape)
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        mixing = settings.rounded(results["h_res"])
        ctx.save_for_backward(x, phi, alpha, bias, gamma, mixing, results["inv_rms"], results["h_mix"])
        return results["h_in"], results["h_post"], results["h_res"], token

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 6
        dx, dphi, dalpha, dbias, dgamma = CONNECT_BACKWARD(*ctx.saved_tensors, *grads, **ctx.settings.of_backward)
        return dx, dphi, dalpha, dbias, dgamma if ctx.needs_input_grad[4] else None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_next: Tensor, token: Tensor) -> Tensor:
        ctx.mark_dirty(x_next)  # so that the result is x_next itself, not a view that nobody may write to
        return x_next

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
