import pytest

from goldsmith.assay.ranks import RankPool
from goldsmith.assay.ranks import pool as rank_pool

# what most tests run on ranks, imported once for all pools of a session
rank_pool.PRELOADED += [f"distributed.{name}" for name in ("models", "operators", "checkpoints", "stages", "misuse")]
rank_pool.PRELOADED.append("torch._dynamo")  # which the first DTensor of a process imports: a second on each rank


@pytest.fixture(scope="session")
def pools():
    """Pools of ranks by size, which the tests of a session share."""
    groups = {}

    def pool(world):
        if world not in groups or not groups[world]._processes:
            groups[world] = RankPool(world)
        return groups[world]

    yield pool
    for one in groups.values():
        one.close()
