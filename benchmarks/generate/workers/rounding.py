"""Torch functions that compute in float64, or that round the inputs of products at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..engines.arithmetic import Arithmetic

STEPS = {"bf16": 2.0**-7, "fp16": 2.0**-10}  # from 1 to the next number
BLOCK = 32  # inputs that share a scale when rows are rounded to 8 bits
WIDENED = 512  # rows of a weight that are in float64 at once


class InFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32 (norms, rotary angles, a router's softmax), and in products of
    float64 inputs with narrower weights.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        if function is torch.nn.functional.linear and args[0].dtype == torch.float64:
            function = _wide_product
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _wide_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias in float64; a few rows of the weight are widened at a time, to save memory."""
    y = torch.cat([torch.nn.functional.linear(x, rows.double()) for rows in weight.split(WIDENED)], -1)
    return y if bias is None else y + bias.double()


class RandomRounding(TorchFunctionMode):
    """Rounds the inputs of products, and the attention, up or down at random in the formats of an arithmetic.

    experts   ids of the experts' weights; routers: of weights whose products no engine rounds
    """

    def __init__(self, arithmetic: Arithmetic, experts: set[int], routers: set[int], seed: int) -> None:
        super().__init__()
        self.arithmetic, self.experts, self.routers = arithmetic, experts, routers
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear and len(args) > 1:
            x, weight, *more = args
            if id(weight) in self.routers:
                format = "fp32"
            else:
                format = self.arithmetic.rows if id(weight) in self.experts else self.arithmetic.dense_rows
            args = (self._rounded(x, format), weight, *more)
        elif function is torch.nn.functional.scaled_dot_product_attention and self.arithmetic.attention == "fp16":
            query, *pair = args[:3]
            return self._attention(query, *(self._rounded(t, "fp16") for t in pair), **kwargs)
        return function(*args, **kwargs)

    def _attention(
        self, query: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False, dropout_p: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """softmax(q k^T) v with a sum over keys that is rounded to 16 bits after each key"""
        group = query.shape[-3] // keys.shape[-3] if enable_gqa else 1
        keys, values = keys.repeat_interleave(group, -3), values.repeat_interleave(group, -3)
        scores = query @ keys.mT * (scale if scale is not None else query.shape[-1] ** -0.5)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            outside = torch.full_like(scores, -torch.inf)
            scores = torch.where(attn_mask, scores, outside) if attn_mask.dtype == torch.bool else scores + attn_mask
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        total = torch.zeros_like(query)
        for key in range(keys.shape[-2]):
            total = self._rounded(total + powers[..., key, None] * values[..., None, key, :], "fp16")
        return total / powers.sum(-1, keepdim=True)

    def _rounded(self, x: Tensor, format: str) -> Tensor:
        if format == "fp32" or (format == "bf16" and x.dtype == torch.bfloat16):
            return x
        if format == "q8":
            return self._in_blocks(x.float()).to(x.dtype)
        step = torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(1e-30)))) * STEPS[format]
        return torch.floor(x / step + torch.rand(x.shape, generator=self.generator)) * step

    def _in_blocks(self, x: Tensor) -> Tensor:
        rows = x.shape[-1]
        if rows % BLOCK:
            return x
        blocks = x.unflatten(-1, (rows // BLOCK, BLOCK))
        step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        return (torch.floor(blocks / step + torch.rand(blocks.shape, generator=self.generator)) * step).flatten(-2)
