"""Converts the weights of other projects' hyper-connections to and from ours.

A layout alone does not define the model, so the `from_*` functions also return the options that HyperConnection needs.
A wrong or missing key, or a tensor of the wrong shape, raises ValueError with the keys that are there. A value that is
not a floating-point tensor raises TypeError. Keys `layer.*` and `norm.*` of a connection are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.shapes import ShapeError, check_dtype, check_tensor
from ._common import FLOATS, mix_count, mixes_of, streams_of

Weights = dict[str, Tensor]
Options = dict[str, Any]  # keyword arguments of HyperConnection or HyperHead
TE_RMS_EPS = 1.1920928955078125e-07  # float32's epsilon, hard-coded in TransformerEngine
_ALPHAS = ("alpha_pre", "alpha_post", "alpha_res")  # Liger's and Megatron-LM's names

_CONFIG = {  # by the number of scales: a head, an independent connection (hy_v4), a manifold connection
    1: {"n": "hc_mult", "pre_eps": "hc_eps", "rms_eps": "rms_norm_eps"},
    2: {
        "n": "hc_mult",
        "pre_eps": "hc_eps",
        "rms_eps": "rms_norm_eps",
        "post_eps": "hc_eps",
        "magnitude": "hc_magnitude",
    },
    3: {
        "n": "hc_mult",
        "iterations": "hc_sinkhorn_iters",
        "pre_eps": "hc_eps",
        "sinkhorn_eps": "hc_eps",
        "rms_eps": "rms_norm_eps",
    },
}


def from_hf(state: Mapping[str, Tensor], prefix: str = "", *, config: object = None) -> tuple[Weights, Options]:
    """fn, base, scale = {prefix}.fn, .base, .scale of a transformers model, or {prefix}_fn, ... of a checkpoint file

    Models: deepseek_v4, and hy_v4, whose connections are independent (two scales). Returns float32 weights for
    HyperConnection, or for HyperHead as hc_fn, hc_base, hc_scale when `scale` has one element (`hc_head`). The options
    hold n, and kind="independent" for two scales; with `config` (an object or a mapping with hc_mult, hc_eps,
    rms_norm_eps and hc_sinkhorn_iters or hc_magnitude) also iterations, magnitude and every eps. Raises ValueError that
    lists the keys.
    """
    keys = _hf_keys(state, prefix)
    fn, base, scale = (_float("from_hf", keys[name], state[keys[name]]) for name in ("fn", "base", "scale"))
    groups = min(max(scale.numel(), 1), 3)
    wanted = ("fn [n, n*dim]", "fn [2*n, n*dim]", "fn [n*(n+2), n*dim], or [n, n*dim]")[groups - 1]
    n = _streams("from_hf", keys["fn"], fn, wanted, groups=groups)
    _size("from_hf", keys["base"], base, fn.shape[0])
    _size("from_hf", keys["scale"], scale, groups)
    options: Options = {"n": n}
    if config is not None:
        options |= {ours: _config(config, theirs) for ours, theirs in _CONFIG[groups].items()}
        if options["n"] != n:
            raise ValueError(f"mhc.from_hf: {keys['fn']} has n={n}, but the config says hc_mult={options['n']}")
    if groups == 2:
        options["kind"] = "independent"
    weights = {"fn": fn, "base": base.reshape(-1), "scale": scale.reshape(-1)}
    return ({f"hc_{name}": value for name, value in weights.items()} if groups == 1 else weights), options


def to_hf(weights: Mapping[str, Tensor]) -> Weights:
    """{fn, base, scale} (or hc_fn, hc_base, hc_scale) for transformers' deepseek_v4 or hy_v4: float32, the same names

    Raises ValueError for norm_weight, which those models lack; fn * norm_weight gives the same model without it.
    """
    if isinstance(weights, Mapping) and "hc_fn" in weights:
        tensors = _checked("to_hf", weights, ("hc_fn", "hc_base", "hc_scale"))
        n = _streams("to_hf", "hc_fn", tensors["hc_fn"], "hc_fn [n, n*dim]", groups=1)
        _size("to_hf", "hc_base", tensors["hc_base"], n)
        _size("to_hf", "hc_scale", tensors["hc_scale"], 1)
        return tensors
    independent = isinstance(weights, Mapping) and isinstance(s := weights.get("scale"), Tensor) and s.numel() == 2
    return _ours("to_hf", weights, no_gamma="the model", groups=2 if independent else 3)[0]


def from_liger(state: Mapping[str, Tensor]) -> tuple[Weights, Options]:
    """fn = phi^T, base = b, scale = [alpha_pre, alpha_post, alpha_res]        phi [K, M], in float32

    `state` is a LigerMHC's state dict. Options: n, orientation="out_in", pre_eps=0.0. Liger's phi is float16 by
    default; the conversion cannot recover the lost bits.
    """
    own = _checked("from_liger", state, ("phi", "b", *_ALPHAS))
    n = _streams("from_liger", "phi", own["phi"], "phi [K, M] = [n*dim, n*(n+2)]", across=True)
    _size("from_liger", "b", own["b"], mix_count(n))
    for name in _ALPHAS:
        _size("from_liger", name, own[name], 1)
    scale = torch.stack([own[name].reshape(()) for name in _ALPHAS])
    weights = {"fn": own["phi"].T.contiguous(), "base": own["b"].reshape(-1), "scale": scale}
    return weights, {"n": n, "orientation": "out_in", "pre_eps": 0.0}


def to_liger(weights: Mapping[str, Tensor]) -> Weights:
    """phi = fn^T [K, M], b = base, alpha_pre, alpha_post, alpha_res = scale (0-dim each), in float32

    Raises ValueError for norm_weight, which Liger lacks; fn * norm_weight gives the same model without it.
    """
    ours, _ = _ours("to_liger", weights, no_gamma="Liger")
    pre, post, res = ours["scale"].clone().unbind(0)
    phi = ours["fn"].T.contiguous()
    return {"phi": phi, "b": ours["base"], "alpha_pre": pre, "alpha_post": post, "alpha_res": res}


def from_te(state: Mapping[str, Tensor], n: int = 4) -> tuple[Weights, Options]:
    """fn[:, i*dim + d] = phi[:, d*n + i], norm_weight likewise; base = beta, scale = alpha

    `state` has phi [M, K], alpha [3], beta [M] or [1, M] and optionally norm_weight [K] in TransformerEngine's layout,
    with the n streams innermost; convert activations with `streams_from_te`. Options: n, form="log", rms_eps=2^-23,
    pre_eps=0.0, orientation="in_out", and gamma=True if there is a norm_weight.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ValueError(f"mhc.from_te: n={n!r}, expected a whole number of at least 1")
    tensors = _checked("from_te", state, ("phi", "alpha", "beta"), optional=("norm_weight",))
    phi = tensors["phi"]
    if phi.dim() != 2 or phi.shape[0] != mix_count(n) or phi.shape[1] % n or not phi.shape[1]:
        raise _wrong_shape("from_te", "phi", phi, f"phi [M, K] = [{mix_count(n)}, dim*{n}] for n={n}")
    _size("from_te", "beta", tensors["beta"], mix_count(n))
    _size("from_te", "alpha", tensors["alpha"], 3)
    weights = {"fn": _outermost(phi, n), "base": tensors["beta"].reshape(-1), "scale": tensors["alpha"].reshape(-1)}
    options: Options = {"n": n, "form": "log", "rms_eps": TE_RMS_EPS, "pre_eps": 0.0, "orientation": "in_out"}
    if "norm_weight" in tensors:
        _size("from_te", "norm_weight", tensors["norm_weight"], phi.shape[1])
        weights["norm_weight"] = _outermost(tensors["norm_weight"].reshape(-1), n)
        options["gamma"] = True
    return weights, options


