"""The assay over ranks: a computation on several processes is judged like a kernel, against its unsharded golden."""

from .check import check
from .pool import RankError, RankPool
from .sharded import Sharded, sharded
from .simulated import SimulatedRanks
from .target import RankTarget

__all__ = ["RankError", "RankPool", "RankTarget", "Sharded", "SimulatedRanks", "check", "sharded"]
