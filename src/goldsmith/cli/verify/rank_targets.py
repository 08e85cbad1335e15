"""Targets of `goldsmith verify --ranks`: operators on DTensors, and how ranks load a user's target."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from ...assay.declare.case import Case
from ...assay.declare.target import Target
from ...assay.ranks import RankTarget, sharded
from ...assay.ranks.pool import RankGroup
from ...core.op import Op
from ..targets import op_target
from ..user_targets import load_targets

TOKENS, EXPERTS, REPLICATED, TWO_DIMENSIONS = "tokens", "experts", "replicated", "tokens and replicas"


class OperatorOnRanks:
    """An operator as a function of its inputs and options by name, which ranks can import."""

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name
        op = Op.get(name)
        empty = inspect.Parameter.empty
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY, default=None if p in op.optional else empty)
                for p in (*op.inputs, *op.options)
            ]
        )

    def __reduce__(self) -> tuple[type[OperatorOnRanks], tuple[str]]:
        return OperatorOnRanks, (self.name,)

    def __call__(self, **values: Any) -> Any:
        op = Op.get(self.name)
        return op(*(values.get(name) for name in op.inputs), **{name: values[name] for name in op.options})


@dataclass(frozen=True)
class RankLayout:
    """How an operator's inputs lie on the mesh, by the name under which a report lists it."""

    name: str
    placements: dict[str, object]
    mesh: tuple[int, ...] | None = None


def rank_cases(op: Op, world: int) -> list[Case]:
    """The operator's small cases: first one with tokens for every rank, unevenly many if any has, then the others."""
    cases = [case for case in op.cases if "large" not in case.tags]
    first = max(cases, key=lambda case: _spread(op, case, world))
    return [first, *(case for case in cases if case is not first)]


def _spread(op: Op, case: Case, world: int) -> int:
    """2 if every rank gets tokens of the case and some get more than others, 1 if all get equally many, otherwise 0."""
    values = case.build(torch.float32, "cpu", 0)
    given = [name for name in op.inputs if op.axes[name].per_token and values.get(name) is not None]
    tokens = min((values[n].shape[0] if op.axes[n].token_axes(values[n]) else 0 for n in given), default=0)
    return 0 if tokens < world else 2 if tokens % world or world == 1 else 1


def layouts(op: Op, case: Case, world: int) -> list[RankLayout]:
    """The placements to try: tokens sharded, everything replicated, experts sharded, and two mesh dimensions."""
    values = case.build(torch.float32, "cpu", 0)
    given = [name for name in op.inputs if isinstance(values.get(name), torch.Tensor)]
    tokens = [name for name in given if op.axes[name].per_token and op.axes[name].token_axes(values[name])]
    chosen = [RankLayout(TOKENS, dict.fromkeys(tokens, Shard(0)))] if tokens else []
    if op.expert_axis is not None and not values.get("layout"):  # packed tables are not sharded
        tables = [n for n in given if op.axes[n].of(values[n]).names[:1] == op.expert_axis[:1]]
        chosen += [RankLayout(EXPERTS, dict.fromkeys(tables, Shard(0)))] if tables else []
    chosen.append(RankLayout(REPLICATED, {}))
    if tokens and world >= 4 and world % 2 == 0:
        chosen.append(RankLayout(TWO_DIMENSIONS, dict.fromkeys(tokens, (Shard(0), Replicate())), (2, world // 2)))
    return chosen


def operator_target(op: Op, layout: RankLayout, pool: RankGroup) -> Target:
    """The operator on the pool's ranks, with its forward in float64 as golden."""
    whole = op_target(op, "reference")
    return Target(
        sharded(OperatorOnRanks(op.name), pool, placements=layout.placements, mesh=layout.mesh), whole.golden,
        cases=op.cases, outputs=op.outputs, grads=whole.grads, decisions=whole.decisions,
        backward="auto" if op.grads else None, name=f"{op.name} on {pool.world} ranks",
    )  # fmt: skip


def explained_target(op: Op, layout: RankLayout) -> RankTarget:
    """The same for `ranks.check`, which says what is wrong."""
    whole = op_target(op, "reference")
    mesh = None if layout.mesh is None else {f"dim{d}": size for d, size in enumerate(layout.mesh)}
    return RankTarget(
        OperatorOnRanks(op.name), whole.golden, cases=op.cases, outputs=op.outputs, grads=whole.grads,
        decisions=whole.decisions, backward="auto" if op.grads else None, placements=layout.placements, mesh=mesh,
        dtensors=True,
    )  # fmt: skip


def loadable(target: Target, source: str, index: int) -> RankTarget:
    """The target, which ranks load by its name on the command line."""
    if not isinstance(target, RankTarget):
        raise TypeError(f"{source}: expected an assay.ranks.RankTarget, got {type(target).__name__}")
    return replace(target, load=partial(_load, source, index))


def _load(source: str, index: int) -> Target:
    return load_targets(source)[index]
