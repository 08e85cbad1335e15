"""How the error analysis treats each operator: as a view, by a rule, through a composition, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import data_movement, elementwise, sums
from .composed_operators import COMPOSED
from .rule_context import Rule

RULES: dict[str, Rule] = {**elementwise.RULES, **sums.RULES, **data_movement.RULES}
_OVERWRITES = {"copy_", "fill_", "zero_"}  # in place, without looking at what was there


@dataclass(frozen=True)
class OperatorTreatment:
    """What to do with one overload; `label` is its name in notes."""

    label: str
    rule: Rule | None = None
    composed: Callable | None = None
    view: bool = False
    exact: bool = False
    unseen: bool = False
    inplace: bool = False
    reads_target: bool = True
    terms: Callable[..., int] | None = None  # of the sum that its result is
    size: Callable[..., Tensor] | None = None  # of that sum's terms


_known: dict[
    int, tuple[OpOverload, OperatorTreatment]
] = {}  # by id: an overload's own hash takes longer than all else here


def treatment_of(func: OpOverload) -> OperatorTreatment:
    """The plan of an overload, by its base name: `add`, `add_`, and all their overloads share one rule."""
    found = _known.get(id(func))
    if found is None:
        found = _known[id(func)] = func, _made(func)
    return found[1]


def _made(func: OpOverload) -> OperatorTreatment:
    namespace, full = func._schema.name.split("::")
    label = f"{namespace}.{full}"
    if namespace != "aten":
        return OperatorTreatment(label)
    written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if full == "to":  # declared a view, since it may return its argument
        return OperatorTreatment(label, composed=func.decompose)
    if func.is_view or full in data_movement.VIEWS:
        return OperatorTreatment(label, view=True)
    inplace = written == [0] and full.endswith("_")
    if written and not inplace:
        return OperatorTreatment(label)  # out= variants and fused optimisers
    name = full[:-1] if inplace else full
    reads = full not in _OVERWRITES
    if name in data_movement.EXACT:
        return OperatorTreatment(label, exact=True, inplace=inplace, reads_target=reads)
    if name in data_movement.UNSEEN and not inplace:
        return OperatorTreatment(label, unseen=True)
    if name in RULES:
        terms, size = (None, None) if inplace else (sums.TERMS.get(name), sums.SIZES.get(name))
        return OperatorTreatment(label, rule=RULES[name], inplace=inplace, reads_target=reads, terms=terms, size=size)
    composed = COMPOSED.get(name) or (None if inplace else _decomposition(func))
    return OperatorTreatment(label, composed=composed, inplace=inplace)


def decided(treatment: OperatorTreatment) -> OperatorTreatment:
    """The plan within a decision: what is made there is exact."""
    return (
        treatment
        if treatment.view
        else OperatorTreatment(treatment.label, exact=True, inplace=treatment.inplace, reads_target=False)
    )


def _decomposition(func: OpOverload) -> Callable | None:
    """torch's own composition, where it is written in aten operators (those in torch._refs end in prims)."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose
    from torch._decomp import decomposition_table

    found = decomposition_table.get(func)
    return found if found is not None and found.__module__ == "torch._decomp.decompositions" else None
