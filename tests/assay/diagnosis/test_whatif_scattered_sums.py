"""Lost addends of a sum, interpolation weights, sums of parts, both products of a cross product."""

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)

# a weighted histogram, which the golden writes as a product with one-hot rows


@assay.case(N=[12], C=[3], V=[5])
def named(make, N, C, V):
    return {"x": make.normal(N, C), "name": make.integers(0, V, N), "start": make.normal(V, C)}


def counted(x, name, start):
    return (name == torch.arange(len(start)).unsqueeze(1)).to(x.dtype) @ x


def stored(x, name, start):
    y = torch.zeros(len(start), x.shape[1])
    for row, at in zip(x, name.tolist(), strict=True):
        y[at] = row if at % 2 else y[at] + row  # only the last addend of odd places survives
    return y


def test_lost_updates_in_a_product_with_one_hot_rows():
    change = best(stored, counted, named)
    assert change.cause in ("lost_update", "missing_term") and change.exact and change.whole, change
    assert "lost_update" in (change.cause, *change.also), change


# shares of two neighbours, which the golden computes with a tent function


@assay.case(B=[5], N=[6], Z=[8])
def placed(make, B, N, Z):
    at = make.uniform(B, N) * (Z - 1)
    at[:, ::2] = at[:, ::2].round()
    return {"x": make.normal(B, N), "at": at, "z": make.normal(Z)}


def dealt(x, at, z):
    near = torch.relu(1 - (at.unsqueeze(2) - torch.arange(len(z))).abs())
    return (x.unsqueeze(2) * near).sum(1)


def by_index(x, at, z, *, ceil=False, store=False):
    low, y = at.floor(), torch.zeros(len(x), len(z) + 1)
    high = at.ceil() if ceil else low + 1
    lower, upper = x * (high - at), x * (at - low)
    y = y.scatter(1, low.long(), lower) if store else y.scatter_add(1, low.long(), lower)
    return y.scatter_add(1, high.long(), upper)[:, :-1]


def test_only_the_last_update_of_an_element_is_stored():
    change = best(lambda **k: by_index(**k, store=True), dealt, placed)
    assert change.cause == "lost_update" and change.exact and change.whole, change


# rotations by complex numbers


@assay.case(N=[6], D=[4])
def turned(make, N, D):
    return {"a": make.normal(N, D, 2), "b": make.normal(N, D, 2)}


def rotated(a, b):
    return torch.view_as_real(torch.view_as_complex(a) * torch.view_as_complex(b)).cumsum(0)


@pytest.mark.parametrize("signs", [(1, 1, 1), (1, -1, 1)], ids=["without its minus", "of the conjugate"])
def test_a_complex_product_with_a_sign_that_is_wrong(signs):
    def kernel(a, b):
        (x, y), (u, v), (p, q, r) = a.unbind(2), b.unbind(2), signs
        return torch.stack((x * u + p * y * v, q * x * v + r * y * u), 2).cumsum(0)

    change = best(kernel, rotated, turned)
    assert change.cause == "sign_flip" and change.exact and change.whole, change


# moments about a point


@assay.case(N=[6])
def levers(make, N):
    return {"arm": make.normal(N, 3), "force": make.normal(N, 3), "mass": make.normal(N, 1)}


def moments(arm, force, mass):
    return (mass * torch.linalg.cross(arm, force)).cumsum(0)


class Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, arm, force, mass):
        ctx.save_for_backward(arm, force, mass)
        return moments(arm, force, mass)

    @staticmethod
    def backward(ctx, g):
        arm, force, mass = ctx.saved_tensors
        g = g.flip(0).cumsum(0).flip(0)
        d = g * mass
        plus = force.roll(-1, 1) * d.roll(-2, 1) + force.roll(-2, 1) * d.roll(-1, 1)
        cross = torch.linalg.cross(arm, force)
        return plus, torch.linalg.cross(d, arm), (g * cross).sum(1, keepdim=True)


@pytest.mark.parametrize("tensor", ["y", "arm.grad"])
def test_a_cross_product_without_its_minus(tensor):
    def every(arm, force, mass):
        (a, b, c), (x, y, z) = arm.unbind(1), force.unbind(1)
        return (mass * torch.stack((b * z + c * y, c * x + a * z, a * y + b * x), 1)).cumsum(0)

    kernel = every if tensor == "y" else lambda **k: Moments.apply(*k.values())
    change = best(kernel, moments, levers, tensor, backward=None if tensor == "y" else "auto")
    assert change.cause == "sign_flip" and change.exact and change.whole, change
