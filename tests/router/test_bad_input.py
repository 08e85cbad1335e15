"""Bad input raises at the border: the message names the argument, what came, what was wanted and what would work."""

import pytest
import torch

from goldsmith import ShapeError, router

X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 5)


def says(error, text, function, *args, **options):
    with pytest.raises(error) as caught:
        function(*args, **options)
    assert type(caught.value) is error
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "error, text, changed",
    [
        (ValueError, "k=0, wanted at least 1 and at most sx * sy = 4 * 5", {"k": 0}),
        (ValueError, "k=21, but there are only sx * sy = 4 * 5 = 20 pairs", {"k": 21}),
        (TypeError, "k=True is of type bool, wanted a whole number and at most sx * sy = 4 * 5", {"k": True}),
        (TypeError, "k=2.0 is of type float, wanted a whole number and at most sx * sy = 4 * 5", {"k": 2.0}),
        (TypeError, "log_softmax=1 is of type int, wanted True or False", {"log_softmax": 1}),
        (
            ValueError,
            "weights='sigmoid' is unknown; choose one of: 'none', 'exp', 'softmax'",
            {"weights": "sigmoid"},
        ),
        (TypeError, "x is a list, wanted a torch.Tensor", {"x": [1.0]}),
        (TypeError, "y is int64, wanted one of: bfloat16, float16, float32, float64", {"y": Y.long()}),
        (TypeError, "y is float64, but x is float32; convert one: y.to(x.dtype)", {"y": Y.double()}),
        (ShapeError, "x is [], expected [*batch, sx] with sx >= 1", {"x": torch.tensor(1.0)}),
        (ShapeError, "y is [2, 3, 0], expected [*batch, sy] with sy >= 1", {"y": Y[..., :0]}),
        (
            ShapeError,
            "x is [2, 3, 4] and y is [3, 2, 5]; all dimensions but the last must agree"
            + " (nothing is broadcast: use y.expand)",
            {"y": Y.transpose(0, 1)},
        ),
        (
            ValueError,
            "y is on meta, but x is on cpu; move them to one device",
            {"y": Y.to("meta")},
        ),
        (
            ValueError,
            "sx * sy = 65536 * 32768 pairs, wanted at most 2^31 - 1: indices are int32",
            {"x": torch.zeros(1).expand(1, 65536), "y": torch.zeros(1).expand(1, 32768)},
        ),
    ],
)
def test_product_topk_refuses(error, text, changed):
    given = {"x": X, "y": Y, "k": 3} | changed
    says(error, f"router.product_topk: {text}", router.product_topk, given.pop("x"), given.pop("y"), **given)


def test_an_unknown_backend_lists_those_that_exist():
    with pytest.raises(ValueError, match="router.product_topk: unknown backend 'cuda'; known: auto, .*reference"):
        router.product_topk(X, Y, 3, backend="cuda")
