"""Every operator on DTensors: results and gradients are certified against the unsharded golden."""

import os

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from distributed import misuse, operators
from distributed.operators import function_of
from goldsmith import Op, assay
from goldsmith.assay.ranks import RankError, RankPool, sharded
from goldsmith.cli.targets import op_target
from goldsmith.cli.verify.rank_targets import rank_cases

OPS = Op.all()
LAYOUTS = {
    "two_ranks": (2, None, Shard(0)),
    "three_ranks_unevenly": (3, None, Shard(0)),
    "replicated": (2, None, Replicate()),
    "four_ranks_in_two_dimensions": (4, (2, 2), (Shard(0), Replicate())),
}
CASES = 3  # of each operator
KERNELS = [name for name, op in OPS.items() if "triton" in op.backends]
EXPERTS = [op for op in OPS.values() if op.expert_axis is not None]


def target_of(op, pool, placements, mesh=None, case=None):
    """The operator's target, with its candidate on ranks and the forward in float64 as its golden."""
    whole = op_target(op, "reference")
    grads, cases = whole.grads, op.cases
    if case is not None:  # one that is not the operator's own may lack optional inputs
        drawn = case.build(torch.float32, "cpu", 0)
        cases = [case]
        grads = tuple(name for name in op.grads if drawn.get(name) is not None)
    return assay.Target(
        sharded(function_of(op), pool, placements=placements, mesh=mesh), whole.golden, cases=cases,
        outputs=op.outputs, grads=grads, decisions=whole.decisions, backward="auto" if op.grads else None,
        name=f"{op.name} on ranks",
    )  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", OPS)
def test_every_rank_has_tokens_in_the_first_case(name, world):
    """Without tokens every sharding is right; the first cases of most operators have none or one."""
    op = OPS[name]
    values = rank_cases(op, world)[0].build(torch.float32, "cpu", 0)
    tokens = [values[n].shape[0] for n in op.inputs if op.axes[n].per_token and values.get(n) is not None]
    assert min(tokens) >= world


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_results_and_gradients_are_certified(name, layout, pools):
    op, (world, mesh, placement) = OPS[name], LAYOUTS[layout]
    placements = {name: placement for name in op.inputs if op.axes[name].per_token}
    target = target_of(op, pools(world), placements, mesh)
    for case in rank_cases(op, world)[:CASES]:  # uneven tokens, no tokens, and one token, so that ranks are empty
        assay.check(target, case, probes=("values",))


@pytest.fixture(scope="session")
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with RankPool(2, device="cuda") as pool:
        yield pool


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_two_gpus_are_certified(name, gpus):
    op = OPS[name]
    placements = {name: Shard(0) for name in op.inputs if op.axes[name].per_token}
    for case in rank_cases(op, 2)[:CASES]:
        assay.check(target_of(op, gpus, placements), case, probes=("values",))


@pytest.mark.parametrize("name", ["mhc.expand", "mhc.post", "mhc.sinkhorn", "router.product_topk"])
def test_a_tokens_bits_do_not_depend_on_the_sharding(name, pools):
    """On a CPU. Other references multiply matrices, and torch adds in another order for fewer rows."""
    values = rank_cases(OPS[name], 3)[0].build(torch.float32, "cpu", 0)
    call = (name, values, "auto", "cpu")
    assert pools(3).run(operators.results_that_depend_on_the_sharding, [call] * 3) == [[]] * 3


@pytest.mark.sweep(3)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels run on the GPU here")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", KERNELS)
def test_a_tokens_bits_do_not_depend_on_the_sharding_of_an_interpreted_kernel(name, world, pools):
    values = rank_cases(OPS[name], world)[0].build(torch.float32, "cpu", 0)
    calls = [(name, values)] * world
    assert pools(world).run(operators.results_of_kernels_that_depend_on_the_sharding, calls) == [[]] * world


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_tokens_bits_do_not_depend_on_the_sharding_over_gpus(name, gpus):
    values = rank_cases(OPS[name], 2)[0].build(torch.float32, "cpu", 0)
    call = (name, values, "triton", "cuda")
    assert gpus.run(operators.results_that_depend_on_the_sharding, [call] * 2) == [[]] * 2


