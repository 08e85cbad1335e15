"""Indices of product_topk against the definition, on inputs drawn by the hypothesis library."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from router import full_sort
from router.test_product_topk import FILLS, drawn, topk

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    fill=st.sampled_from(FILLS),
    seed=st.integers(0, 2**31),
)
def test_indices_equal_those_of_a_full_stable_sort(sizes, share, dtype, fill, seed):
    sx, sy = sizes
    k = 1 + round(share * (sx * sy - 1))
    x, y = drawn(seed, dtype, 3, sx, fill=fill), drawn(seed + 1, dtype, 3, sy, fill=fill)
    scores, indices = topk(x, y, k)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(indices, full_sort.indices(x, y, k, sums))
    masked = indices < 0
    ix, iy = indices.clamp(min=0).long() // sy, indices.clamp(min=0).long() % sy
    wanted = (x.to(sums).gather(-1, ix) + y.to(sums).gather(-1, iy)).masked_fill(masked, -torch.inf)
    assert ((scores == wanted) | (scores.isnan() & wanted.isnan())).all()
