"""Bad input raises before any computation; the message names the argument, its value, what is wanted and a remedy."""

import importlib
import re

import pytest
import torch

from goldsmith import Op, ShapeError, router

X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 5)


def says(error, text, function, *args, **options):
    """The call raises exactly this error, and its message starts with the text."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    assert type(caught.value) is error
    assert str(caught.value).startswith(text), str(caught.value)


@pytest.mark.parametrize(
    "error, text, changed",
    [
        (ValueError, "k=0, expected at least 1 and at most sx * sy = 4 * 5", {"k": 0}),
        (ValueError, "k=21, but there are only sx * sy = 4 * 5 = 20 pairs", {"k": 21}),
        (TypeError, "k=True is of type bool, expected a whole number and at most sx * sy = 4 * 5", {"k": True}),
        (TypeError, "k=2.0 is of type float, expected a whole number and at most sx * sy = 4 * 5", {"k": 2.0}),
        (TypeError, "log_softmax=1 is of type int, expected True or False", {"log_softmax": 1}),
        (
            ValueError,
            "weights='sigmoid' is unknown; choose one of: 'none', 'exp', 'softmax'",
            {"weights": "sigmoid"},
        ),
        (TypeError, "x is a list, expected a torch.Tensor", {"x": [1.0]}),
        (TypeError, "y is int64, expected one of: bfloat16, float16, float32, float64", {"y": Y.long()}),
        (TypeError, "y is float64, but x is float32; convert one: y.to(x.dtype)", {"y": Y.double()}),
        (ShapeError, "x is [], expected [*batch, sx] with sx >= 1", {"x": torch.tensor(1.0)}),
        (ShapeError, "y is [2, 3, 0], expected [*batch, sy] with sy >= 1", {"y": Y[..., :0]}),
        (
            ShapeError,
            "x is [2, 3, 4] and y is [3, 2, 5]; leading dimensions must agree",
            {"y": Y.transpose(0, 1)},
        ),
        (
            ValueError,
            "y is on meta, but x is on cpu; move them to one device",
            {"y": Y.to("meta")},
        ),
        (
            ValueError,
            "sx * sy = 65536 * 32768 is more than 2^31 - 1 pairs",
            {"x": torch.zeros(1).expand(1, 65536), "y": torch.zeros(1).expand(1, 32768)},
        ),
    ],
)
def test_product_topk_refuses(error, text, changed):
    arguments = {"x": X, "y": Y, "k": 3} | changed
    x, y = arguments.pop("x"), arguments.pop("y")
    says(error, f"router.product_topk: {text}", router.product_topk, x, y, **arguments)


def test_an_unknown_backend_lists_those_that_exist():
    with pytest.raises(ValueError, match="router.product_topk: unknown backend 'cuda'; known: auto, .*reference"):
        router.product_topk(X, Y, 3, backend="cuda")


H, W_IN, W_OUT = torch.randn(2, 3, 6), torch.randn(9, 6), torch.randn(9, 4)
ACTIVATIONS = "'silu', 'gelu', 'gelu_tanh', 'relu', 'relu2', 'identity'"
STRATEGIES = "'auto', 'gather', 'sorted', 'dense'"
WEIGHTS, INDICES = torch.randn(2, 3, 5), torch.randint(0, 9, (2, 3, 5))


def shapes(**changed):
    value = {"h": [2, 3, 6], "w_in": [9, 6], "w_out": [9, 4], "weights": [2, 3, 5], "indices": [2, 3, 5]} | changed
    wanted = {"h": "[*batch, D]", "w_in": "[N, D] or None", "w_out": "[N, E]"}
    return "".join(
        f"\n  {name + ':':9}{shape}, expected {wanted.get(name, '[*batch, K]')}" for name, shape in value.items()
    )


@pytest.mark.parametrize(
    "error, text, changed",
    [
        (TypeError, "w_out is a NoneType, expected a torch.Tensor", {"w_out": None}),
        (TypeError, "indices is float32, expected one of: int32, int64", {"indices": WEIGHTS}),
        (TypeError, "indices is bool, expected one of: int32, int64", {"indices": INDICES > 3}),
        (TypeError, "weights is int64, expected one of: bfloat16, float16, float32, float64", {"weights": INDICES}),
        (TypeError, "weights is float16, expected float32 or h's float32", {"weights": WEIGHTS.half()}),
        (TypeError, "w_in is bfloat16, but h is float32; convert one: w_in.to(h.dtype)", {"w_in": W_IN.bfloat16()}),
        (ValueError, f"activation='tanh' is unknown; choose one of: {ACTIVATIONS}", {"activation": "tanh"}),
        (ValueError, f"strategy='fast' is unknown; choose one of: {STRATEGIES}", {"strategy": "fast"}),
        (TypeError, "sparse_grad=1 is of type int, expected True or False", {"sparse_grad": 1}),
        (ValueError, "indices is on meta, but h is on cpu; move them to one device", {"indices": INDICES.to("meta")}),
        (ShapeError, f"w_in has D=9, but h has D=6{shapes(w_in=[6, 9])}", {"w_in": W_IN.T}),
        (ShapeError, f"w_out has N=8, but w_in has N=9{shapes(w_out=[8, 4])}", {"w_out": W_OUT[1:]}),
        (ShapeError, f"w_out needs two dimensions of at least 1{shapes(w_out=[9])}", {"w_out": W_OUT[:, 0]}),
        (ShapeError, f"weights and indices need the same shape{shapes(weights=[2, 3])}", {"weights": WEIGHTS[..., 0]}),
        (
            ShapeError,
            f"indices and h need the same leading dimensions{shapes(indices=[3, 5])}",
            {"indices": INDICES[0]},
        ),
        (ShapeError, f"h needs a last dimension of at least 1{shapes(h=[])}", {"h": torch.tensor(1.0)}),
    ],
)  # fmt: skip
def test_atomic_experts_refuses(error, text, changed):
    arguments = {"h": H, "w_in": W_IN, "w_out": W_OUT, "weights": WEIGHTS, "indices": INDICES} | changed
    tensors = [arguments.pop(name) for name in ("h", "w_in", "w_out", "weights", "indices")]
    says(error, f"router.atomic_experts: {text}", router.atomic_experts, *tensors, **arguments)


SHAPES = {"tokens": 4, "k": 2, "num_experts": 9, "hidden": 8, "dtype": torch.float32, "device": "cpu"}
DTYPES = "torch.bfloat16, torch.float16, torch.float32, torch.float64"


@pytest.mark.parametrize(
    "error, text, changed",
    [
        (ValueError, "tokens=-1, expected at least 0", {"tokens": -1}),
        (TypeError, "k=True is of type bool, expected a whole number", {"k": True}),
        (TypeError, "tokens=4.0 is of type float, expected a whole number", {"tokens": 4.0}),
        (ValueError, "num_experts=0, expected at least 1", {"num_experts": 0}),
        (ValueError, "hidden=0, expected at least 1", {"hidden": 0}),
        (TypeError, f"dtype='float32', expected one of: {DTYPES}", {"dtype": "float32"}),
        (TypeError, f"dtype=torch.int32, expected one of: {DTYPES}", {"dtype": torch.int32}),
        (TypeError, "device=0 is of type int, expected a torch.device or its name", {"device": 0}),
        (ValueError, "device='gpu'", {"device": "gpu"}),
    ],
)
def test_choose_strategy_refuses(error, text, changed):
    says(error, f"router.choose_strategy: {text}", router.choose_strategy, **SHAPES | changed)


def test_zero_tokens_with_zero_experts_have_a_strategy():
    assert router.choose_strategy(**SHAPES | {"tokens": 0, "k": 0}) == "gather"


@pytest.mark.parametrize("name", ["router.product_topk", "router.atomic_experts"])
def test_the_function_that_an_error_recommends_for_second_derivatives_works_as_described(name):
    op = Op.all()[name]
    values = op.cases[1].build(torch.float64, "cpu")
    tensors = [t.requires_grad_(t.is_floating_point()) for t in (values[i] for i in op.inputs)]
    options = {option: values[option] for option in op.options}
    first = torch.autograd.grad(op(*tensors, **options)[0].square().sum(), tensors[0], create_graph=True)[0]
    with pytest.raises(NotImplementedError) as caught:
        first.sum().backward()
    module, function, names = re.search(r"from (\S+) import (\w+)`.* options (.*) by name", str(caught.value)).groups()
    assert names.split(", ") == list(options)
    forward = getattr(importlib.import_module(module), function)
    first = torch.autograd.grad(forward(*tensors, **options)[0].square().sum(), tensors[0], create_graph=True)[0]
    assert torch.autograd.grad(first.sum(), tensors[0])[0].isfinite().all()
