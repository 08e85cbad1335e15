"""Every operator on DTensors: results and gradients are certified against the unsharded golden."""

import pytest
from torch.distributed.tensor import Shard

from distributed.operators import function_of
from goldsmith import Op, assay
from goldsmith.assay.ranks import sharded
from goldsmith.cli.targets import op_target

OPS = Op.all()
LEAST_TOKENS = 1


def target_of(op, pool, placement, mesh=None):
    """The operator's target with its candidate on ranks: tensors with token axes lie as `placement` says."""
    whole = op_target(op, "reference")
    placements = {name: placement for name in op.inputs if op.axes[name].per_token}
    on_ranks = sharded(function_of(op), pool, placements=placements, mesh=mesh)
    backward = whole.golden_backward
    return assay.Target(
        on_ranks, whole.golden, cases=op.cases, outputs=op.outputs, grads=whole.grads, decisions=whole.decisions,
        backward="auto" if op.grads else None, golden_backward=None, segments={}, name=f"{op.name} on ranks",
    ), backward  # fmt: skip


@pytest.mark.parametrize("name", list(OPS))
def test_results_and_gradients_are_certified(name, pools):
    op = OPS[name]
    target, _ = target_of(op, pools(2), Shard(0))
    assay.check(target, op.cases[1], probes=("values",))
