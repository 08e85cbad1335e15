"""`goldsmith verify` as one of several processes of torchrun: rank 0 is the command, the others compute for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..terminal import Failure


@dataclass(frozen=True)
class LaunchedRank:
    """This process among those of a launcher."""

    rank: int
    world: int
    local_rank: int
    local_world: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
        """From torchrun's variables; None where this process is not one of several. Raises Failure for wrong ones."""
        world = _number(environment, "WORLD_SIZE", 1)
        if world < 2 or not environment.get("MASTER_ADDR"):
            return None
        rank = _number(environment, "RANK", None)
        if not 0 <= rank < world:
            raise Failure(f"RANK is {rank}, but WORLD_SIZE is {world}; expected 0 to {world - 1}.")
        _number(environment, "MASTER_PORT", None)
        local = _number(environment, "LOCAL_RANK", rank)
        return cls(rank, world, local, _number(environment, "LOCAL_WORLD_SIZE", world))


def _number(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise Failure(f"{name} is {text!r}; expected a number, as torchrun sets it.") from None


def started_ranks(ranks: int | None) -> int | None:
    """The number of ranks: that of --ranks, or the launcher's. Raises Failure where the two differ."""
    launch = LaunchedRank.of()
    if launch is None:
        return ranks
    if ranks not in (None, launch.world):
        raise Failure(f"--ranks {ranks}: the launcher started {launch.world} processes; leave the option out.")
    return launch.world


def serves_rank_0(device: str | None, limit: float) -> bool:
    """On every rank but 0 of a launcher: computes for rank 0 until it ends, and returns True."""
    launch = LaunchedRank.of()
    if launch is None or launch.rank == 0:
        return False
    import torch

    from ...assay.ranks.launched import serve

    chosen = "cuda" if torch.cuda.device_count() >= launch.local_world else "cpu"
    serve(
        launch.rank,
        device=device.partition(":")[0] if device else chosen,
        local_rank=launch.local_rank,
        limit_s=limit,
    )
    return True
