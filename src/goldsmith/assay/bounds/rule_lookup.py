"""Lookup of the treatment of each operator: as a view, by a rule, by decomposition, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import data_movement, elementwise, products, softmax, sums
from .composed_operators import COMPOSED
from .rule_context import Rule

RULES: dict[str, Rule] = {
    **elementwise.RULES, **sums.RULES, **softmax.RULES, **products.RULES, **data_movement.RULES
}  # fmt: skip
_OVERWRITES = {"copy_", "fill_", "zero_"}  # in place, without reading the old value


@dataclass(frozen=True)
class OperatorTreatment:
    """The treatment of one overload; `label` is its name in notes."""

    label: str
    rule: Rule | None = None
    composed: Callable | None = None
    view: bool = False
    exact: bool = False
    unseen: bool = False
    inplace: bool = False
    reads_target: bool = True
    terms: Callable[..., int] | None = None  # number of terms if the result is a sum
    size: Callable[..., Tensor] | None = None  # sum of the absolute values of those terms


_known: dict[
    int, tuple[OpOverload, OperatorTreatment]
] = {}  # by id: hashing an overload costs more than the rest of the lookup


def treatment_of(func: OpOverload) -> OperatorTreatment:
    """The treatment of an overload, by its base name: `add`, `add_` and all their overloads share one rule."""
    entry = _known.get(id(func))
    if entry is None:
        entry = _known[id(func)] = func, _treatment(func)
    return entry[1]


def _treatment(func: OpOverload) -> OperatorTreatment:
    namespace, full = func._schema.name.split("::")
    label = f"{namespace}.{full}"
    if namespace != "aten":
        return OperatorTreatment(label)
    written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if full == "to":  # declared a view because it may return its argument
        return OperatorTreatment(label, composed=func.decompose)
    if func.is_view or full in data_movement.VIEWS:
        return OperatorTreatment(label, view=True)
    inplace = written == [0] and full.endswith("_")
    if written and not inplace:
        return OperatorTreatment(label)  # out= variants and fused optimizers
    name = full[:-1] if inplace else full
    reads = full not in _OVERWRITES
    if name in data_movement.EXACT:
        return OperatorTreatment(label, exact=True, inplace=inplace, reads_target=reads)
    if name in data_movement.CONSTANTS and not inplace:
        return OperatorTreatment(label, unseen=True)
    if name in RULES:
        terms, size = (None, None) if inplace else (products.TERMS.get(name), products.SIZES.get(name))
        return OperatorTreatment(label, rule=RULES[name], inplace=inplace, reads_target=reads, terms=terms, size=size)
    composed = COMPOSED.get(name) or (None if inplace else _decomposition(func))
    return OperatorTreatment(label, composed=composed, inplace=inplace)


def decided(treatment: OperatorTreatment) -> OperatorTreatment:
    """The treatment inside a decision, where every result is exact."""
    return (
        treatment
        if treatment.view
        else OperatorTreatment(treatment.label, exact=True, inplace=treatment.inplace, reads_target=False)
    )


def _decomposition(func: OpOverload) -> Callable | None:
    """torch's decomposition if it uses aten operators (those in torch._refs end in prims)."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose
    from torch._decomp import decomposition_table

    decomposition = decomposition_table.get(func)
    return (
        decomposition
        if decomposition is not None and decomposition.__module__ == "torch._decomp.decompositions"
        else None
    )