def to_te(weights: Mapping[str, Tensor]) -> Weights:
    """phi[:, d*n + i] = fn[:, i*dim + d], norm_weight likewise; alpha = scale, beta = base as [1, M]; in float32"""
    ours, n = _ours("to_te", weights)
    state = {"phi": _innermost(ours["fn"], n), "alpha": ours["scale"], "beta": ours["base"].reshape(1, -1)}
    if "norm_weight" in ours:
        state["norm_weight"] = _innermost(ours["norm_weight"], n)
    return state


def from_megatron(
    state: Mapping[str, Tensor], *, single_pass: bool = False, first_release: bool = False
) -> tuple[Weights, Options]:
    """fn = mapping_proj.weight [M, K], base = bias, scale = [alpha_pre, alpha_post, alpha_res], in float32

    `state` is that of a Megatron-LM HyperConnectionModule. Options: n, and rms_form="outside", because Megatron-LM
    adds eps to the root mean square. single_pass (mhc_single_pass, the lagged scheme of `HyperStack(lagged=True)`) has
    eps under the root. first_release is the code before its Sinkhorn and matrix became DeepSeek's: form="megatron",
    orientation="out_in", pre_eps=0.0.
    """
    if single_pass and first_release:
        raise ValueError("mhc.from_megatron: the first release has no single_pass")
    own = _checked("from_megatron", state, ("mapping_proj.weight", "bias", *_ALPHAS))
    n = _streams("from_megatron", "mapping_proj.weight", own["mapping_proj.weight"], "[M, K] = [n*(n+2), n*dim]")
    _size("from_megatron", "bias", own["bias"], mix_count(n))
    for name in _ALPHAS:
        _size("from_megatron", name, own[name], 1)
    scale = torch.stack([own[name].reshape(()) for name in _ALPHAS])
    options: Options = {"n": n} if single_pass else {"n": n, "rms_form": "outside"}
    if first_release:
        options |= {"form": "megatron", "orientation": "out_in", "pre_eps": 0.0}
    return {"fn": own["mapping_proj.weight"], "base": own["bias"].reshape(-1), "scale": scale}, options


