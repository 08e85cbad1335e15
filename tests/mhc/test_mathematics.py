"""The formulas: explicit backwards against central differences in float64, and what Sinkhorn's three forms promise."""

import pytest
import torch

from goldsmith import Op, mhc
from goldsmith.assay.golden import self_check
from mhc.wrong import through_fixed_point

OPS = {name: op for name, op in Op.all().items() if op.grads}
NAMES = ("published", "three_streams", "near_identity", "large_epsilons", "out_in", "cann", "megatron", "log", "no_eps")
CASES = [(op, case) for op in OPS.values() for case in op.cases if case.name in NAMES]


@pytest.mark.parametrize("op, case", CASES, ids=[f"{op.name}-{case}" for op, case in CASES])
def test_explicit_gradients_agree_with_central_differences(op, case):
    """The assay's own self-check differentiates the forward numerically; nothing of autograd is in this."""
    values = case.build(torch.float64)
    options = {o: values[o] for o in op.options}

    def every_result(given):
        return dict(zip(op.results, op.reference.forward(*(given.get(i) for i in op.inputs), **options), strict=True))

    def forward(given):
        return {name: result for name, result in every_result(given).items() if name in op.outputs}

    def gradients(given, cotangents):
        wanted = frozenset(g for g in op.grads if g in given)
        tensors = {i: given.get(i) for i in op.inputs} | every_result(given)
        grads = {name: cotangents[f"grad_{name}"] for name in op.outputs}
        found = op.reference.backward(grads, tensors, options, wanted)
        return {name: found[name] for name in sorted(wanted)}

    check = self_check(forward, gradients, {i: values[i] for i in op.inputs if values.get(i) is not None})
    assert check.problems == [] and check.notes == []


def logits(std, count=4096, n=4):
    return std * torch.randn(count, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("std", [0.5, 3.0, 10.0])
def test_sinkhorn_ends_on_columns_so_that_only_their_sums_are_one(std):
    eps = 1e-6
    p = mhc.sinkhorn(logits(std), eps=eps)
    columns, rows = 1 - p.sum(-2), (1 - p.sum(-1)).abs()
    assert (columns >= 0).all() and (columns <= 2 * eps).all()  # s / (s + eps), with s close to 1 or above
    assert (p > 0).all()
    if std >= 3:
        assert rows.max() > 1e-2, "twenty steps do not converge here, and nobody may rely on it"


def test_the_three_forms_are_one_map_where_they_converge_and_three_models_where_not():
    """The table of the forms: their largest difference over 4096 random 4 x 4 after 20 iterations."""
    for std, least, most in ((0.5, 0.0, 1e-5), (3.0, 1e-3, 1e-1), (10.0, 0.5, 1.0)):
        given = logits(std)
        deepseek = mhc.sinkhorn(given)
        for form in ("megatron", "log"):
            assert least <= (mhc.sinkhorn(given, form=form) - deepseek).abs().max() <= most, (std, form)


def test_the_orientations_are_two_models():
    given = logits(3.0)
    transposed = mhc.sinkhorn(given.mT.contiguous()).mT
    assert (mhc.sinkhorn(given) - transposed).abs().max() > 0.05


def test_the_gradient_is_that_of_the_steps_and_not_of_their_fixed_point():
    """On near-identity logits the two differ by most of their size."""
    given = (0.5 * logits(1.0, 64) + 8 * torch.eye(4, dtype=torch.float64)).requires_grad_()
    cotangent = torch.randn(given.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = mhc.sinkhorn(given)
    (ours,) = torch.autograd.grad(p, given, cotangent)
    (steps,) = OPS["mhc.sinkhorn"].reference.forward(given, iterations=20, eps=1e-6, form="deepseek")
    (unrolled,) = torch.autograd.grad(steps, given, cotangent)
    fixed_point = through_fixed_point(p.detach(), cotangent)

    def off(g):
        return ((g - unrolled).flatten(1).norm(dim=1) / unrolled.flatten(1).norm(dim=1)).median()

    assert off(ours) < 1e-9 and off(fixed_point) > 0.3


def test_gamma_can_be_absorbed_into_phi():
    """The definition of gamma: (gamma * X) phi^T = X (phi * gamma)^T, so the two differ by rounding alone."""
    values = next(c for c in OPS["mhc.coefficients"].cases if c.name == "odd_dim").build(torch.float64)
    x, phi, alpha, bias, gamma = (values[name] for name in ("x", "phi", "alpha", "bias", "gamma"))
    with_gamma = mhc.coefficients(x, phi, alpha, bias, gamma=gamma)
    flat = mhc.coefficients(x, phi, alpha, bias, gamma=gamma.reshape(-1))
    absorbed = mhc.coefficients(x, phi * gamma.reshape(-1), alpha, bias)
    for a, b, c in zip(with_gamma, flat, absorbed, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


def test_the_explicit_backward_is_the_backward_of_pre_without_sinkhorn():
    """`pre_backward` gets s from h_pre - pre_eps, the operator from the logits: equal up to rounding in float64."""
    values = next(c for c in OPS["mhc.pre"].cases if c.name == "large_epsilons").build(torch.float64) | {
        "sinkhorn": False
    }
    leaves = [values.pop(name).requires_grad_() for name in ("x", "phi", "alpha", "bias", "gamma")]
    saved = OPS["mhc.pre"].all_results(*leaves, **values)
    outputs = [saved[name] for name in ("h_in", "h_post", "h_res")]
    grads = [torch.randn_like(o) for o in outputs]
    from_autograd = torch.autograd.grad(outputs, leaves, grads)
    h_pre = mhc.coefficients(*leaves[:4], gamma=leaves[4], **values)[0]
    with torch.no_grad():
        explicit = mhc.pre_backward(
            *grads, *leaves[:3], inv_rms=saved["inv_rms"], h_mix=saved["h_mix"], h_pre=h_pre, h_post=saved["h_post"],
            gamma=leaves[4], pre_eps=values["pre_eps"], post_mult=values["post_mult"],
        )  # fmt: skip
        assert mhc.pre_backward(
            *grads, *leaves[:3], inv_rms=saved["inv_rms"], h_mix=saved["h_mix"], h_pre=h_pre, h_post=saved["h_post"]
        )[4] is None  # fmt: skip
    for a, b in zip(explicit, from_autograd, strict=True):
        torch.testing.assert_close(a, b)
