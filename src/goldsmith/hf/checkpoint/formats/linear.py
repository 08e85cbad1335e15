"""The weights of linear layers outside the experts, decoded to float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .layer import TensorsByName
from .scheme import Scheme

CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32)


def decoded(source: TensorsByName, siblings: Mapping[str, str], name: str, used: set[str]) -> Tensor | None:
    """The weight with this name if the files hold it in codes, otherwise None.

    used       gets the names of its tensors
    siblings   the last part of the name of every tensor of the same layer -> its name
    """
    stem = name.removesuffix(".weight")
    scheme = source.scheme(stem) if stem != name else None
    if scheme is None or not scheme.marks & siblings.keys():
        return None
    unknown = sorted(siblings.keys() - scheme.known - {"bias"})
    if unknown:
        raise ValueError(f"{source.label}: {stem} has {unknown[0]}, which is not known ({scheme.label})")
    used.update(full for part, full in siblings.items() if part != "bias")
    wanted = {*scheme.parts, *scheme.optional, *scheme.aliases}
    parts = {part: source.get(full) for part, full in siblings.items() if part in wanted}
    return weights_of(scheme, parts, f"{source.label}: {stem}")


def weights_of(scheme: Scheme, tensors: Mapping[str, Tensor], where: str) -> Tensor:
    """The weight of one layer in float32; a ValueError begins with `where`."""
    parts = {scheme.aliases.get(part, part): tensor for part, tensor in tensors.items()}
    missing = [part for part in scheme.parts if part not in parts]
    if missing:
        raise ValueError(f"{where} has no {missing[0]} ({scheme.label})")
    try:
        weights = scheme.weights(parts)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if weights.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(weights)):
        raise ValueError(f"{where}: a weight is NaN or infinite; scales must be finite numbers")
    return weights


def check_plain(source: TensorsByName, name: str, tensor: Tensor) -> Tensor:
    """The tensor; raises ValueError if it holds codes, which have lost their scales."""
    if name.endswith(".weight") and tensor.dtype in CODES:
        raise ValueError(f"{source.label}: {name} holds codes ({tensor.dtype}), but their scales are missing")
    return tensor
