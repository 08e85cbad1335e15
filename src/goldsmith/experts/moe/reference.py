"""experts.moe: what it means. A loop over the experts; the mathematics is in the family's README.

T tokens, k slots, P = T k routes (route t k + j is slot j of token t), E experts, H hidden, I inner.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...assay.stage import stage
from .._activations import activate, slopes
from .._common import NAMES, flat
from .._projections import Call


def forward(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call("experts.moe", dict(zip(NAMES, tensors, strict=True)), options)
    routes, x = call.routes, call.x
    g, u = call.gate_and_up()
    h = stage("h", activate(options["activation"], g.to(call.to), u.to(call.to), options["alpha"], options["limit"]))
    o = stage("o", call.outputs("down", h))
    y = stage("y", routes.sum_slots(call.weights.unsqueeze(-1) * o).to(x.dtype).view(x.shape))
    return (y, g, u) if options["save"] else (y, x.new_empty(0), x.new_empty(0))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    call = Call("experts.moe", tensors, options)
    routes, to = call.routes, call.to
    g, u = (tensors["g"], tensors["u"]) if options["save"] else call.gate_and_up()
    g, u = g.to(to), u.to(to)
    how = (options["activation"], g, u, options["alpha"], options["limit"])
    h = stage("h", activate(*how))
    dy = flat(grads["y"]).to(to)[call.tokens]  # [P, H], of each route
    q = call.weights.unsqueeze(-1) * dy
    found: dict[str, Tensor] = {}
    if needs - {"down", "down_bias", "down_a", "down_b"}:
        v = stage("v", call.inputs("down", dy))  # before it is weighed: a weight of 0 has a gradient, too
        if "topk_weights" in needs:
            dw = (v * h).sum(-1)
            if tensors["down_bias"] is not None:
                dw = dw + (dy * tensors["down_bias"].to(to)[call.expert]).sum(-1)
            found["topk_weights"] = routes.kept(dw).view(tensors["topk_weights"].shape)
        dh = stage("dh", call.weights.unsqueeze(-1) * v)
        to_g, to_u = slopes(*how)
        dg, du = stage("dg", to_g(dh)), stage("du", to_u(dh))
        if "x" in needs:
            dx = call.inputs("gate", dg) + call.inputs("up", du)
            found["x"] = routes.sum_slots(dx).view(call.x.shape)
        found |= call.factors("gate", dg, call.rows, needs) | call.factors("up", du, call.rows, needs)
        found |= call.base("gate_up", (dg, du), call.rows, needs)
    found |= call.factors("down", q, h, needs) | call.base("down", (q,), h, needs)
    return {name: stage(f"d{name}", value.to(tensors[name].dtype)) for name, value in found.items()}
