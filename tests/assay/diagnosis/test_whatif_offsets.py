"""Changed goldens: offsets of blocks and bytes, strides of tables, parts of an axis, diagonals, packed sequences."""

import math

import pytest
import torch

from assay.diagnosis.targets import best
from goldsmith import assay

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[10], D=[6])
def scaled(make, T, D):
    return {"x": make.normal(T, D), "s": make.uniform(T) + 0.5, "codes": make.integers(0, 256, T, 3, dtype=torch.uint8)}


def looked_up(x, s, codes, *, place=lambda t: t, low=0):
    at = place(torch.arange(len(x)))
    bits = torch.stack([codes % 16, codes // 16] if low == 0 else [codes // 16, codes % 16], -1).flatten(-2)
    return torch.tanh(x * s[at, None] * bits)


@pytest.mark.parametrize(
    "fault, cause, text",
    [
        ({"place": lambda t: t % 4}, "invalid_index", "every block of 4 reads the first block"),
        ({"place": lambda t: t // 4}, "wrong_stride", "the number of the block of 4 is used as the position"),
        ({"low": 1}, "wrong_format", "low and high four bits of a byte are exchanged"),
    ],
    ids=["block", "number", "nibbles"],
)
def test_a_missing_offset_is_explained(fault, cause, text):
    change = best(lambda x, s, codes: looked_up(x, s, codes, **fault), looked_up, scaled)
    assert (change.cause, change.exact) == (cause, True) and text in change.text


@assay.case(N=[9], C=[2], H=[3], W=[5])
def table(make, N, C, H, W):
    return {"t": make.normal(C, H, W), "c": make.integers(0, C, N), "i": make.integers(0, H, N),
            "j": make.integers(0, W, N)}  # fmt: skip


@assay.case(N=[6], K=[4])
def pairs(make, N, K):
    return {"values": make.normal(N, 2), "places": torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [1, 2], [0, 3]])[:N]}


def test_the_first_of_a_row_of_indices_is_used_for_all():
    def scattered(values, places):
        return torch.zeros(len(values), 4, dtype=values.dtype).scatter_add(1, places, values).square()

    golden = lambda values, places: torch.zeros(len(values), 4, dtype=values.dtype).scatter(1, places, values).square()  # noqa: E731
    kernel = lambda values, places: scattered(values, places[:, :1].expand(-1, 2))  # noqa: E731
    change = best(kernel, golden, pairs)
    assert (change.cause, change.exact) == ("invalid_index", True) and "colliding values are added" in change.text


@assay.case(T=[5], S=[11], D=[4])
def attended(make, T, S, D):
    return {"q": make.normal(T, D), "k": make.normal(S, D), "v": make.normal(S, D)}


def attention(q, k, v, *, ahead=None, beyond=False):
    ahead = len(k) - len(q) if ahead is None else ahead
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(ahead + 1)
    if beyond:
        later = later & (torch.arange(len(q))[:, None] // 4 == torch.arange(len(k)) // 4)
    return torch.softmax((q @ k.mT).masked_fill(later, -math.inf), -1) @ v


def test_the_mask_counts_queries_from_the_first_token():
    change = best(lambda q, k, v: attention(q, k, v, ahead=0), attention, attended)
    assert (change.cause, change.exact) == ("mask_shift", True) and "is 1 instead of 7" in change.text


def test_blocks_beyond_the_diagonal_are_not_masked():
    golden = lambda q, k, v: attention(q, k, v, ahead=0)  # noqa: E731
    change = best(lambda q, k, v: attention(q, k, v, ahead=0, beyond=True), golden, attended)
    assert (change.cause, change.exact) == (
        "wrong_mask",
        True,
    ) and "only the blocks on the diagonal are masked" in change.text


@assay.case(B=[3], T=[5], C=[2])
def sequences(make, B, T, C):
    return {"x": make.normal(B, T, C), "a": make.uniform(C)}


@assay.case(T=[14], C=[3])
def steps(make, T, C):
    return {"x": make.normal(T, C), "a": make.uniform(C) * 0.2 + 0.8}


@assay.case(T=[4], V=[9])
def ordered(make, T, V):
    return {"x": make.uniform(T, V)}


def test_a_running_sum_includes_the_place_itself():
    change = best(lambda x: torch.tanh(x.cumsum(-1)), lambda x: torch.tanh(x.cumsum(-1) - x), ordered)
    assert (change.cause, change.exact) == ("off_by_one", True) and "includes the position itself" in change.text


@assay.case(T=[7], D=[3])
def aged(make, T, D):
    return {"k": make.normal(T, D), "rate": make.uniform(D)}


def test_a_distance_off_by_one_used_as_a_factor():
    def decayed(k, rate, *, more=0):
        age = (torch.arange(len(k))[:, None] - torch.arange(len(k)))[:, :, None]
        scores = torch.where(age < 0, -math.inf, k - (age + more * (age > 0)) * rate)
        return torch.logsumexp(scores, 1)

    def golden(k, rate):
        age = (torch.arange(len(k))[:, None] - torch.arange(len(k)))[:, :, None]
        past = torch.where(age <= 0, -math.inf, k - age * rate)
        return torch.logsumexp(torch.where(age == 0, k + 0 * rate, past), 1)

    change = best(lambda k, rate: decayed(k, rate, more=1), golden, aged)
    assert (change.cause, change.exact) == ("off_by_one", True) and "is one more in" in change.text


@assay.case(N=[5], C=[7])
def zeros(make, N, C):
    return {"codes": make.integers(0, 16, N, C, dtype=torch.uint8), "zero": make.uniform(N, 1) * 15,
            "scale": make.uniform(N, 1)}  # fmt: skip


@assay.case(H=[4], T=[6], D=[5])
def heads(make, H, T, D):
    return {"q": make.normal(H, T, D), "k": make.normal(H, T, D)}


class Misplaced(torch.autograd.Function):
    """The same, with a backward that reads each row's saved value at another place: everywhere, or in one addend."""

    place = staticmethod(lambda t: t)
    once = False

    @staticmethod
    def forward(ctx, q, k):
        s = q @ k.mT
        lse = torch.logsumexp(s, -1)
        ctx.save_for_backward(q, k, s, lse)
        return s.square().sum(-1) * torch.tanh(lse)

    @staticmethod
    def backward(ctx, g):
        q, k, s, lse = ctx.saved_tensors
        read = Misplaced.place(torch.tanh(lse))
        own = torch.tanh(lse) if Misplaced.once else read
        inner = g * s.square().sum(-1) * (1 - own.square())
        ds = 2 * s * (g * read)[..., None] + torch.exp(s - lse[..., None]) * inner[..., None]
        return ds @ k, ds.mT @ q


def test_the_first_blocks_value_used_for_all_blocks():
    def golden(q, k):
        return torch.tanh(q) * q.square().mean((1, 2), keepdim=True) + k

    change = best(lambda q, k: torch.tanh(q) * q[:1].square().mean() + k, golden, heads)
    assert (change.cause, change.exact) == ("wrong_stride", True) and "is used for all" in change.text


@assay.case(T=[6], E=[8], K=[3])
def chosen(make, T, E, K):
    at = torch.stack([torch.randperm(E, generator=make.generator)[:K] for _ in range(T)])
    return {"x": make.normal(T, E), "at": at}


def test_the_index_of_a_row_is_ignored():
    change = best(lambda x, at: torch.tanh(x[:, :3]), lambda x, at: torch.tanh(x.gather(1, at)), chosen)
    assert (change.cause, change.exact) == ("invalid_index", True) and "reads each row in order" in change.text


@assay.case(P=[7], B=[4], D=[3])
def bags(make, P, B, D):
    return {"x": make.normal(P, D), "bag": torch.tensor([0, 0, 1, 1, 1, 3, 3])}


def test_an_empty_group_is_divided_by_its_count():
    def mean(x, bag, *, least=1.0):
        count = torch.zeros(4, dtype=x.dtype).index_add(0, bag, torch.ones(len(bag), dtype=x.dtype))
        return torch.zeros(4, 3, dtype=x.dtype).index_add(0, bag, x) / count.clamp(min=least)[:, None] + 1

    change = best(lambda x, bag: mean(x, bag, least=0.0), mean, bags)
    assert (change.cause, change.exact) == ("empty_group", True) and "wrong_mask" in change.also


class MeanOfProducts(torch.autograd.Function):
    """softmax(q k^T) v, with a backward that uses the mean of dy y in place of the sum."""

    @staticmethod
    def forward(ctx, q, k, v):
        p = torch.softmax(q @ k.mT, -1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        ds = p * (g @ v.mT - (g * (p @ v)).mean(-1, keepdim=True))
        return ds @ k, ds.mT @ q, p.mT @ g


def test_the_inner_product_of_a_softmax_is_a_mean():
    golden = lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v  # noqa: E731
    change = best(MeanOfProducts.apply, golden, attended, "q.grad", backward="auto")
    assert (change.cause, change.params["named"]) == ("wrong_factor", "1/D") and "inner product" in change.text
