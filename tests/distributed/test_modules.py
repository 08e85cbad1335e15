"""Models on ranks: one step of each parallel style is certified against the formulas in one process."""

import functools

import pytest
import torch

from distributed import checkpoints, models, stages
from goldsmith import assay, router

NAMES = tuple(f"{name}{layer}" for layer in range(models.LAYERS) for name in ("fn", "base", "scale", "weight"))


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    n, dim, mixes = models.N, models.DIM, models.N * (models.N + 2)
    values = {"x": torch.randn(24, n, dim), "dy": torch.randn(24, n, dim)}  # torch 2.11 shards no [batch, tokens]
    for layer in range(models.LAYERS):
        values |= {
            f"fn{layer}": torch.randn(mixes, n * dim) / 4,
            f"base{layer}": torch.randn(mixes),
            f"scale{layer}": torch.rand(3),
            f"weight{layer}": torch.randn(dim, dim) / 2,
        }
    return {
        name: t.to(dtype) if name[:-1] in ("weight", "") or name in ("x", "dy") else t for name, t in values.items()
    }


def certify(pool, function, golden, values, names):
    """The verdict over what `function` returns on every rank; all ranks must return the same bits."""

    def candidate(**tensors):
        answers = pool.run(function, [tuple(tensors.values())] * pool.world)
        for other in answers[1:]:
            assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))
        return tuple(answers[0])

    @functools.wraps(golden)
    def named_golden(**tensors):
        return golden(*tensors.values())

    signature = ", ".join(values)
    scope = {"candidate": candidate, "golden": named_golden}
    exec(  # the assay binds by name
        f"def c({signature}): return candidate({', '.join(f'{n}={n}' for n in values)})\n"
        f"def g({signature}): return golden({', '.join(f'{n}={n}' for n in values)})\n",
        scope,
    )
    outputs = ("result", *(f"d{name}" for name in names))
    assay.check(assay.Target(scope["c"], scope["g"], cases=values, outputs=outputs, backward=None), probes=("values",))


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "style", ["sequence", "sequence stack", "sequence recompute", "sequence compile", "fsdp stack"]
)
def test_a_step_is_certified(style, pools):
    certify(pools(2), functools.partial(models.parallel_step, style), models.plain_step, inputs(), NAMES)


def test_uneven_tokens_and_experts_are_certified(pools):
    torch.manual_seed(0)
    values = {"h": torch.randn(7, 6), "dy": torch.randn(7, 6), "rx": torch.randn(3, 6), "ry": torch.randn(3, 6)}
    values |= {"w_in": torch.randn(9, 6), "w_out": torch.randn(9, 6)}
    certify(pools(2), models.parallel_experts, models.plain_experts, values, tuple(values)[2:])


def test_routed_experts_of_uneven_ranks_are_certified(pools):
    torch.manual_seed(0)
    ids = torch.randint(0, 5, (7, 2))
    values = {"h": torch.randn(7, 6), "dy": torch.randn(7, 6), "weights": torch.rand(7, 2)}
    values |= {"gate_up": torch.randn(5, 8, 6), "down": torch.randn(5, 6, 4)}
    step, golden = (functools.partial(f, ids) for f in (models.parallel_moe, models.plain_moe))
    certify(pools(2), step, golden, values, ("h", "weights", "gate_up", "down"))


@pytest.mark.parametrize("kind", ["marginal", "joint"])
def test_the_loss_of_all_ranks_tokens_is_that_of_one_process(kind, pools):
    torch.manual_seed(0)
    x, y = torch.randn(7, 5), torch.randn(7, 4)
    values = {"x": x, "y": y, "indices": router.product_topk(x, y, 3)[1]}
    step, golden = (functools.partial(f, kind) for f in (models.parallel_loss, models.plain_loss))
    certify(pools(2), step, golden, values, ("x", "y"))


def test_counts_of_all_ranks_are_exact(pools):
    torch.manual_seed(0)
    indices, weights = torch.randint(-1, 6, (7, 3)), torch.rand(7, 3)
    whole = router.usage(indices, 6, weights=weights)
    for own, mass in pools(2).run(models.counts, [(indices, 6, weights)] * 2):
        assert own.equal(whole.counts)
        assay.check(assay.Target(lambda w, m=mass: m, lambda w: whole.mass, cases={"w": weights}), probes=("values",))


def test_a_pipeline_of_two_stages_is_certified(pools):
    values = {name: t[:, 0] if name in ("x", "dy") else t for name, t in inputs().items()}
    torch.manual_seed(1)
    n, dim = models.N, models.DIM
    values |= {"hc_fn": torch.randn(n, n * dim) / 4, "hc_base": torch.randn(n), "hc_scale": torch.rand(1)}
    certify(pools(2), stages.pipelined, stages.plain_model, values, (*NAMES, *stages.OF_HEAD))


@pytest.mark.parametrize(
    "style", [pytest.param(s, marks=pytest.mark.sweep(2, part=n)) for n, s in enumerate(("experts", "fsdp"))]
)
def test_a_checkpoint_of_two_ranks_loads_on_one_and_on_three(style, pools, tmp_path):
    saved, other = pools(2).run(checkpoints.save, [(str(tmp_path), style)] * 2)
    assert saved.keys() == other.keys() and not any("base" in name and "experts" in name for name in saved)
    assert any("exp_avg_sq" in name and "w_in" in name for name in saved)
    loaded = [checkpoints.load(str(tmp_path), style), *pools(3).run(checkpoints.load, [(str(tmp_path), style)] * 3)]
    for states in loaded:
        assert states.keys() == saved.keys()
        assert all(torch.equal(states[name], tensor) for name, tensor in saved.items())


def test_ranks_of_a_machine_share_one_copy_of_packed_experts(pools):
    torch.manual_seed(0)
    x, dy = torch.randn(7, models.DIM), torch.randn(7, models.DIM)
    first, second = pools(2).run(checkpoints.shared_experts, [(x, dy)] * 2)
    shares = zip(x.tensor_split(2), dy.tensor_split(2), strict=True)
    alone = [pools(1).run(checkpoints.shared_experts, [share])[0] for share in shares]  # AMX sums few rows otherwise
    assert (first[0], second[0]) == ([0], [])  # the first rank packs, for both
    assert first[3] == second[3] and len(first[3]) == 2 and first[4:] == second[4:] == alone[0][4:]
    assert torch.equal(first[1], alone[0][1]) and torch.equal(second[1], alone[1][1])
    for mine, theirs in zip(first[2], second[2], strict=True):
        assert torch.equal(mine, theirs)


def test_an_error_while_shared_experts_are_packed_is_raised_on_all_ranks(pools):
    assert pools(2).run(checkpoints.failing_experts, [()] * 2) == ["no such weights"] * 2
