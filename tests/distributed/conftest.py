from multiprocessing import forkserver

import pytest

from goldsmith.assay.gate.isolation import own_process
from goldsmith.assay.ranks import RankPool

# What steps on ranks import, once for all ranks of a session; the forkserver skips what is not installed.
IMPORTED = (
    *("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "triton.runtime.interpreter", "peft"),
    *("goldsmith.distributed", "goldsmith.mhc", "goldsmith.router", "goldsmith.experts", "goldsmith.hf"),
)


@pytest.fixture(scope="session", autouse=True)
def _forkserver():
    forkserver.set_forkserver_preload(list(IMPORTED))
    with own_process.safe_path():
        forkserver.ensure_running()


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
