"""The assay over ranks: a computation on several processes is judged like a kernel, against its unsharded golden."""

from .pool import RankError, RankPool
from .sharded import Sharded, sharded

__all__ = ["RankError", "RankPool", "Sharded", "sharded"]
