"""torch.func works on both operators: vmap, per-sample gradients, forward-mode derivatives."""

import pytest
import torch

from goldsmith import assay, router
from goldsmith.router.atomic_experts import reference

B, T, D, N, K = 3, 4, 6, 12, 5
STRATEGIES = ("gather", "sorted", "dense")
NAMES = ("h", "w_in", "w_out", "weights", "indices", "dy")


def drawn(seed):
    make = assay.Make(torch.float32, "cpu", seed)
    indices = make.integers(-1, N, B, T, K, dtype=torch.int32)
    floats = {"h": (B, T, D), "w_in": (N, D), "w_out": (N, D), "weights": (B, T, K), "dy": (B, T, D)}
    return {name: make.normal(*shape) for name, shape in floats.items()} | {"indices": indices}


def golden(h, w_in, w_out, weights, indices, strategy="gather"):
    return reference.forward(h, w_in, w_out, weights, indices, activation="silu", strategy=strategy, sparse_grad=False)[
        0
    ]


def checked(candidate, golden, inputs):
    assay.check(assay.Target(candidate, golden, cases=inputs, backward=None), probes=("values", "ensemble"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_vmap_computes_every_sample(strategy, seed):
    def mapped(h, w_in, w_out, weights, indices, dy):
        one = lambda h, weights, indices: router.atomic_experts(  # noqa: E731
            h, w_in, w_out, weights, indices, strategy=strategy
        )
        return torch.vmap(one)(h, weights, indices)

    checked(mapped, lambda dy, **inputs: golden(**inputs), drawn(seed))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_per_sample_gradients_equal_those_of_each_sample_alone(strategy, seed):
    """With integers, whose sums are exact in any order."""
    inputs = {name: t if name == "indices" else t.round() for name, t in drawn(seed).items()}

    def loss(h, w_in, w_out, weights, indices, dy):
        y = router.atomic_experts(
            h, w_in, w_out, weights, indices, activation="relu", strategy=strategy, backend="reference"
        )
        return (y * dy).sum()

    grads = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    mapped = torch.vmap(grads, (0, None, None, 0, 0, 0))(*(inputs[name] for name in NAMES))
    for b in range(B):
        alone = [inputs[name] if name in ("w_in", "w_out") else inputs[name][b] for name in NAMES]
        leaves = [t.requires_grad_(t.is_floating_point()) for t in (t.clone() for t in alone)]
        wanted = torch.autograd.grad(loss(*leaves), leaves[:4])
        assert all(torch.equal(grad[b], want) for grad, want in zip(mapped, wanted, strict=True))


def test_a_wrong_index_under_vmap_affects_only_its_token(seed):
    inputs = drawn(seed)
    inputs["indices"][1, 2, 0] = N
    h, w_in, w_out, weights, indices, _ = (inputs[name] for name in NAMES)
    y = torch.vmap(lambda h, weights, indices: router.atomic_experts(h, w_in, w_out, weights, indices))(
        h, weights, indices
    )
    lost = torch.zeros(B, T, dtype=torch.bool)
    lost[1, 2] = True
    assert y[lost].isnan().all() and y[~lost].isfinite().all()


def test_vmap_selects_as_a_batch_does():
    def select(x, y):
        return router.product_topk(x, y, 9, weights="softmax", backend="reference")

    x, y = torch.randn(B, T, 8), torch.randint(-2, 3, (B, T, 7)).float()
    assert all(map(torch.equal, torch.vmap(select)(x, y), select(x, y)))


@pytest.mark.parametrize("kind", ["marginal", "joint"])
def test_vmap_gives_each_sample_its_own_balance_loss_and_gradient(kind, seed):
    make = assay.Make(torch.float32, "cpu", seed)
    inputs = {"x": make.normal(B, T, 8), "y": make.normal(B, T, 7), "indices": make.integers(-1, 56, B, T, K)}
    inputs["indices"][1, 2] = -1  # a row without a valid index, in one sample

    def loss(x, y, indices):
        return router.load_balance_loss(x, y, indices, kind=kind)

    def alone(x, y, indices):
        own = [(loss(*one), torch.func.grad(loss)(*one)) for one in zip(x, y, indices, strict=True)]
        return torch.stack([torch.cat((each.view(1), grad.flatten())) for each, grad in own])

    def mapped(x, y, indices):
        each, grad = torch.vmap(loss)(x, y, indices), torch.vmap(torch.func.grad(loss))(x, y, indices)
        return torch.cat((each.unsqueeze(1), grad.flatten(1)), 1)

    checked(mapped, alone, inputs)


def test_vmap_gives_each_sample_its_own_usage(seed):
    inputs = drawn(seed)
    indices, weights = inputs["indices"], inputs["weights"].softmax(-1)
    measured = lambda i, w: vars(router.usage(i, N, weights=w))  # noqa: E731
    usages = torch.vmap(measured)(indices, weights)
    for b in range(B):
        one = measured(indices[b], weights[b])
        assert all(torch.equal(usages[name][b], one[name]) for name in ("counts", "mass"))
    indices[1, 2, 0] = N
    assert torch.vmap(lambda i: router.usage(i, N).counts)(indices)[1].sum() == (indices[1] >= 0).sum() - 1


def test_a_layer_has_per_sample_gradients():
    layer = router.OmniMoE(D, 16, 3, intermediate_size=4)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    h = torch.randn(B, T, D)
    loss = lambda p, h: torch.func.functional_call(layer, p, (h,)).square().sum()  # noqa: E731
    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, h)
    whole = torch.func.grad(loss)(parameters, h)
    assert all(grad.shape == (B, *whole[name].shape) and grad.any() for name, grad in each.items())


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "functionalize"])
def test_tensors_of_a_transform_are_not_cached(transform):
    """torch.compile of a layer with the same sizes must not read candidates cached during a transform."""
    k = 6 + ["grad", "vmap", "jvp", "functionalize"].index(transform)  # sizes that no other test uses
    module = router.OmniMoE(8, 16, k, intermediate_size=4, backend="reference")
    h = torch.randn(3, 5, 8)

    def loss(h):
        return module(h).square().sum()

    {
        "grad": lambda: torch.func.grad(loss)(h),
        "vmap": lambda: torch.vmap(torch.func.grad(loss))(h),
        "jvp": lambda: torch.func.jvp(loss, (h,), (h,)),
        "functionalize": lambda: torch.func.functionalize(loss)(h),
    }[transform]()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(h[0]), module(h[0]))
