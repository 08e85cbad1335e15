"""Converts the weights of other projects' layers to and from our modules.

`from_*` returns a module, `to_*` a state dict with the other project's names; both copy the tensors. A round trip
repeats bit for bit, with one exception: a BatchNorm's 16-bit tensors come back in float32 with equal values, because
our modules keep them in float32. Unknown or missing keys, tensors of the wrong shape and unsupported options raise
ValueError that names the offending key; tensors whose dtype differs from the first one's raise TypeError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..core.shapes import check_choice, check_dtype, check_tensor, kind
from ._common import FLOATS, check_count, check_flag, same_dtype, sum_dtype
from ._layers import Float32BatchNorm, check_k
from .atomic_experts.op import ACTIVATIONS
from .modules import PAPER, OmniMoE
from .peer import PEER

State = dict[str, Tensor]

_OMNIMOE = {
    "w_in": "up_embed.weight",
    "w_out": "down_embed.weight",
    "router_x.weight": "router_gate_x.weight",
    "router_y.weight": "router_gate_y.weight",
    "shared_gate.weight": "gate_proj.weight",
    "shared_up.weight": "up_proj.weight",
    "shared_down.weight": "down_proj.weight",
    **{
        f"router_norm_{axis}.{name}": f"router_norm_{axis}.{name}"
        for axis in "xy"
        for name in ("running_mean", "running_var", "num_batches_tracked")
    },
}
_PEER = {"w_in": "weight_down_embed.weight", "w_out": "weight_up_embed.weight", "query.weight": "to_queries.0.weight"}
_MEMORY = {"w_out": "values.weight", "query.weight": "to_queries.weight"}
_LAYER_NORM = {"norm.weight": "norm.weight", "norm.bias": "norm.bias"}
_BATCH_NORM = {
    f"norm.{name}": f"norm.fn.{name}"
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
}
_PRE_NORM = {"pre_norm.weight": "pre_layernorm.weight", "pre_norm.bias": "pre_layernorm.bias"}
_OUTPUT_NORM = {"output_norm.weight": "output_norm.weight", "output_norm.bias": "output_norm.bias"}


def from_omnimoe(state_dict: Mapping[str, Tensor], *, k: int, activation: str = "silu") -> OmniMoE:
    """OmniMoE.paper with w_in = up_embed, w_out = down_embed, router_x/y = router_gate_x/y, shared_* = *_proj

    If the number N of rows in the tables is not a square, s = floor(sqrt(N)), as in OmniMoE: experts from s * s on can
    never be chosen, but their rows are kept.
    """
    tensors = _renamed("from_omnimoe", state_dict, _OMNIMOE)
    s, dim = _matrix("from_omnimoe", "router_gate_x.weight", tensors["router_x.weight"])
    rows = _matrix("from_omnimoe", "up_embed.weight", tensors["w_in"])[0]
    if s != math.isqrt(rows):
        raise _wrong("from_omnimoe", "router_gate_x.weight", tensors["router_x.weight"], f"floor(sqrt({rows})) rows")
    intermediate = _matrix("from_omnimoe", "gate_proj.weight", tensors["shared_gate.weight"])[0]
    shapes: dict[str, tuple[int, ...]] = {
        "w_in": (rows, dim),
        "w_out": (rows, dim),
        "router_y.weight": (s, dim),
        "shared_down.weight": (dim, intermediate),
    }
    shapes |= {"shared_gate.weight": (intermediate, dim), "shared_up.weight": (intermediate, dim)}
    batches = {"running_mean": (s,), "running_var": (s,), "num_batches_tracked": ()}
    shapes |= {f"router_norm_{axis}.{name}": shape for axis in "xy" for name, shape in batches.items()}
    _shapes("from_omnimoe", tensors, shapes, _OMNIMOE)
    _options("from_omnimoe", k, s, activation)
    module = OmniMoE.paper(dim, (s, s), k, intermediate_size=intermediate, activation=activation, device="meta")
    return _filled(module, tensors)


def to_omnimoe(module: OmniMoE) -> State:
    """OmniMoE's state dict, with copies; the module must have the options of `OmniMoE.paper` and a shared expert"""
    _instance("to_omnimoe", module, OmniMoE)
    wanted = {name: (getattr(module, name), value) for name, value in PAPER.items()}
    _form("to_omnimoe", {**wanted, "num_experts": (module.sizes, (module.sizes[0],) * 2)})
    if not module.intermediate_size:
        raise ValueError("router.to_omnimoe: intermediate_size=0, but OmniMoE always has a shared expert")
    return _copied(module, _OMNIMOE)


