import pytest

from goldsmith.assay.ranks import RankPool


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