def to_megatron(weights: Mapping[str, Tensor]) -> Weights:
    """mapping_proj.weight = fn, bias = base, alpha_pre, alpha_post, alpha_res = scale ([1] each), in float32

    Raises ValueError for norm_weight, which Megatron-LM lacks; fn * norm_weight gives the same model without it.
    """
    ours, _ = _ours("to_megatron", weights, no_gamma="Megatron-LM")
    alphas = dict(zip(_ALPHAS, ours["scale"].clone().split(1), strict=True))
    return {"mapping_proj.weight": ours["fn"], "bias": ours["base"], **alphas}


def streams_from_te(x: Tensor) -> Tensor:
    """[..., dim, n] -> [..., n, dim], contiguous. Raises ShapeError for fewer than two dimensions."""
    return _swapped("mhc.streams_from_te", x, "dim, n")


def streams_to_te(x: Tensor) -> Tensor:
    """[..., n, dim] -> [..., dim, n], contiguous. Raises ShapeError for fewer than two dimensions."""
    return _swapped("mhc.streams_to_te", x, "n, dim")


def _swapped(function: str, x: Tensor, axes: str) -> Tensor:
    check_tensor(function, "x", x)
    if x.dim() < 2:
        raise ShapeError(f"{function}: x is {list(x.shape)}, expected [*batch, {axes}]")
    return x.transpose(-1, -2).contiguous()


def _outermost(value: Tensor, n: int) -> Tensor:
    """The last axis from d*n + i to i*dim + d."""
    return value.unflatten(-1, (-1, n)).transpose(-1, -2).flatten(-2).contiguous()


def _innermost(value: Tensor, n: int) -> Tensor:
    """The last axis from i*dim + d to d*n + i."""
    return value.unflatten(-1, (n, -1)).transpose(-1, -2).flatten(-2).contiguous()


def _float(function: str, name: str, value: Tensor) -> Tensor:
    check_tensor(f"mhc.{function}", name, value)
    check_dtype(f"mhc.{function}", name, value, FLOATS)  # not float8: its scales would be lost
    return value.detach().float()


def _ours(function: str, weights: Mapping[str, Tensor], *, no_gamma: str = "", groups: int = 3) -> tuple[Weights, int]:
    """(HyperConnection's fn, base, scale and optional norm_weight in float32, n), after a check of their shapes."""
    tensors = _checked(function, weights, ("fn", "base", "scale"), optional=("norm_weight",))
    if no_gamma and "norm_weight" in tensors:
        raise ValueError(
            f"mhc.{function}: the weights have a norm_weight, which {no_gamma} does not support; use fn * norm_weight"
        )
    wanted = "fn [2*n, n*dim]" if groups == 2 else "fn [n*(n+2), n*dim]"
    n = _streams(function, "fn", tensors["fn"], wanted, groups=groups)
    _size(function, "base", tensors["base"], mixes_of(n, groups))
    _size(function, "scale", tensors["scale"], groups)
    if "norm_weight" in tensors:
        _size(function, "norm_weight", tensors["norm_weight"], tensors["fn"].shape[1])
    return {name: value if name == "fn" else value.reshape(-1) for name, value in tensors.items()}, n


