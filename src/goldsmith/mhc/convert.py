"""Weights of other projects' hyper-connections, to and from ours.

A layout alone does not carry the semantics, so `from_*` also return the options that HyperConnection needs. A wrong or
missing key raises ValueError and names what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.shapes import check_shapes, check_tensor
from ._common import rows, streams

Weights = dict[str, Tensor]
TE_RMS_EPS = 1.1920928955078125e-07  # float32's epsilon, fixed in TransformerEngine

_CONFIG = {
    "n": "hc_mult",
    "iterations": "hc_sinkhorn_iters",
    "pre_eps": "hc_eps",
    "sinkhorn_eps": "hc_eps",
    "rms_eps": "rms_norm_eps",
}


def from_hf(state: Mapping[str, Tensor], prefix: str = "", *, config: Any = None) -> tuple[Weights, dict[str, Any]]:
    """fn, base, scale = {prefix}.fn, .base, .scale of a transformers deepseek_v4 model, or {prefix}_fn, ... of a file

    The weights are for HyperConnection, or, when `scale` has one element (`hc_head`), for HyperHead as hc_fn, hc_base,
    hc_scale; all in float32. Options: n, and from `config` (hc_mult, hc_sinkhorn_iters, hc_eps, rms_norm_eps; an object
    or a mapping) iterations, pre_eps, sinkhorn_eps and rms_eps too. Raises ValueError naming the keys found.
    """
    found = _hf_keys(state, prefix)
    fn, base, scale = (_float(state[found[name]]) for name in ("fn", "base", "scale"))
    head = scale.numel() == 1
    n = fn.shape[0] if head else streams(fn.shape[0])
    _shape("from_hf", found["fn"], fn, 2, n is not None and fn.shape[1] % n == 0, "fn [n*(n+2), n*dim], or [n, n*dim]")
    _size("from_hf", found["base"], base, fn.shape[0])
    _size("from_hf", found["scale"], scale, 1 if head else 3)
    options: dict[str, Any] = {"n": n}
    if config is not None:
        options |= {ours: _config(config, theirs) for ours, theirs in _CONFIG.items()}
        if options["n"] != n:
            raise ValueError(f"mhc.from_hf: {found['fn']} has n={n}, but the config says hc_mult={options['n']}")
        if head:
            options = {name: options[name] for name in ("n", "pre_eps", "rms_eps")}
    weights = {"fn": fn, "base": base.reshape(-1), "scale": scale.reshape(-1)}
    return ({f"hc_{name}": value for name, value in weights.items()} if head else weights), options


def to_hf(weights: Mapping[str, Tensor]) -> Weights:
    """{fn, base, scale} (or hc_fn, hc_base, hc_scale) as transformers' deepseek_v4 has them: float32, the same names

    Raises ValueError for norm_weight, which those models do not have (fn * norm_weight gives the same model without
    it).
    """
    names = ("hc_fn", "hc_base", "hc_scale") if "hc_fn" in weights else ("fn", "base", "scale")
    _keys("to_hf", weights, names, optional=("norm_weight",))
    if weights.get("norm_weight") is not None:
        raise ValueError("mhc.to_hf: there is a norm_weight, which the model has no place for; use fn * norm_weight")
    return {name: _float(weights[name]) for name in names}


def from_liger(state: Mapping[str, Tensor]) -> tuple[Weights, dict[str, Any]]:
    """fn = phi^T, base = b, scale = [alpha_pre, alpha_post, alpha_res]        phi [K, M], in float32

    `state` is a LigerMHC's state dict; its `layer.*` are left alone. Options: n, orientation="out_in", pre_eps=0.0.
    Liger's default phi is float16: what that rounding lost stays lost.
    """
    own = {name: value for name, value in state.items() if not name.startswith("layer.")}
    _keys("from_liger", own, ("phi", "b", "alpha_pre", "alpha_post", "alpha_res"))
    phi = _float(own["phi"])
    n = streams(phi.shape[-1])
    valid = phi.dim() == 2 and n is not None and phi.shape[0] % n == 0
    _shape("from_liger", "phi", phi, 2, valid, "phi [K, M] = [n*dim, n*(n+2)]")
    _size("from_liger", "b", own["b"], phi.shape[1])
    scale = torch.stack([_float(own[f"alpha_{part}"]).reshape(()) for part in ("pre", "post", "res")])
    weights = {"fn": phi.T.contiguous(), "base": _float(own["b"]).reshape(-1), "scale": scale}
    return weights, {"n": n, "orientation": "out_in", "pre_eps": 0.0}


def to_liger(weights: Mapping[str, Tensor]) -> Weights:
    """phi = fn^T [K, M], b = base, alpha_pre, alpha_post, alpha_res = scale (0-dim each), in float32

    Raises ValueError for norm_weight, which Liger does not have (fn * norm_weight gives the same model without it).
    """
    _keys("to_liger", weights, ("fn", "base", "scale"), optional=("norm_weight",))
    if weights.get("norm_weight") is not None:
        raise ValueError("mhc.to_liger: there is a norm_weight, which Liger has no place for; use fn * norm_weight")
    pre, post, res = _float(weights["scale"]).clone().unbind(0)
    phi = _float(weights["fn"]).T.contiguous()
    return {"phi": phi, "b": _float(weights["base"]), "alpha_pre": pre, "alpha_post": post, "alpha_res": res}


def from_te(state: Mapping[str, Tensor], n: int = 4) -> tuple[Weights, dict[str, Any]]:
    """fn[:, i*dim + d] = phi[:, d*n + i], norm_weight likewise; base = beta, scale = alpha

    `state` has phi [M, K], alpha [3], beta [M] or [1, M] and perhaps norm_weight [K], as TransformerEngine's mHC takes
    them with n streams innermost; activations go through `streams_from_te`. Options: n, form="log", rms_eps=2^-23,
    pre_eps=0.0, orientation="in_out", and gamma=True when norm_weight is there.
    """
    _keys("from_te", state, ("phi", "alpha", "beta"), optional=("norm_weight",))
    phi = _float(state["phi"])
    valid = phi.dim() == 2 and phi.shape[0] == rows(n) and phi.shape[1] % n == 0
    _shape("from_te", "phi", phi, 2, valid, f"phi [M, K] = [{rows(n)}, dim*{n}] for n={n}")
    _size("from_te", "beta", state["beta"], rows(n))
    _size("from_te", "alpha", state["alpha"], 3)
    weights = {
        "fn": _outermost(phi, n),
        "base": _float(state["beta"]).reshape(-1),
        "scale": _float(state["alpha"]).reshape(-1),
    }
    options: dict[str, Any] = {"n": n, "form": "log", "rms_eps": TE_RMS_EPS, "pre_eps": 0.0, "orientation": "in_out"}
    if state.get("norm_weight") is not None:
        _size("from_te", "norm_weight", state["norm_weight"], phi.shape[1])
        weights["norm_weight"] = _outermost(_float(state["norm_weight"]).reshape(-1), n)
        options["gamma"] = True
    return weights, options


def to_te(weights: Mapping[str, Tensor]) -> Weights:
    """phi[:, d*n + i] = fn[:, i*dim + d], norm_weight likewise; alpha = scale, beta = base as [1, M]; in float32"""
    _keys("to_te", weights, ("fn", "base", "scale"), optional=("norm_weight",))
    fn = _float(weights["fn"])
    n = streams(fn.shape[0]) or 0
    _shape("to_te", "fn", fn, 2, n > 0, "fn [n*(n+2), n*dim]")
    state = {
        "phi": _innermost(fn, n),
        "alpha": _float(weights["scale"]),
        "beta": _float(weights["base"]).reshape(1, -1),
    }
    if weights.get("norm_weight") is not None:
        state["norm_weight"] = _innermost(_float(weights["norm_weight"]).reshape(-1), n)
    return state


def streams_from_te(x: Tensor) -> Tensor:
    """[..., dim, n] -> [..., n, dim], contiguous. Raises ShapeError for fewer than two dimensions."""
    return _swapped("mhc.streams_from_te", x, "dim, n")


def streams_to_te(x: Tensor) -> Tensor:
    """[..., n, dim] -> [..., dim, n], contiguous. Raises ShapeError for fewer than two dimensions."""
    return _swapped("mhc.streams_to_te", x, "n, dim")


def _swapped(function: str, x: Tensor, axes: str) -> Tensor:
    check_tensor(function, "x", x)
    check_shapes(function, {"x": (x, f"*batch {axes}")})
    return x.transpose(-1, -2).contiguous()


def _outermost(value: Tensor, n: int) -> Tensor:
    """The last axis from d*n + i to i*dim + d."""
    return value.unflatten(-1, (-1, n)).transpose(-1, -2).flatten(-2).contiguous()


def _innermost(value: Tensor, n: int) -> Tensor:
    """The last axis from i*dim + d to d*n + i."""
    return value.unflatten(-1, (n, -1)).transpose(-1, -2).flatten(-2).contiguous()


def _float(value: Tensor) -> Tensor:
    return value.detach().float()


def _hf_keys(state: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """The keys of fn, base and scale, whichever of the two spellings the state has."""
    tried = []
    for joint in ("", "hc_") if not prefix or prefix[-1] in "._" else (".", "_", ".hc_"):
        keys = {name: f"{prefix}{joint}{name}" for name in ("fn", "base", "scale")}
        if all(key in state for key in keys.values()):
            return keys
        tried.append(keys["fn"])
    near = sorted(key for key in state if key.endswith(("fn", "base", "scale")))
    raise ValueError(
        f"mhc.from_hf: no fn, base and scale under prefix {prefix!r} (tried {', '.join(dict.fromkeys(tried))}); "
        f"{_listed('keys of hyper-connections', near) if near else _listed('keys', state)}"
    )


def _keys(function: str, state: Mapping[str, Any], wanted: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    missing = [name for name in wanted if name not in state]
    unknown = [name for name in state if name not in wanted + optional]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        also = f" (and perhaps {', '.join(optional)})" if optional else ""
        raise ValueError(f"mhc.{function}: {what}; wanted {', '.join(wanted)}{also}; {_listed('found', state)}")


def _listed(what: str, names: Any) -> str:
    names = list(names)
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    return f"{what}: {shown or 'nothing'}"


def _shape(function: str, name: str, value: Tensor, dims: int, valid: bool, wanted: str) -> None:
    if value.dim() != dims or not valid:
        raise ValueError(f"mhc.{function}: {name} is {list(value.shape)}, wanted {wanted}")


def _size(function: str, name: str, value: Tensor, size: int) -> None:
    if value.numel() != size:
        raise ValueError(f"mhc.{function}: {name} is {list(value.shape)}, wanted {size} elements")


def _config(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        if name not in config:
            raise ValueError(f"mhc.from_hf: the config lacks {name}; {_listed('found', config)}")
        return config[name]
    if not hasattr(config, name):
        raise ValueError(f"mhc.from_hf: the config, a {type(config).__name__}, lacks {name}")
    return getattr(config, name)
