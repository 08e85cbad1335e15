"""Goldens of the layers: the textbook formulas in plain torch, and targets that compare a layer with them.

p: the layer's parameters by name. The formulas sum and sort all pairs, because N is small here.
"""

import math

import torch
from torch.func import functional_call
from torch.nn import functional

from goldsmith import assay
from router.layers import D

ACTIVATIONS = {"silu": functional.silu, "gelu": functional.gelu}


def unit(t, axis, eps=1e-5):
    """Mean 0 and variance 1 along an axis."""
    centred = t - t.mean(axis, keepdim=True)
    return centred / (centred.square().mean(axis, keepdim=True) + eps).sqrt()


def best(x, y, k):
    """The k largest sums of pairs and their indices; the first of equals comes first."""
    sums = (x[..., :, None] + y[..., None, :]).flatten(-2)
    with assay.deciding("float64"):
        places = sums.argsort(dim=-1, descending=True, stable=True)[..., :k]
    return sums.gather(-1, places), places


def omnimoe(module, p, h):
    axis = {"layer": -1, "batch": 0, "none": None}[module.router_norm]
    logits = [h @ p[f"router_{name}.weight"].T for name in "xy"]
    x, y = logits if axis is None else [unit(t, axis) for t in logits]
    chosen, places = best(x, y, module.k)
    if module.log_softmax and module.weights != "softmax":
        chosen = chosen - x.logsumexp(-1, True) - y.logsumexp(-1, True)
    weights = chosen.softmax(-1) if module.weights == "softmax" else chosen.exp()
    act = ACTIVATIONS[module.activation]
    out = torch.einsum("td,tkd->tk", h, p["w_in"][places])
    out = torch.einsum("tk,tkd->td", weights * act(out), p["w_out"][places])
    if module.intermediate_size:
        hidden = functional.silu(h @ p["shared_gate.weight"].T) * (h @ p["shared_up.weight"].T)
        out = out + hidden @ p["shared_down.weight"].T
    return {"out": out, "x": x, "y": y, "weights": weights}


def peer(module, p, h, kept=None):
    """kept [T, heads * k]: the factors by which dropout multiplies act(a)."""
    heads, k, size = module.heads, module.k, module.size
    if module.pre_norm_kind == "rms":
        h = h / h.square().sum(-1, keepdim=True).sqrt() * math.sqrt(D) * (1 + p["pre_norm.gamma"])
    elif module.pre_norm_kind == "layer":
        h = unit(h, -1) * p["pre_norm.weight"] + p["pre_norm.bias"]
    q = (h @ p["query.weight"].T).unflatten(-1, (2, heads, module.key_dim))
    if module.query_norm != "none":
        q = unit(q, -1 if module.query_norm == "layer" else (0, 1, 2)) * p["norm.weight"] + p["norm.bias"]
    x, y = (torch.einsum("thd,hsd->ths", q[:, axis], p["keys"][axis]) for axis in range(2))
    chosen, places = best(x, y, k)
    weights = chosen.softmax(-1) if module.weights == "softmax" else chosen.relu()
    if module.separate_tables:
        places = places + size**2 * torch.arange(heads)[:, None]
    places, gated = places.flatten(1), weights.flatten(1)
    if not module.values_only:
        gated = gated * ACTIVATIONS[module.activation](torch.einsum("td,tkd->tk", h, p["w_in"][places]))
    out = torch.einsum("tk,tkd->td", gated if kept is None else gated * kept, p["w_out"][places])
    if module.output_norm is not None:
        out = unit(out, -1) * p["output_norm.weight"] + p["output_norm.bias"]
    return {"out": out, "x": x, "y": y, "weights": weights}


def inputs(module, tokens, **more):
    """h, and every parameter by name, with "__" for dots."""
    named = {name.replace(".", "__"): value.detach().clone() for name, value in module.named_parameters()}
    return {"h": torch.randn(tokens, D), **more, **named}


def parameters(tensors):
    return {name.replace("__", "."): value for name, value in tensors.items()}


def formula_of(module):
    return omnimoe if hasattr(module, "router_x") else peer


def target(module, tensors):
    """A target: the layer in float32, with its routing and gradients, against its formula in float64."""

    def candidate(h, **p):
        out, routed = functional_call(module, parameters(p), (h,), {"return_router": True})
        return {"out": out, "x": routed.x, "y": routed.y, "weights": routed.weights}

    def golden(h, **p):
        return formula_of(module)(module, parameters(p), h)

    return assay.Target(candidate, golden, cases=tensors)


def precomputed(run, tensors, dout):
    """Results and gradients of `run`, another form of the layer, computed beforehand: compilers fail in the assay."""
    h = tensors["h"].detach().requires_grad_()
    out = run(h)
    gradients = torch.autograd.grad(out, [h, *run.parameters()], dout)
    return {"out": out.detach(), **{f"d_{name}": grad for name, grad in zip(tensors, gradients, strict=True)}}


def precomputed_target(results, module, tensors, dout):
    """A target: those results and gradients against the layer's formula in float64."""

    def golden(dout, **tensors):
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in tensors.items()}
            out = formula_of(module)(module, parameters({n: t for n, t in leaves.items() if n != "h"}), leaves["h"])
            gradients = torch.autograd.grad(out["out"], list(leaves.values()), dout)
        return {"out": out["out"].detach(), **{f"d_{name}": grad for name, grad in zip(leaves, gradients, strict=True)}}

    return assay.Target(lambda **_: results, golden, cases={**tensors, "dout": dout}, backward=None)


def check(target_under_test):
    assay.check(target_under_test, probes=("values", "ensemble"))