def _checked(
    function: str, state: Mapping[str, Tensor], wanted: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Weights:
    """The wanted tensors and the optional ones that are present, in float32; any other key is an error."""
    _mapping(function, state)
    own = {name: value for name, value in state.items() if not str(name).startswith(("layer.", "norm."))}
    missing = [name for name in wanted if name not in own]
    unknown = [str(name) for name in own if name not in wanted + optional]
    if missing or unknown:
        problem = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        also = f" (and optionally {', '.join(optional)})" if optional else ""
        raise ValueError(
            f"mhc.{function}: the state {problem}; expected {', '.join(wanted)}{also}; {_listed('keys', own)}"
        )
    present = [*wanted, *(name for name in optional if own.get(name) is not None)]
    return {name: _float(function, name, own[name]) for name in present}


def _mapping(function: str, state: object) -> None:
    if not isinstance(state, Mapping):
        hint = ": its state_dict()" if isinstance(state, nn.Module) else ""
        raise TypeError(f"mhc.{function}: the weights are a {type(state).__name__}, expected a dict of tensors{hint}")


def _streams(function: str, name: str, fn: Tensor, wanted: str, *, groups: int = 3, across: bool = False) -> int:
    """n of fn [M, n*dim] with M = n*(n+2), 2n or n for 3, 2 or 1 groups of mixes; with `across`, fn is transposed."""
    mixes, features = (reversed(fn.shape) if across else fn.shape) if fn.dim() == 2 else (0, 0)
    n = streams_of(mixes) if groups == 3 else mixes // groups
    if not n or mixes_of(n, groups) != mixes or not features or features % n:
        raise _wrong_shape(function, name, fn, wanted)
    return n


def _hf_keys(state: Mapping[str, Tensor], prefix: str) -> dict[str, str]:
    """The state's keys of fn, base and scale, in either of the two spellings."""
    _mapping("from_hf", state)
    if not isinstance(prefix, str):
        raise TypeError(f"mhc.from_hf: prefix={prefix!r}, expected a string such as 'model.layers.0.attn_hc'")
    names_tried = []
    for joint in ("", "hc_") if not prefix or prefix[-1] in "._" else (".", "_", ".hc_"):
        keys = {name: f"{prefix}{joint}{name}" for name in ("fn", "base", "scale")}
        if all(key in state for key in keys.values()):
            return keys
        names_tried.append(keys["fn"])
    near = sorted(key for key in map(str, state) if key.endswith(("fn", "base", "scale")))
    raise ValueError(
        f"mhc.from_hf: no fn, base and scale under prefix {prefix!r} (tried {', '.join(dict.fromkeys(names_tried))}); "
        f"{_listed('keys of hyper-connections', near) if near else _listed('keys', state)}"
    )


def _listed(label: str, names: Iterable[object]) -> str:
    texts = [str(name) for name in names]
    listing = ", ".join(texts[:12]) + (f", ... ({len(texts)} in all)" if len(texts) > 12 else "")
    return f"{label}: {listing or 'nothing'}"


def _wrong_shape(function: str, name: str, value: Tensor, wanted: str) -> ValueError:
    return ValueError(f"mhc.{function}: {name} is {list(value.shape)}, expected {wanted}")


def _size(function: str, name: str, value: Tensor, size: int) -> None:
    if value.numel() != size:
        raise ValueError(f"mhc.{function}: {name} has shape {list(value.shape)}, expected {size} elements")


def _config(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        if name not in config:
            raise ValueError(f"mhc.from_hf: the config lacks {name}; {_listed('keys', config)}")
        return config[name]
    if not hasattr(config, name):
        raise ValueError(f"mhc.from_hf: the config (a {type(config).__name__}) lacks {name}")
    return getattr(config, name)
