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


def test_permuted_tokens_give_the_same_bits(inputs, all_results):
    x, *weights = inputs
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    for moved, here in zip(pre(x[order], weights), all_results, strict=True):
        assert torch.equal(moved, here[order])
