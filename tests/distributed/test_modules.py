"""Models on ranks: one step of each parallel style is certified against the formulas in one process."""

import functools

import pytest
import torch

from distributed import models
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
