import pytest

from goldsmith.assay.ranks import RankPool


@pytest.fixture(scope="session")
def pools():
    """Pools of ranks by size, which the tests of a session share."""
    made = {}

    def pool(world):
        if world not in made or not made[world]._processes:
            made[world] = RankPool(world)
        return made[world]

    yield pool
    for one in made.values():
        one.close()
