"""experts.moe: reference, a loop over the experts in plain torch; the family's README has the mathematics.

T tokens, k slots, P = T k routes (route t k + j is slot j of token t), E experts, H hidden, I inner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .._activations import activate, slopes
from .._conventions import NAMES, MoeOptions, flat
from .._projections import ReferenceCall


def forward(*tensors: Tensor | None, **options: object) -> tuple[Tensor, Tensor, Tensor]:
    return forward_of(ReferenceCall("experts.moe", dict(zip(NAMES, tensors, strict=True)), options))


def backward(grads: dict, tensors: dict, options: MoeOptions, needs: frozenset) -> dict[str, Tensor]:
    return backward_of(ReferenceCall("experts.moe", tensors, options), grads, needs)


def forward_of(call: ReferenceCall) -> tuple[Tensor, Tensor, Tensor]:
    x, options = call.x, call.options
    g, u = call.gate_and_up()
    h = stage("h", activate(options["activation"], g.to(call.to), u.to(call.to), options["alpha"], options["limit"]))
    o = stage("o", call.outputs("down", h))
    y = stage("y", call.routes.sum_slots(call.weights.unsqueeze(-1) * o).to(x.dtype).view(x.shape))
    return (y, g, u) if options["save"] else (y, x.new_empty(0), x.new_empty(0))


def backward_of(call: ReferenceCall, grads: dict, needs: frozenset) -> dict[str, Tensor]:
    tensors, options, routes, to = call.tensors, call.options, call.routes, call.to
    g, u = (tensors["g"], tensors["u"]) if options["save"] else call.gate_and_up()
    arguments = (options["activation"], g.to(to), u.to(to), options["alpha"], options["limit"])  # type: ignore[union-attr]
    h = stage("h", activate(*arguments))
    dy = flat(grads["y"]).to(to).index_select(0, call.tokens)  # [P, H], one row per route
    q = stage("q", call.weights.unsqueeze(-1) * dy)
    gradients: dict[str, Tensor] = {}
    if needs - {"down", "down_bias", "down_a", "down_b"}:
        v = stage("v", call.inputs("down", dy))  # before multiplying by w: a weight of 0 has a gradient, too
        if "topk_weights" in needs:
            dw, bias = (v * h).sum(-1), call.bias("down")
            if bias is not None:
                dw = dw + (dy * bias.to(to).index_select(0, call.expert)).sum(-1)
            gradients["topk_weights"] = routes.kept(dw).view(call.shape)
        dh = stage("dh", call.weights.unsqueeze(-1) * v)
        to_g, to_u = slopes(*arguments)
        dg, du = stage("dg", to_g(dh)), stage("du", to_u(dh))
        if "x" in needs:
            gradients["x"] = routes.sum_slots(call.inputs("gate", dg) + call.inputs("up", du)).view(call.x.shape)
        gradients |= call.of_factors("gate", dg, call.rows, needs) | call.of_factors("up", du, call.rows, needs)
        if needs & {"gate_up", "gate_up_bias"}:
            gradients |= call.of_base("gate_up", torch.cat([dg, du], -1), call.rows, needs)
    gradients |= call.of_factors("down", q, h, needs) | call.of_base("down", q, h, needs)
    return {name: stage(f"d{name}", value.to(tensors[name].dtype)) for name, value in gradients.items()}  # type: ignore[union-attr]
