"""RankTarget: a function that runs on every rank, its golden in one process, and how its tensors lie on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor import Placement, Replicate

from ...core.tracing import TargetError
from ..declare.binding import bind, inputs_and_scalars
from ..declare.explained_arguments import explained_arguments
from ..declare.target import MISSING, Target
from .layout import Placed

MESH = "mesh"  # a parameter of this name receives the DeviceMesh


@explained_arguments(MISSING)
@dataclass(frozen=True, eq=False, kw_only=True)
class RankTarget(Target):
    """A computation on several ranks, to be proven against its golden, the plain function of whole tensors

        RankTarget(step, golden, cases=..., placements={"x": Shard(0), "dweight": Replicate()})

    The candidate runs on every rank. It receives the rank's own part of every input as a plain tensor, communicates as
    it likes, and returns its part of every result. All other arguments are Target's.

    placements  {input or result: Shard(0), Replicate(), Partial(), or one for each mesh dimension}. "x.grad" names the
                gradient of x, which otherwise lies like x. Default: Replicate()
    mesh        {name: size} of the mesh's dimensions; one size may be -1. Default: one dimension, "ranks". A candidate
                with a parameter `mesh` receives the DeviceMesh
    dtensors    whether the candidate takes and returns DTensors
    """

    placements: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] | None = None
    dtensors: bool = False
    load: Callable[[], Target] | None = field(default=None, repr=False)  # how ranks get the target if pickle does not

    def __post_init__(self) -> None:
        if not isinstance(self.placements, Mapping):
            raise TypeError(f"placements: expected a dict by tensor name, got {type(self.placements).__name__}")
        for name, given in self.placements.items():
            each = given if isinstance(given, Sequence) else (given,)
            if not each or not all(isinstance(p, Placement) for p in each):
                raise TypeError(
                    f"placements[{name!r}]: expected Shard(i), Replicate() or Partial() of torch.distributed.tensor, "
                    f"or one of them for each mesh dimension, got {given!r}"
                )
        super().__post_init__()

    def _check_bindings(self) -> None:
        supply = self.smallest().build(self.dtypes[0], "cpu", 0)
        bind("candidate", self.candidate, (*supply, MESH))
        bind("golden", self.golden, supply)
        inputs, _ = inputs_and_scalars(supply)
        known = [*inputs, *(f"{name}.grad" for name in inputs), *(self.outputs or ())]
        unknown = [name for name in self.placements if name not in known]
        if self.outputs is not None and unknown:
            raise TargetError(f"placements: {unknown[0]!r} is no input or result; there are: {', '.join(known)}")
        for name, tensor in inputs.items():
            given = self.placements.get(name, ())
            for placement in given if isinstance(given, Sequence) else (given,):
                if placement.is_shard() and not -tensor.dim() <= placement.dim < tensor.dim():
                    raise TargetError(
                        f"placements[{name!r}]: {placement!r}, but {name} has {tensor.dim()} axes: {list(tensor.shape)}"
                    )

    def sizes(self, world: int) -> dict[str, int]:
        """{name: size} of the mesh's dimensions for so many ranks; raises TargetError if they do not fit."""
        sizes = dict(self.mesh or {"ranks": -1})
        known = 1
        for size in sizes.values():
            known *= size if size > 0 else 1
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
            raise TargetError(f"mesh: expected sizes of at least 1, and -1 for at most one of them, got {sizes}")
        if world % known or (not free and world != known):
            raise TargetError(
                f"mesh: {self.name} needs {'a multiple of ' if free else ''}{known} ranks for its mesh {sizes}, "
                f"but there are {world}"
            )
        return {name: world // known if size == -1 else size for name, size in sizes.items()}

    def placed(self, name: str, dimensions: int) -> Placed:
        """The placements of a tensor, one for each mesh dimension; a gradient's are its input's by default."""
        given = self.placements.get(name)
        if given is None and name.endswith(".grad"):
            return self.placed(name.removesuffix(".grad"), dimensions)
        if given is None:
            return (Replicate(),) * dimensions
        placed = tuple(given) if isinstance(given, Sequence) else (given,) * dimensions
        if isinstance(given, Placement) and dimensions > 1 and given.is_shard():
            placed = (given,) + (Replicate(),) * (dimensions - 1)
        if len(placed) != dimensions:
            raise TargetError(
                f"placements[{name!r}]: {len(placed)} placements, but the mesh has {dimensions} dimensions"
            )
        return placed


__all__ = ["RankTarget"]
