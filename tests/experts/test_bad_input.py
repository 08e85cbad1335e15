"""Bad input of experts.moe: the error names the argument, its value and what was wanted, before any computation."""

import pytest
import torch

from goldsmith import BackendUnavailable, ShapeError, experts

E, H, I, T, K = 3, 8, 6, 5, 2


def base():
    return torch.randn(E, 2 * I, H), torch.randn(E, H, I)


def pair(target="gate", r=2, e=E, h=H, i=I):
    out, width = (h, i) if target == "down" else (i, h)
    return torch.randn(e, r, width), torch.randn(e, out, r)


def call(**changed):
    arguments = {
        "x": torch.randn(T, H),
        "ids": torch.zeros(T, K, dtype=torch.int64),
        "w": torch.rand(T, K),
        "base": base(),
    }
    arguments |= changed
    return experts.moe(arguments.pop("x"), arguments.pop("ids"), arguments.pop("w"), arguments.pop("base"), **arguments)


def ids_with(value, at=(3, 1)):
    ids = torch.zeros(T, K, dtype=torch.int64)
    ids[at] = value
    return ids


BAD = {
    "id_too_large": (dict(ids=ids_with(3)), ValueError, "topk_ids[3, 1] is 3, expected an expert in 0..2, or -1 to"),
    "id_too_small": (dict(ids=ids_with(-2)), ValueError, "topk_ids[3, 1] is -2, expected an expert in 0..2, or -1 to"),
    "ids_of_floats": (dict(ids=torch.zeros(T, K)), TypeError, "topk_ids is float32, expected one of: int32, int64"),
    "ids_of_bools": (dict(ids=torch.zeros(T, K) > 0), TypeError, "topk_ids is bool, expected one of: int32, int64"),
    "ids_of_int16": (dict(ids=ids_with(0).short()), TypeError, "topk_ids is int16, expected one of: int32, int64"),
    "ids_of_a_list": (dict(ids=[[0, 1]] * T), TypeError, "topk_ids is a list, expected a torch.Tensor"),
    "x_of_integers": (dict(x=torch.zeros(T, H, dtype=torch.int64)), TypeError, "x is int64, expected one of: bfloat16"),
    "x_nested": (dict(x=torch.nested.as_nested_tensor([torch.randn(2, H)] * 2)), TypeError, "x is nested, expected"),
    "no_x": (dict(x=None), TypeError, "x is a NoneType, expected a torch.Tensor"),
    "hidden": (dict(x=torch.randn(T, H + 1)), ShapeError, "x has hidden=9, but the base has hidden=8"),
    "tokens": (dict(x=torch.randn(T + 1, H)), ShapeError, "topk_ids and x need the same leading dimensions"),
    "k": (dict(w=torch.rand(T, K + 1)), ShapeError, "topk_weights and topk_ids need the same shape"),
    "weights": (dict(w=torch.rand(T, K).half()), TypeError, "topk_weights is float16, expected float32 or x's float32"),
    "wide_weights": (dict(w=torch.rand(T, K).double()), TypeError, "topk_weights is float64, but x is float32"),
    "base_of_three": (dict(base=(*base(), None)), TypeError, "base is a tuple of 3, expected a PackedExperts, or"),
    "base_of_a_tensor": (dict(base=base()[0]), TypeError, "base is a Tensor, expected a PackedExperts, or a tuple"),
    "base_of_a_list": (dict(base=[base()[0], [1.0]]), TypeError, "down is a list, expected a torch.Tensor"),
    "two_dimensions": (
        dict(base=(base()[0][0], base()[1])), ShapeError, "gate_up needs three dimensions of at least 1",
    ),
    "rows": (dict(base=(base()[0][:, 1:], base()[1])), ShapeError, "gate_up has 11 rows, but down has intermediate=6"),
    "experts": (dict(base=(base()[0][1:], base()[1])), ShapeError, "gate_up has experts=2, but down has experts=3"),
    "dtypes": (dict(base=(base()[0], base()[1].bfloat16())), TypeError, "down is bfloat16, but gate_up is float32"),
    "wide_base": (dict(base=[t.double() for t in base()]), TypeError, "gate_up is float64, but x is float32; convert"),
    "bias": (
        dict(base=(*base(), torch.randn(E, I), None)), ShapeError, "gate_up_bias is not [3, 12], one row for each",
    ),
    "lora": (dict(lora=3), TypeError, "lora is a int, expected an experts.LoRA, or a dict of (A, B) with keys"),
    "key": (dict(lora={"gate_proj": pair()}), ValueError, "lora has the unknown key 'gate_proj'; known: gate, up"),
    "no_pair": (dict(lora={"gate": pair()[0]}), TypeError, "lora['gate'] is a Tensor, expected (A [E, r, in], B"),
    "lora_experts": (dict(lora={"up": pair(e=4)}), ShapeError, "up_a has experts=4, but the base has experts=3"),
    "lora_inputs": (dict(lora={"up": pair(h=7)}), ShapeError, "up_a takes 7 inputs, but up of the base takes 8"),
    "lora_outputs": (dict(lora={"up": pair(i=7)}), ShapeError, "up_b gives 7 outputs, but up of the base gives 6"),
    "turned": (dict(lora={"up": pair()[::-1]}), ShapeError, "up_a takes 2 inputs, but up of the base takes 8"),
    "down_inputs": (dict(lora={"down": pair()}), ShapeError, "down_a takes 8 inputs, but down of the base takes 6"),
    "ranks": (
        dict(lora={"up": (pair()[0], pair(r=3)[1])}), ShapeError, "up_b has rank=3, but up_a has rank=2",
    ),
    "half_a_lora": (dict(lora={"up": (pair()[0], None)}), ValueError, "up_a is given without up_b; LoRA on up needs"),
    "integer_lora": (
        dict(lora={"up": tuple(t.int() for t in pair())}), TypeError, "up_a is int32, expected one of: bfloat16",
    ),
    "scaling_nan": (dict(lora={"up": pair()}, lora_scaling=torch.nan), ValueError, "lora_scaling=nan, expected a"),
    "scaling_inf": (
        dict(lora={"up": pair()}, lora_scaling={"up": -torch.inf}), ValueError, "lora_scaling['up']=-inf, expected a",
    ),
    "scaling": (dict(lora={"up": pair()}, lora_scaling="2"), TypeError, "lora_scaling='2' is of type str, expected"),
    "scaling_keys": (
        dict(lora={"up": pair()}, lora_scaling={"gate": 1.0}), ValueError, "lora_scaling and lora differ in the key",
    ),
    "scaled_twice": (
        dict(lora=experts.LoRA(E, H, I), lora_scaling=2.0), ValueError, "an experts.LoRA has its own scales",
    ),
    "activation": (dict(activation="swiglu"), ValueError, "activation='swiglu' is unknown; choose one of: 'silu'"),
    "limit": (dict(limit=-1.0), ValueError, "limit=-1.0, expected a number of at least 0.0"),
    "limit_of_text": (dict(limit="7"), TypeError, "limit='7' is of type str, expected a number"),
    "alpha": (dict(alpha=None), TypeError, "alpha=None is of type NoneType, expected a number"),
    "alpha_that_is_none": (dict(alpha=float("nan")), ValueError, "alpha=nan, expected a finite number"),
    "limit_of_words": (dict(limit="7"), TypeError, "limit='7' is of type str, expected a number"),
    "scaling_without_lora": (dict(lora_scaling="2"), TypeError, "lora_scaling='2' is of type str, expected a number"),
    "half_a_pair": (dict(lora={"up": pair()[:1]}), TypeError, "lora['up'] is a tuple of 1, expected (A [E, r, in], B"),
    "compute": (dict(compute="fp8"), ValueError, "compute='fp8' is unknown; choose one of: 'float', 'int8'"),
    "int8_of_floats": (
        dict(compute="int8"), ValueError,
        "compute='int8' needs a base packed as int8, int4 or int4_asym, not plain tensors; pack it in one of",
    ),
    "backend": (dict(backend="cuda"), ValueError, "experts.moe: unknown backend 'cuda'; known: auto"),
}  # fmt: skip


