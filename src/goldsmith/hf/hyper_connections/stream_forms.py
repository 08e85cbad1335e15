"""The hyper-connections of DeepSeek-V4 (Sinkhorn) and HY-V4 (independent) in the layers of transformers.

The classes here are mixins for transformers' classes; they compute with the parameters that those classes made.
transformers rounds post's coefficients to the streams' dtype; here they stay in float32, as in DeepSeek's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...mhc._connection import ConnectionSettings, enter, leave
from ...mhc.boundary.op import BOUNDARY
from ...mhc.head.op import HEAD
from .calling import has_called_parts, is_called

Layer = Callable[[Tensor], Tensor]
Mixing = tuple[Tensor, Tensor, Tensor, None]  # phi, alpha, bias and no gamma

if TYPE_CHECKING:

    class _InputNorm(nn.Module):
        eps: float

    class _Connection(nn.Module):
        """Attributes of transformers' hyper-connections."""

        hc_eps: float
        hc_sinkhorn_iters: int
        hc_post_magnitude: float
        input_norm: _InputNorm
        fn: Tensor
        base: Tensor
        scale: Tensor

    class _Head(nn.Module):
        """Attributes of transformers' heads."""

        eps: float
        input_norm: _InputNorm
        hc_fn: Tensor
        hc_base: Tensor
        hc_scale: Tensor

else:
    _Connection = _Head = nn.Module


class StreamConnection(_Connection):
    """Parameters and settings of a connection, as goldsmith.mhc takes them."""

    @property
    def mixing(self) -> Mixing:
        return self.fn, widened(self.scale), widened(self.base), None

    @property
    def settings(self) -> ConnectionSettings:
        raise NotImplementedError


class SinkhornConnection(StreamConnection):
    """(h_post, h_res, h_in) = mhc.pre(streams), in the order of transformers' hyper-connections."""

    @property
    def settings(self) -> ConnectionSettings:
        return ConnectionSettings(
            rms_eps=self.input_norm.eps,
            pre_eps=self.hc_eps,
            iterations=self.hc_sinkhorn_iters,
            sinkhorn_eps=self.hc_eps,
        )

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if has_called_parts(self):
            return super().forward(hidden_streams)
        results = self.settings.pre(hidden_streams, *self.mixing)
        return results["h_post"], results["h_res"], results["h_in"]


class IndependentConnection(StreamConnection):
    """(h_post, h_in) = mhc.independent_pre(streams), in the order of transformers' hyper-connections."""

    @property
    def settings(self) -> ConnectionSettings:
        return ConnectionSettings(
            rms_eps=self.input_norm.eps,
            pre_eps=self.hc_eps,
            post_mult=self.hc_post_magnitude,
            post_eps=self.hc_eps,
            kind="independent",
        )

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor]:
        if has_called_parts(self):
            return super().forward(hidden_streams)
        results = self.settings.pre(hidden_streams, *self.mixing)
        return results["h_post"], results["h_in"]


class SigmoidHead(_Head):
    """mhc.head: the end of DeepSeek-V4's and HY-V4's streams."""

    def forward(self, x: Tensor) -> Tensor:
        if has_called_parts(self):
            return super().forward(x)
        alpha, bias = widened(self.hc_scale), widened(self.hc_base)
        return HEAD(x, self.hc_fn, alpha, bias, None, rms_eps=self.input_norm.eps, pre_eps=self.eps, backend="auto")


def through(x: Tensor, first: tuple[nn.Module, Layer], second: tuple[nn.Module, Layer]) -> Tensor:
    """x_next of two connections after each other, each with the layer that it surrounds.

    Without gradients, post of the first and pre of the second are one operator where there is one. With gradients, each
    connection has a joint backward, which moves fewer bytes. The values are the same.
    """
    one, two = cast("StreamConnection", first[0]), cast("StreamConnection", second[0])
    separate = torch.is_grad_enabled() or _is_called(one) or _is_called(two)
    if separate or one.settings.kind == "independent":
        return _connected(_connected(x, *first), *second)
    h_in, h_post, h_res, _ = enter(x, *one.mixing, one.settings)
    x, f = alike(x, first[1](h_in))
    options: Any = two.settings.of_pre
    x, h_in, h_post, h_res = BOUNDARY(x, f, h_post, h_res, *two.mixing, orientation="in_out", **options)
    x, f = alike(x, second[1](h_in))
    return leave(x, f, h_post, h_res, None, two.settings)


def _connected(x: Tensor, connection: nn.Module, layer: Layer) -> Tensor:
    connection = cast("StreamConnection", connection)
    h_res, token = None, None
    if _is_called(connection):
        h_post, *matrix, h_in = connection(x)
        h_res = matrix[0] if matrix else None
    else:
        h_in, h_post, h_res, token = enter(x, *connection.mixing, connection.settings)
    streams, f = alike(x, layer(h_in))
    return leave(streams, f, h_post, h_res, token if streams is x else None, connection.settings)


def _is_called(connection: nn.Module) -> bool:
    return is_called(connection) or has_called_parts(connection)


def alike(x: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes, as transformers' sum of them has it: under autocast they may differ."""
    dtype = torch.promote_types(x.dtype, f.dtype)
    return x.to(dtype), f.to(dtype)


def widened(parameter: Tensor) -> Tensor:
    """In float32 or better. A model moved to 16 bits as a whole has rounded it already, and transformers widens it."""
    return parameter if parameter.element_size() >= 4 else parameter.float()
