"""Liger-Kernel's hyper-connections: the same mathematics with phi transposed and in bfloat16."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from goldsmith.cli.bench.subject import Subject, Variant

NAME = "liger"


def missing() -> str | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if not torch.cuda.is_available():
        return "its kernels need a GPU"
    return None


def version() -> str:
    return importlib.metadata.version("liger-kernel")


def prepare(subject: Subject) -> Variant | None:
    build = _BUILDERS.get(subject.name)
    if build is None or any(subject.tensors.get(name) is not None for name in subject.op.optional):
        return None
    return build(subject)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _coefficients(subject: Subject) -> tuple[Callable[[Tensor], tuple], list[Tensor], Tensor]:
    from liger_kernel.transformers.functional import liger_mhc_coeffs

    t, o = _tensors(subject), subject.options
    x, phi, bias = _leaf(t["x"]), _leaf(t["phi"].mT.contiguous().bfloat16()), _leaf(t["bias"])
    alphas = [_leaf(a) for a in t["alpha"].unbind()]
    settings = {
        "tmax": o["iterations"],
        "rms_eps": o["rms_eps"],
        "pre_eps": o["pre_eps"],
        "sinkhorn_eps": o["sinkhorn_eps"],
        "post_mult": o["post_mult"],
    }
    return lambda x: liger_mhc_coeffs(x, phi, bias, *alphas, **settings), [x, phi, bias, *alphas], x


def _coefficients_variant(subject: Subject) -> Variant | None:
    if not _same_model(subject):
        return None
    coefficients, leaves, x = _coefficients(subject)
    return Variant(NAME, lambda: coefficients(x), leaves, note="phi in bfloat16")


def _pre_variant(subject: Subject) -> Variant | None:
    if not _same_model(subject):
        return None
    from liger_kernel.transformers.functional import liger_mhc_pre

    coefficients, leaves, x = _coefficients(subject)

    def forward() -> tuple:
        h_pre, h_post, h_res = coefficients(x)
        return liger_mhc_pre(x, h_pre), h_post, h_res

    return Variant(NAME, forward, leaves, note="phi in bfloat16")


def _post_variant(subject: Subject) -> Variant | None:
    from liger_kernel.transformers.functional import liger_mhc_post_res

    leaves = _post_leaves(subject)
    return Variant(NAME, lambda: liger_mhc_post_res(*leaves), leaves)


def _post_leaves(subject: Subject) -> list[Tensor]:
    """x, f, h_post, and h_res in Liger's layout, output by input."""
    t = _tensors(subject)
    h_res = t["h_res"] if subject.options["orientation"] == "out_in" else t["h_res"].mT.contiguous()
    return [_leaf(v) for v in (t["x"], t["f"], t["h_post"], h_res)]


def _connection_variant(subject: Subject) -> Variant | None:
    if not _same_model(subject):
        return None
    from liger_kernel.transformers.functional import liger_mhc_post_res, liger_mhc_pre

    coefficients, leaves, x = _coefficients(subject)

    def forward() -> Tensor:
        h_pre, h_post, h_res = coefficients(x)
        return liger_mhc_post_res(x, liger_mhc_pre(x, h_pre), h_post, h_res)

    note = "phi in bfloat16; h_res transposed, which costs the same"
    return Variant(NAME, forward, leaves, note=note, comparable=False)


def _boundary_variant(subject: Subject) -> Variant | None:
    if not _same_model(subject):
        return None
    from liger_kernel.transformers.functional import liger_mhc_post_res, liger_mhc_pre

    coefficients, parameters, _ = _coefficients(subject)
    streams = _post_leaves(subject)

    def forward() -> tuple:
        x_next = liger_mhc_post_res(*streams)
        h_pre, h_post, h_res = coefficients(x_next)
        return x_next, liger_mhc_pre(x_next, h_pre), h_post, h_res

    return Variant(NAME, forward, [*streams, *parameters[1:]], note="phi in bfloat16")


def _same_model(subject: Subject) -> bool:
    return subject.options["form"] == "deepseek" and bool(subject.options["sinkhorn"])


def _tensors(subject: Subject) -> dict[str, Any]:
    return dict(subject.tensors)


_BUILDERS: dict[str, Callable[[Subject], Variant | None]] = {
    "mhc.coefficients": _coefficients_variant,
    "mhc.pre": _pre_variant,
    "mhc.post": _post_variant,
    "mhc.boundary": _boundary_variant,
    "mhc.connection": _connection_variant,
}
