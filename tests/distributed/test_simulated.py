"""Ranks that are simulated in one process: the verdicts of real ones, without processes."""

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import Replicate, Shard

from distributed import operators
from distributed import rank_functions as functions
from distributed.test_operators import EXPERTS, OPS, target_of
from goldsmith import assay
from goldsmith.assay.ranks import RankTarget, SimulatedRanks, check


@pytest.fixture
def simulated():
    try:
        ranks = SimulatedRanks(4)
    except RuntimeError as error:
        pytest.skip(str(error))
    with ranks:
        yield ranks
    assert not distributed.is_initialized()


@pytest.mark.parametrize("mesh, placement", [(None, Shard(0)), ((2, 2), (Shard(0), Replicate()))])
def test_operators_are_certified(mesh, placement, simulated):
    for name in ("mhc.pre", "mhc.sinkhorn", "router.product_topk", "experts.moe"):
        op = OPS[name]
        placements = {name: placement for name in op.inputs if op.axes[name].per_token}
        assay.check(target_of(op, simulated, placements, mesh), op.cases[1], probes=("values",))


@pytest.mark.parametrize("step, cause", [(operators.total, None), (operators.own_total, "missing_reduction")])
def test_a_wrong_step_is_explained(step, cause, simulated):
    target = RankTarget(
        step, functions.golden, cases={"x": torch.randn(8, 3)}, outputs=("total",), placements={"x": Shard(0)},
        backward=None, dtensors=True,
    )  # fmt: skip
    report = check(target, simulated, raises=False)
    assert [c["cause"] for c in report.environment["ranks"]["causes"]] == ([] if cause is None else [cause])
    assert report.ok == (cause is None)


def test_what_cannot_be_simulated_is_no_verdict(simulated):
    with pytest.raises(assay.TargetError, match="only functions of DTensors"):
        check(functions.target("right"), simulated)
    with pytest.raises(RuntimeError, match="this process has a process group"):
        SimulatedRanks(2)
    (op,) = (op for op in EXPERTS if op.name == "router.atomic_experts")
    target = target_of(op, simulated, {"w_in": Shard(0), "w_out": Shard(0)})
    try:
        report = assay.check(target, op.cases[2], probes=("values",))
    except assay.TargetError as error:
        assert "cannot simulate numbers that differ between ranks" in str(error)
    else:
        assert report.ok