def from_peer_pytorch(
    state_dict: Mapping[str, Tensor],
    *,
    k: int,
    heads_compete: bool,
    activation: str = "gelu",
    product_key_topk: int | None = None,
) -> PEER:
    """w_in = weight_down_embed, w_out = weight_up_embed (the names are swapped there), keys as (axis, head, s, dim)

    k is num_experts_per_head. heads_compete is the opposite of non_competing_scores. That is True by default, and
    PEER-pytorch then takes one expert per head with weight relu(score) for any k; so there is no default here. A
    product_key_topk below the number of selected experts is refused, because its top-k is not exact.
    """
    function = "from_peer_pytorch"
    check_count(f"router.{function}", "k", k)
    check_flag(f"router.{function}", "heads_compete", heads_compete)
    k = k if heads_compete else 1
    if product_key_topk is not None:
        check_count(f"router.{function}", "product_key_topk", product_key_topk, ", or None")
    if product_key_topk is not None and product_key_topk < k:
        raise ValueError(f"router.{function}: product_key_topk={product_key_topk} < {k}: no exact top-k, not offered")
    gamma = {"pre_norm.gamma": "norm.gamma"} if "norm.gamma" in _mapping(function, state_dict) else {}
    names = {**_PEER, "keys": "keys", **gamma}
    tensors = _renamed(function, state_dict, names)
    heads, s, dim, key_dim = _keyed(function, tensors)
    rows = _matrix(function, names["w_in"], tensors["w_in"])[0]
    separate = rows == heads * s * s and heads > 1
    shapes = {name: (s * s * (heads if separate else 1), dim) for name in ("w_in", "w_out")}
    _shapes(function, tensors, {**shapes, "pre_norm.gamma": (dim,)}, names)
    _options(function, k, s, activation)
    module = PEER(
        dim, s * s, k, heads=heads, key_dim=key_dim, activation=activation,
        weights="softmax" if heads_compete else "relu", separate_tables=separate,
        pre_norm="rms" if gamma else "none", device="meta",
    )  # fmt: skip
    return _filled(module, tensors)


def to_peer_pytorch(module: PEER) -> State:
    """PEER-pytorch's state dict, with copies; its num_experts_per_head is k, non_competing_scores is weights="relu" """
    _instance("to_peer_pytorch", module, PEER)
    form = {"query_norm": (module.query_norm, "none"), "values_only": (module.values_only, False)}
    form["output_norm"] = (module.output_norm is not None, False)
    if module.weights == "relu":
        form["k"] = (module.k, 1)
    _form("to_peer_pytorch", form)
    if module.pre_norm_kind == "layer":
        raise ValueError("router.to_peer_pytorch: pre_norm='layer'; PEER-pytorch supports 'none' or 'rms'")
    gamma = {"pre_norm.gamma": "norm.gamma"} if module.pre_norm_kind == "rms" else {}
    return _exported(module, {**_PEER, **gamma})


def from_product_key_memory(
    state_dict: Mapping[str, Tensor], *, k: int, compete: bool = True, differentiable_topk: bool = False
) -> PEER:
    """A PEER with values_only: w_out = values, query = to_queries, keys as (axis, head, s, dim), norms as in the state

    k is topk; compete is the opposite of non_competitive_gates. concat_values_and_combine and differentiable_topk are
    refused.
    """
    function = "from_product_key_memory"
    check_flag(f"router.{function}", "compete", compete)
    if differentiable_topk:
        raise ValueError(f"router.{function}: differentiable_topk is not offered: its scores are not those of a top-k")
    if any(str(name).startswith("maybe_concat_combine") for name in _mapping(function, state_dict)):
        raise ValueError(
            f"router.{function}: concat_values_and_combine is not offered: values must be as wide as the layer"
        )
    batch = any(str(name).startswith("norm.fn.") for name in state_dict)
    names = {**_MEMORY, "keys": "keys", **(_BATCH_NORM if batch else _LAYER_NORM)}
    pre, out = ("pre_layernorm.weight" in state_dict, "output_norm.weight" in state_dict)
    names |= (_PRE_NORM if pre else {}) | (_OUTPUT_NORM if out else {})
    tensors = _renamed(function, state_dict, names)
    heads, s, dim, key_dim = _keyed(function, tensors)
    shapes = {name: (dim if name.startswith(("pre", "output")) else key_dim,) for name in names if "norm" in name}
    _shapes(function, tensors, {**shapes, "norm.num_batches_tracked": (), "w_out": (s * s, dim)}, names)
    _options(function, k, s)
    module = PEER(
        dim, s * s, k, heads=heads, key_dim=key_dim, weights="softmax" if compete else "relu", values_only=True,
        query_norm="batch" if batch else "layer", pre_norm="layer" if pre else "none", output_norm=out, device="meta",
    )  # fmt: skip
    return _filled(module, tensors)


def to_product_key_memory(module: PEER) -> State:
    """product-key-memory's state dict, with copies, of a module with values_only, a query_norm and one table"""
    function = "to_product_key_memory"
    _instance(function, module, PEER)
    _form(function, {"values_only": (module.values_only, True), "separate_tables": (module.separate_tables, False)})
    if module.query_norm == "none" or module.pre_norm_kind == "rms":
        raise ValueError(
            f"router.{function}: query_norm={module.query_norm!r}, pre_norm={module.pre_norm_kind!r}; "
            "product-key-memory supports a query_norm of 'layer' or 'batch' and a pre_norm of 'none' or 'layer'"
        )
    names = {**_MEMORY, **(_BATCH_NORM if module.query_norm == "batch" else _LAYER_NORM)}
    names |= _PRE_NORM if module.pre_norm_kind == "layer" else {}
    return _exported(module, names | (_OUTPUT_NORM if module.output_norm is not None else {}))