@pytest.mark.parametrize("changed, kind, text", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no_grad"])
def test_the_error_names_the_bad_argument(changed, kind, text, grad):
    with torch.set_grad_enabled(grad), pytest.raises(kind) as caught:
        call(**changed)
    assert str(caught.value).startswith("experts.moe: ") and text in str(caught.value)


@pytest.mark.parametrize("name", ["moe", "slots"])
def test_the_error_for_a_bad_id_gives_its_index_in_the_callers_tensor(name):
    ids = torch.zeros(2, 3, 2, dtype=torch.int64)
    ids[1, 2, 0] = 7
    arguments = (torch.randn(2, 3, H), ids, *([torch.rand(2, 3, 2)] if name == "moe" else []))
    base = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    with pytest.raises(ValueError, match=rf"experts.{name}: topk_ids\[1, 2, 0\] is 7, expected an expert in 0..2"):
        getattr(experts, name)(*arguments, base)


def test_a_shape_error_lists_every_argument():
    with pytest.raises(ShapeError) as caught:
        call(x=torch.randn(T, H + 1), lora={"up": pair()})
    assert str(caught.value).splitlines() == [
        "experts.moe: x has hidden=9, but the base has hidden=8",
        "  x:            [5, 9],     expected [*batch, hidden]",
        "  topk_ids:     [5, 2],     expected [*batch, k]",
        "  topk_weights: [5, 2],     expected [*batch, k]",
        "  gate_up:      [3, 12, 8], expected [experts, 2*intermediate, hidden]",
        "  down:         [3, 8, 6],  expected [experts, hidden, intermediate]",
        "  up_a:         [3, 2, 8],  expected [experts, rank, hidden]",
        "  up_b:         [3, 6, 2],  expected [experts, intermediate, rank]",
    ]


def test_int8_refuses_inputs_that_require_a_gradient():
    packed = experts.pack(*base(), format="int8")
    with pytest.raises(ValueError, match="compute='int8' has no gradient; call it under torch.no_grad"):
        call(base=packed, x=torch.randn(T, H, requires_grad=True), compute="int8")
    assert call(base=packed, x=torch.randn(T, H, requires_grad=True).detach(), compute="int8").shape == (T, H)


def test_int8_refuses_a_format_without_integer_codes():
    packed = experts.pack(*base(), format="bf16")
    with pytest.raises(ValueError, match="int8, int4 or int4_asym, not bf16; .* or use compute='float'"):
        call(base=packed, compute="int8")


def test_int8_refuses_a_row_whose_sum_may_overflow_int32():
    width = 2**31 // (127 * 128) + 1
    packed = experts.pack(torch.ones(1, 2, width), torch.ones(1, width, 1), format="int8")
    arguments = dict(x=torch.ones(1, width), ids=torch.zeros(1, 1, dtype=torch.int64), w=torch.ones(1, 1), base=packed)
    with pytest.raises(
        ValueError, match=f"in int32, which is safe for {width - 1} inputs, not {width}; pack the base with"
    ):
        call(**arguments, compute="int8")
    assert call(**arguments).shape == (1, width)


def test_a_backend_that_cannot_run_says_why():
    with pytest.raises(BackendUnavailable, match="experts.moe: cuda_grouped: needs a CUDA device"):
        call(backend="cuda_grouped")


def test_bad_ids_are_found_in_slots_and_modules_too():
    x, ids, w = torch.randn(T, H), ids_with(9), torch.rand(T, K)
    with pytest.raises(ValueError, match=r"experts.slots: topk_ids\[3, 1\] is 9"):
        experts.slots(x, ids, base())
    with pytest.raises(ValueError, match=r"experts.moe: topk_ids\[3, 1\] is 9"):
        experts.Experts(base())(x, ids, w)


def test_blobs_of_another_layout_are_refused():
    from goldsmith import Op

    large = torch.randn(E, 2 * 64, H), torch.randn(E, H, 64)
    packed, other = experts.pack(*large, format="bf16"), experts.pack(*large, format="fp32")
    options = dict(
        layout=packed.layout.text, gate_scale=1.0, up_scale=1.0, down_scale=1.0, dropout=0.0, activation="silu",
        alpha=1.0, limit=None, compute="float", save=False,
    )  # fmt: skip
    arguments = torch.randn(T, H), ids_with(0), torch.rand(T, K), other.gate_up, other.down, *[None] * 9
    with pytest.raises(
        ShapeError, match=r"experts.moe: down is \[\d+\], but a base of layout 'bf16:.*' has \[\d+\] bytes"
    ):
        Op.get("experts.moe")(*arguments, **options)
