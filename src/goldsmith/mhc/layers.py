"""Forwards for transformers' hyper-connections, in the form that the `kernels` package puts in place of a layer's own.

Such a class has no state: `forward` runs with the replaced module as self, so the weights are those of the model.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from .gated_pre.op import gated_pre
from .head.op import head
from .independent_pre.op import independent_pre
from .pre.op import pre


class _Norm(Protocol):
    eps: float


class DeepseekV4HyperConnection(nn.Module):
    """h_post, h_res, h_in = mhc.pre(hidden_streams)"""

    can_torch_compile = True
    has_backward = True
    fn: Tensor
    base: Tensor
    scale: Tensor
    input_norm: _Norm
    hc_eps: float
    hc_sinkhorn_iters: int

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h_in, h_post, h_res = pre(
            hidden_streams,
            self.fn,
            self.scale.float(),
            self.base.float(),
            rms_eps=self.input_norm.eps,
            pre_eps=self.hc_eps,
            sinkhorn_eps=self.hc_eps,
            iterations=self.hc_sinkhorn_iters,
        )
        return h_post, h_res, h_in


class DeepseekV4HyperHead(nn.Module):
    """h = mhc.head(x); also the head of hy_v4"""

    can_torch_compile = True
    has_backward = True
    hc_fn: Tensor
    hc_base: Tensor
    hc_scale: Tensor
    input_norm: _Norm
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.hc_fn, self.hc_scale.float(), self.hc_base.float())
        return head(x, *weights, rms_eps=self.input_norm.eps, pre_eps=self.eps)


class HYV4HyperConnection(nn.Module):
    """h_post, h_in = mhc.independent_pre(hidden_streams)"""

    can_torch_compile = True
    has_backward = True
    fn: Tensor
    base: Tensor
    scale: Tensor
    input_norm: _Norm
    hc_eps: float
    hc_post_magnitude: float

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor]:
        h_in, h_post = independent_pre(
            hidden_streams,
            self.fn,
            self.scale.float(),
            self.base.float(),
            rms_eps=self.input_norm.eps,
            pre_eps=self.hc_eps,
            post_eps=self.hc_eps,
            post_mult=self.hc_post_magnitude,
        )
        return h_post, h_in


class Qwen4ExpTextGatedResidual(nn.Module):
    """h_in, streams, h_post = mhc.gated_pre(hyper_input), or h_in alone at the model's end"""

    can_torch_compile = True
    has_backward = True
    hc_norm: nn.RMSNorm
    input_mix_weight_down: nn.Linear
    input_mix_weight_up: nn.Linear
    block_inject_weight: nn.Linear | None
    hc_count: int

    def forward(self, hyper_input: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        streams = hyper_input.unflatten(-1, (self.hc_count, -1))
        weights = (
            1.0 + self.hc_norm.weight.float(),
            self.input_mix_weight_down.weight,
            self.input_mix_weight_up.weight,
        )
        inject = None if self.block_inject_weight is None else self.block_inject_weight.weight
        results = gated_pre(streams, *weights, inject, rms_eps=self.hc_norm.eps or 0.0)
        return results if isinstance(results, Tensor) else (results[0], hyper_input, results[1].to(hyper_input.dtype))