# shared by the converters


def _mapping(function: str, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not isinstance(state, Mapping):
        raise TypeError(f"router.{function}: state_dict is {kind(state)}, expected a mapping of tensors")
    return state


def _renamed(function: str, state: Mapping[str, Tensor], names: Mapping[str, str]) -> State:
    """The tensors by our names; the state must have exactly the other project's keys."""
    _mapping(function, state)
    missing = sorted(set(names.values()) - set(state))
    unknown = sorted(str(name) for name in set(state) - set(names.values()))
    if missing or unknown:
        text = "; ".join(f"{label}: {', '.join(k)}" for label, k in (("missing", missing), ("unknown", unknown)) if k)
        raise ValueError(f"router.{function}: {text}; it has {len(state)} keys, expected {', '.join(names.values())}")
    _same_dtype(f"router.{function}", {theirs: state[theirs] for theirs in names.values()})
    return {ours: state[theirs].detach() for ours, theirs in names.items()}


def _same_dtype(op: str, state: State) -> None:
    """Refuses tensors not in the first one's float dtype. A BatchNorm's may be float32, and its count is an int64."""
    first, like = next(iter(state.items()))
    for name, tensor in state.items():
        check_tensor(op, name, tensor)
        if name.endswith("num_batches_tracked"):
            check_dtype(op, name, tensor, (torch.int64,))
            continue
        check_dtype(op, name, tensor, FLOATS)
        of_batches = name.startswith(("router_norm_", "norm.fn."))
        if not (of_batches and tensor.dtype == sum_dtype(like.dtype)):
            same_dtype(op, [(first, like), (name, tensor)])


def _keyed(function: str, tensors: State) -> tuple[int, int, int, int]:
    """(heads, s, dim, key_dim); permutes tensors["keys"] from (head, s, axis, dim) to our order."""
    keys = tensors["keys"]
    if keys.dim() != 4 or keys.shape[2] != 2:
        raise _wrong(function, "keys", keys, "[heads, s, 2, key_dim]")
    heads, s, _, key_dim = keys.shape
    rows, dim = _matrix(function, "to_queries", tensors["query.weight"])
    if rows != 2 * heads * key_dim:
        raise _wrong(function, "to_queries", tensors["query.weight"], f"2 * {heads} * {key_dim} rows, to match keys")
    tensors["keys"] = keys.permute(2, 0, 1, 3)
    return heads, s, dim, key_dim


def _options(function: str, k: int, s: int, activation: str = "silu") -> None:
    """Checks k and activation here, so that an error names the converter and not the module."""
    check_k(f"router.{function}", k, (s, s))
    check_choice(f"router.{function}", "activation", activation, ACTIVATIONS)


def _copied(module: nn.Module, names: Mapping[str, str]) -> State:
    own = module.state_dict()
    return {theirs: own[ours].clone(memory_format=torch.contiguous_format) for ours, theirs in names.items()}


def _exported(module: PEER, names: Mapping[str, str]) -> State:
    state = _copied(module, {**names, "keys": "keys"})
    return state | {"keys": state["keys"].permute(1, 2, 0, 3).contiguous()}


Module = TypeVar("Module", bound=nn.Module)


def _filled(module: Module, tensors: State) -> Module:
    """The module with its meta tensors replaced by copies; tables may have more rows than can be chosen."""
    for name, value in tensors.items():
        owner, _, own = name.rpartition(".")
        holder = module.get_submodule(owner)
        copied = value.clone(memory_format=torch.contiguous_format)
        if isinstance(holder, Float32BatchNorm) and copied.is_floating_point() and copied.element_size() < 4:
            copied = copied.float()
        if own in holder._parameters:
            holder._parameters[own] = nn.Parameter(copied)
        else:
            holder._buffers[own] = copied
    return module


def _matrix(function: str, name: str, value: Tensor) -> Sequence[int]:
    if value.dim() != 2:
        raise _wrong(function, name, value, "two dimensions")
    return value.shape


def _shapes(function: str, tensors: State, wanted: Mapping[str, tuple[int, ...]], names: Mapping[str, str]) -> None:
    for ours, shape in wanted.items():
        if ours in tensors and tuple(tensors[ours].shape) != shape:
            raise _wrong(function, names[ours], tensors[ours], str(list(shape)))


def _wrong(function: str, name: str, value: Tensor, wanted: str) -> ValueError:
    return ValueError(f"router.{function}: {name} is {list(value.shape)}, expected {wanted}")


def _instance(function: str, module: object, wanted: type) -> None:
    if not isinstance(module, wanted):
        raise TypeError(f"router.{function}: module is {kind(module)}, expected a router.{wanted.__name__}")


def _form(function: str, form: Mapping[str, tuple[object, object]]) -> None:
    """Refuses a module whose options differ from what the other project supports: {name: (own, wanted)}."""
    for name, (own, wanted) in form.items():
        if own != wanted:
            raise ValueError(f"router.{function}: {name}={own!r}, but the other project supports only {wanted!r}")
