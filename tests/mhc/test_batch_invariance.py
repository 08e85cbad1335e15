"""A token's bits do not depend on the number of other tokens, nor on its position among them."""

import pytest
import torch

from goldsmith import mhc
from goldsmith.core.device import triton_unavailable

pytestmark = [
    pytest.mark.skipif(triton_unavailable({}) is not None, reason="Triton cannot run here"),
    pytest.mark.usefixtures("products_by_element"),
]

TOKENS, N, DIM = 133, 2, 640  # two slices of the projection's sum; more tokens than one of its blocks


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    rows = 2 * N + N * N
    return draw(TOKENS, N, DIM), draw(rows, N * DIM) / 32, draw(3), draw(rows)


def boundary(x, weights, batch=None):
    """Of streams whose layer's output and coefficients are made of the streams."""
    f, h_post, h_res = x[:, 0], x[..., 0].float().sigmoid(), x[..., :N].float().softmax(-1)
    tensors = (v if batch is None else v.unflatten(0, batch) for v in (x, f, h_post, h_res))
    return mhc.boundary(*tensors, *weights, iterations=2, backend="triton")


def head(x, weights):
    phi, alpha, bias = weights
    return (mhc.head(x, phi[:N], alpha[:1], bias[:N], backend="triton"),)


def pre(x, weights):
    return mhc.pre(x, *weights, iterations=2, backend="triton")


@pytest.fixture
def all_results(inputs, products_by_element):
    x, *weights = inputs
    return pre(x, weights)


@pytest.mark.parametrize("tokens", [1, 64, 66])
def test_fewer_tokens_give_the_same_bits(inputs, all_results, tokens):
    x, *weights = inputs
    for few, many in zip(pre(x[:tokens], weights), all_results, strict=True):
        assert torch.equal(few, many[:tokens])


@pytest.mark.parametrize("operator", [boundary, head])
def test_other_operators_give_the_same_bits_for_few_tokens(inputs, operator):
    x, *weights = inputs
    for few, many in zip(operator(x[:3], weights), operator(x[:9], weights), strict=True):
        assert torch.equal(few, many[:3])


def test_unaligned_rows_give_the_same_bits_for_few_tokens(inputs):
    """Kernels load such rows in several layouts, and a sum in a tile must not have the order of its layout."""
    x, *weights = inputs
    few, many = (64, TOKENS) if x.is_cuda else (3, 9)
    odd = torch.randn(many, N, 129, generator=torch.Generator().manual_seed(0)).to(x).bfloat16()
    weights[0] = weights[0][:, : N * 129].contiguous()
    for part, whole in zip(boundary(odd[:few], weights), boundary(odd, weights), strict=True):
        assert torch.equal(part, whole[:few])


def test_leading_dimensions_do_not_change_the_bits_of_few_tokens(inputs):
    x, *weights = inputs
    for shaped, flat in zip(boundary(x[:4], weights, (2, 2)), boundary(x[:4], weights), strict=True):
        assert shaped.shape[:2] == (2, 2) and torch.equal(shaped.flatten(0, 1), flat)


def test_permuted_tokens_give_the_same_bits(inputs, all_results):
    x, *weights = inputs
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    for moved, here in zip(pre(x[order], weights), all_results, strict=True):
        assert torch.equal(moved, here[order])
