"""experts.linear: dense products with a packed weight."""

import copy
import pickle

import pytest
import torch

from goldsmith import Op, assay, experts
from goldsmith.assay.declare.case import Case
from goldsmith.cli.targets import op_target
from goldsmith.core import native
from goldsmith.core.shapes import ShapeError
from goldsmith.experts import _native_abi
from goldsmith.experts.linear import _native as linear_native
from goldsmith.experts.linear import op as linear_op
from goldsmith.experts.linear.cases import inputs

FORMATS = ("fp32", "bf16", "int8", "int4", "int4_asym", "mxfp4", "fp8_block")
MOST = 8  # rows of a decoding step, whose bits do not depend on the other rows
needs_native = pytest.mark.skipif(native.reason() is not None, reason=f"native: {native.reason()}")


def drawn(format, T=3, N=72, K=256, dtype=torch.float32, bias=False):
    torch.manual_seed(0)
    packed = experts.pack_matrix(torch.randn(N, K), format=format)
    return torch.randn(T, K).to(dtype), packed, torch.randn(N) if bias else None


@pytest.mark.sweep(2)
@needs_native
@pytest.mark.parametrize("format", FORMATS)
def test_every_level_stays_within_the_bounds(format):
    target, library = op_target(Op.get("experts.linear"), "native"), native.library()
    before = library.gs_level()
    try:
        for level in range(library.gs_machine_level() + 1):
            native.check(library.gs_set_level(level))
            for T, dtype in ((1, torch.float32), (2, torch.bfloat16), (7, torch.float32), (17, torch.bfloat16)):
                case = Case(f"{format}_{T}", inputs, dict(T=T, N=45, K=256, format=format, bias=T > 1), "every level")
                assay.check(target, case, dtype=dtype, probes=("values", "poison", "guard"))
    finally:
        native.check(library.gs_set_level(before))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_with_and_without_other_rows(format, dtype):
    x, packed, _ = drawn(format, T=MOST, dtype=dtype)
    library = native.library()
    before = library.gs_level()
    try:
        for level in range(library.gs_machine_level() + 1):
            native.check(library.gs_set_level(level))
            together = experts.linear(x, packed)
            for t in range(MOST):
                assert torch.equal(experts.linear(x[t : t + 1], packed)[0], together[t]), native.LEVELS[level]
    finally:
        native.check(library.gs_set_level(before))


@needs_native
def test_the_bits_do_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(linear_native, "busy", lambda weights, flop: 8)
    monkeypatch.setattr(linear_native, "threads", torch.get_num_threads)
    before = torch.get_num_threads()
    for T in (1, 5, 40):
        x, packed, bias = drawn("int4", T=T, N=500, bias=True)
        outputs = []
        try:
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                outputs.append(experts.linear(x, packed, bias, backend="native"))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(y, outputs[0]) for y in outputs)


@needs_native
@pytest.mark.parametrize("bias", [False, True])
def test_a_direct_call_gives_the_bits_of_the_operator(bias, monkeypatch):
    x, packed, b = drawn("int4", bias=bias)
    direct = experts.linear(x, packed, b)
    monkeypatch.setattr(linear_op, "_directly", lambda *arguments: False)
    assert torch.equal(experts.linear(x, packed, b), direct)


@needs_native
@pytest.mark.parametrize("rows", ["transposed", "negated", "strided"])
def test_rows_that_memory_does_not_hold_as_they_are_give_the_same_product(rows):
    x, packed, _ = drawn("int4")
    given = {
        "transposed": lambda: x.T.contiguous().T,
        "negated": lambda: torch._neg_view(-x),
        "strided": lambda: torch.stack((x, x), -1)[..., 0],
    }[rows]()
    assert torch.equal(experts.linear(given, packed), experts.linear(x, packed))


def test_no_rows_and_leading_dimensions():
    x, packed, _ = drawn("bf16")
    assert experts.linear(x[:0], packed).shape == (0, 72)
    assert torch.equal(experts.linear(x.view(3, 1, 256), packed).view(3, 72), experts.linear(x, packed))


@needs_native
def test_nan_stays_in_its_row():
    x, packed, _ = drawn("int4")
    wanted = experts.linear(x, packed)
    x[1, 7] = torch.nan
    y = experts.linear(x, packed)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], wanted[[0, 2]])


def test_a_module_replaces_a_linear_layer_and_compiles():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    packed = experts.PackedLinear.of(layer, format="fp32")
    x = torch.randn(2, 64)
    with torch.no_grad():
        assert torch.equal(packed.weight.unpack(), layer.weight)
        assert torch.equal(packed(x), experts.linear(x, packed.weight, packed.bias))
        compiled = torch.compile(packed, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), packed(x))
        assert copy.deepcopy(packed).weight is packed.weight
    assert list(packed.state_dict()) == ["bias"]


def test_a_packed_matrix_is_immutable_and_keeps_its_bits_in_a_pickle():
    _, packed, _ = drawn("int4_asym")
    again = pickle.loads(pickle.dumps(packed))
    assert torch.equal(again.data, packed.data) and again.layout == packed.layout
    with pytest.raises(AttributeError, match="immutable: data cannot be set"):
        packed.data = None


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.zeros(3, 255)}, ShapeError, "x is [3, 255], expected [*batch, 256]"),
        ({"bias": torch.zeros(71)}, ShapeError, "bias is [71], expected [72], one for each output"),
        ({"bias": torch.zeros(72, dtype=torch.float16)}, TypeError, "bias is float16, expected float32 or x's float32"),
        ({"weight": torch.zeros(72, 256)}, TypeError, "weight is a Tensor, expected a PackedMatrix"),
        ({"x": torch.zeros(3, 256, requires_grad=True)}, ValueError, "has no gradient; call it under torch.no_grad()"),
    ],
)
def test_bad_input_is_one_sentence(change, error, message):
    x, packed, _ = drawn("bf16")
    with pytest.raises(error) as caught:
        experts.linear(**{"x": x, "weight": packed} | change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "weight, options, error, message",
    [
        (torch.zeros(4), {}, ShapeError, "weight is [4], expected [out, in] with at least 1 of each"),
        (
            torch.zeros(4, 40),
            {"format": "int4", "group_size": 32},
            ValueError,
            "divides in=40; these would work: 8, 40",
        ),
        (torch.full((2, 8), torch.inf), {}, ValueError, "inf"),
        (torch.zeros(2, 8, dtype=torch.float64), {}, TypeError, "float64"),
    ],
)
def test_a_weight_that_cannot_be_packed_is_one_sentence(weight, options, error, message):
    with pytest.raises(error) as caught:
        experts.pack_matrix(weight, **options)
    assert message in str(caught.value)


def test_the_structure_of_the_call_is_that_of_the_library():
    assert _native_abi.LinearArgs._c_name_ == "gs_linear_args"


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8", "int4", "int4_asym", "mxfp4", "fp8_block"])
def test_rows_packed_some_at_a_time_are_those_packed_at_once(format, monkeypatch):
    weight = torch.randn(300, 128)
    whole = experts.pack_matrix(weight, format=format)
    monkeypatch.setattr("goldsmith.experts.packed.quantisation._CHUNK", 1)  # 128 rows
    assert torch.equal(experts.pack_matrix(weight, format=format).data, whole.data)
    weight[290, 3] = 3.4e38
    if format in ("int8", "int4", "int4_asym"):
        with pytest.raises(ValueError, match="weight row 290, "):
            experts.pack_matrix(weight, format=format, scale_dtype=torch.float16)