@pytest.mark.parametrize("op", EXPERTS, ids=[op.name for op in EXPERTS])
def test_experts_spread_over_ranks_are_certified(op, pools):
    axis, ids = op.expert_axis
    cases = rank_cases(op, 2)
    case = next(c for c in cases if not c.build(torch.float32, "cpu", 0).get("layout"))  # not packed
    values = case.build(torch.float32, "cpu", 0)
    tables = [n for n in op.inputs if values.get(n) is not None and op.axes[n].of(values[n]).names[:1] == (axis,)]
    assert tables and ids in op.inputs
    target = target_of(op, pools(2), {name: Shard(0) for name in tables})
    assay.check(target, case, probes=("values",))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.numbered and op.grads])
@pytest.mark.parametrize("world, mesh, placement", [
    (3, None, Shard(1)),
    (4, (2, 2), (Shard(0), Shard(1))),
])  # fmt: skip
def test_what_is_drawn_for_a_token_does_not_depend_on_its_rank(name, world, mesh, placement, pools):
    op = OPS[name]
    drawn = next(c for c in op.cases if c.name == "dropout").build(torch.float32, "cpu", 0)
    # tokens [5] -> [2, 5]
    drawn |= {n: torch.stack((drawn[n], drawn[n].flip(0))) for n in op.inputs if op.axes[n].per_token}
    case = assay.Case("two_axes", lambda make: drawn)
    placements = {name: placement for name in op.inputs if op.axes[name].per_token}
    target = target_of(op, pools(world), placements, mesh, case)
    assay.check(target, probes=("values",))


@pytest.mark.parametrize(
    "placed", [{"w_in": Shard(0), "w_out": Shard(0)}, dict.fromkeys(("h", "weights", "indices"), Shard(0))]
)
def test_sparse_gradients_of_tables_are_dense_on_ranks(placed, pools):
    op = OPS["router.atomic_experts"]
    drawn = {**next(c for c in op.cases if c.name == "uniform").build(torch.float32, "cpu", 0), "sparse_grad": True}
    case = assay.Case("sparse", lambda make: drawn)
    assay.check(target_of(op, pools(2), placed, case=case), probes=("values",))


def test_a_rank_without_experts_is_an_ordinary_rank(pools):
    op = OPS["router.atomic_experts"]
    case = next(c for c in op.cases if c.name == "twice")  # 9 experts: 3, 3, 3 and none
    target = target_of(op, pools(4), {"w_in": Shard(0), "w_out": Shard(0)})
    assay.check(target, case, probes=("values",))


@pytest.mark.parametrize("mistake, error, texts", [
    ("plain_tensor", "TypeError", ("mhc.post: f is a Tensor", "distribute_tensor(f, mesh)")),
    ("two_meshes", "ValueError", ("mhc.post: f is on", "use one mesh")),
    ("wrong_shape", "ShapeError", ("f has dim=5, but x has dim=6", "[4, 2, 6]")),
])  # fmt: skip
def test_a_mistake_is_named_with_the_whole_shapes(mistake, error, texts, pools):
    for kind, message in pools(2).run(misuse.message_of, [(mistake,)] * 2):
        assert kind == error
        assert all(text in message for text in texts), message


def test_an_id_that_no_rank_has_is_reported(pools):
    for kind, message in pools(2).run(misuse.message_of, [("impossible_id",)] * 2):
        assert kind == "IndexError" and "indices" in message


@pytest.mark.parametrize("mistake, text", [
    ("raises", "rank 1: ValueError: no such thing (misuse.py:"),
    ("dies", "rank 1 ended with exit status 7"),
    ("hangs", "did not answer in 3 s"),
])  # fmt: skip
def test_a_rank_that_fails_is_named_and_nobody_waits_forever(mistake, text):
    with RankPool(2, limit_s=3.0) as pool, pytest.raises(RankError) as raised:
        pool.run(misuse.fail, [(mistake,)] * 2)
    assert text in str(raised.value)
