"""The lagged scheme of DeepSeek-V4.1: HyperStack(lagged=True) against the published formula."""

import pytest
import torch
from torch import nn

from goldsmith import Op, ShapeError, assay, mhc
from goldsmith.assay.declare.case import Case
from mhc import formulas
from mhc.networks import DIM, connection, gradients
from mhc.wrong import check, equal


def stack(count=3, **options):
    torch.manual_seed(0)
    return mhc.HyperStack([connection(iterations=5, **options) for _ in range(count)], lagged=True)


def layer(h, weight, gain):
    return torch.tanh(formulas.rms_norm(h, gain) @ weight.mT)


@pytest.mark.parametrize("count", [1, 3])
def test_a_lagged_stack_and_all_its_gradients_agree_with_the_published_formula(count):
    module = stack(count)
    names = ("fn", "base", "scale", "layer.weight", "norm.weight")

    def draw(make):
        drawn = {"x": make.normal(2, 2, 4, DIM)}
        for name, parameter in module.named_parameters():
            drawn[name.replace(".", "_")] = make.normal(*parameter.shape, std=0.3) + name.endswith(
                ("scale", "norm.weight")
            )
        return drawn

    def candidate(x, **inputs):
        weights = {name: inputs[name.replace(".", "_")] for name, _ in module.named_parameters()}
        return torch.func.functional_call(module, weights, (x,))

    def golden(x, **inputs):
        each = [[inputs[f"connections.{i}.{name}".replace(".", "_")] for name in names] for i in range(count)]
        return formulas.lagged_stack(x, each, layer, iterations=5)

    check(assay.Target(candidate, golden, cases=[Case("lagged", draw)], dtypes=(torch.float32,)))


@pytest.mark.parametrize("backend", Op.get("mhc.lagged_boundary").backends)
def test_a_lagged_boundary_equals_its_parts_bit_for_bit(backend):
    torch.manual_seed(0)
    x, f, h_pre, h_post, h_res = (torch.randn(3, *shape) for shape in ((4, 7), (7,), (4,), (4,), (4, 4)))
    weights = (torch.randn(24, 28), torch.ones(3), torch.zeros(24))
    options = {"iterations": 3, "backend": backend}
    x_next, h_in, *coefficients = mhc.lagged_boundary(x, f, h_pre, h_post, h_res, *weights, **options)
    assert equal(x_next, mhc.post(x, f, h_post, h_res, backend=backend))
    assert equal(h_in, mhc.collapse(x_next, h_pre, backend=backend))
    if backend == "reference":  # the fused kernel adds the projection in other blocks
        for a, b in zip(coefficients, mhc.coefficients(x_next, *weights, **options), strict=True):
            assert equal(a, b)


def test_a_compiled_lagged_stack_has_the_same_result_and_gradients():
    module, x = stack(), torch.randn(2, 4, DIM)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    parameters = list(module.parameters())
    assert all(equal(a, b) for a, b in zip(gradients(module, x, parameters), gradients(compiled, x, parameters)))


def test_what_a_lagged_stack_refuses():
    x = torch.randn(2, 4, DIM)
    with pytest.raises(ValueError, match=r"connections\[0\] is independent, recomputes"):
        stack(recompute=True)(x)
    with pytest.raises(TypeError, match="lagged=1, expected True or False"):
        mhc.HyperStack([connection()], lagged=1)
    with pytest.raises(ShapeError, match="h_pre"):
        mhc.lagged_boundary(x, x[:, 0], *(torch.rand(2, *s) for s in ((3,), (4,), (4, 4))), *connection().mixing[:3])
    h, rests = mhc.HyperStack([mhc.HyperConnection(DIM, lambda h: (h, "kept"), norm=nn.Identity())], lagged=True)(x)
    assert h.shape == (2, DIM) and rests == [("kept",)]
