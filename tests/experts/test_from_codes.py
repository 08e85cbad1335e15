"""`experts.from_codes`: codes in one of our formats, from any source, give the base that `pack` gives."""

import pytest
import torch

from experts.test_import import E, H, I, holds
from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.core import native
from goldsmith.core.shapes import ShapeError
from goldsmith.experts import from_codes, moe, pack
from goldsmith.experts.packed.formats import FORMATS, nibbles
from goldsmith.experts.packed.layout import read_expert

SIZES = ((I, H), (I, H), (H, I))
CASES = [("int8", None), ("int8", 16), ("int4", None), ("int4_asym", 16), ("mxfp4", None), ("fp8_block", None)]


def codes_of(base):
    """The tensors of each projection, as `from_codes` takes them."""
    experts = [read_expert(base.layout, base.gate_up, base.down, e) for e in range(base.num_experts)]
    parts = [name for name in ("codes", "scales", "zeros") if getattr(experts[0].gate, name) is not None]
    return [
        tuple([getattr(getattr(e, matrix), name) for e in experts] for name in parts)
        for matrix in ("gate", "up", "down")
    ]


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("form, group", CASES)
def test_codes_of_every_format_give_the_same_base(form, group, partitions):
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(E, *shape, generator=generator) for shape in ((2 * I, H), (H, I)))
    bias = torch.randn(E, H, generator=generator)
    wanted = pack(gate_up, down, format=form, group_size=group, down_bias=bias, partitions=partitions)
    base = from_codes(*codes_of(wanted), format=form, group_size=group, down_bias=bias, partitions=partitions)
    assert base.layout == wanted.layout and torch.equal(base.down_bias, bias)
    assert torch.equal(base.gate_up, wanted.gate_up) and torch.equal(base.down, wanted.down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_of_all_values_and_scales_of_every_dtype(dtype):
    """Also -128, which `pack` never gives."""
    generator = torch.Generator().manual_seed(1)
    codes_given, weights = [], []
    for out, inputs in SIZES:
        q = torch.randint(-128, 128, (E, out, inputs), generator=generator, dtype=torch.int8)
        q[:, 0] = -128
        s = torch.rand(E, out, inputs // 8, generator=generator).to(dtype)
        codes_given.append((q, s))
        weights.append(q.double() * s.double().repeat_interleave(8, -1))
    base = from_codes(*codes_given, format="int8", group_size=8)
    assert base.scale_dtype == dtype
    holds(base, weights)


@pytest.mark.skipif(native.reason() is not None, reason=f"native: {native.reason()}")
@pytest.mark.parametrize("compute", ["float", "int8"])
def test_the_lowest_code_is_multiplied_as_such(compute):
    """-128 has no counterpart in -127..127, to which `pack` quantises."""
    generator = torch.Generator().manual_seed(2)
    q = [torch.where(torch.rand(E, *shape, generator=generator) < 0.5, -128, 127).to(torch.int8) for shape in SIZES]
    base = from_codes(*((codes, torch.full((*codes.shape[:2], 1), 2.0**-10)) for codes in q), format="int8")
    ids, weights = torch.tensor([[0], [1], [0]]), torch.ones(3, 1)

    def run(backend):
        return lambda x: moe(x, ids, weights.to(x.dtype), base, compute=compute, backend=backend)

    case = Case("x", lambda make: {"x": make.normal(3, H)}, {})
    target = assay.Target(run("native"), run("reference"), cases=[case], name="lowest_code", backward=None)
    assay.check(target, probes=["values", "ensemble"])


def wrong(change, projection, part, form="int4_asym"):
    generator = torch.Generator().manual_seed(2)
    base = pack(
        torch.randn(E, 2 * I, H, generator=generator), torch.randn(E, H, I, generator=generator), format=form,
        group_size=None if FORMATS[form].fixed else 16,
    )  # fmt: skip
    codes_given = [
        tuple(torch.stack([t.view(torch.uint8) for t in part]).view(part[0].dtype) for part in p)
        for p in codes_of(base)
    ]
    tensors = list(codes_given[projection])
    tensors[part] = change(tensors[part])
    codes_given[projection] = tuple(tensors)
    return codes_given


@pytest.mark.parametrize(
    "form, projection, part, change, error, message",
    [
        ("int4_asym", 0, 0, lambda t: t.view(torch.int8), TypeError, "gate's codes is int8, expected one of: uint8"),
        ("int4_asym", 1, 1, lambda t: t[:, :, :1], ShapeError, "up's scales of expert 0 is .32, 1., but codes"),
        ("int4_asym", 2, 2, lambda t: t + 16, ValueError, "down's zeros of expert 0 is .* a zero point is in 0..15"),
        ("int4_asym", 2, 1, lambda t: t * float("nan"), ValueError, "down's scales of expert 0 is nan at .0, 0."),
        ("mxfp4", 0, 1, lambda t: t | 255, ValueError, "gate's scales of expert 0 holds 255, which means NaN in E8M0"),
        ("fp8_block", 1, 0, lambda t: (t.float() * float("nan")).to(t.dtype), ValueError, "up's codes of exp.* nan"),
        ("fp8_block", 1, 1, lambda t: t[:, :0], ShapeError, "up's scales of expert 0 is .0, 1., but codes"),
    ],
)  # fmt: skip
def test_the_error_names_the_wrong_tensor(form, projection, part, change, error, message):
    with pytest.raises(error, match=f"experts.from_codes: {message}"):
        from_codes(*wrong(change, projection, part, form), format=form, group_size=None if FORMATS[form].fixed else 16)


def test_formats_without_scales_and_unknown_ones_are_refused():
    q = [(torch.zeros(E, out, inputs, dtype=torch.int8), torch.ones(E, out, 1)) for out, inputs in SIZES]
    for form in ("bf16", "int5"):
        with pytest.raises(
            ValueError, match=f"experts.from_codes: format='{form}' is unknown; choose one of: 'int8', 'int4'"
        ):
            from_codes(*q, format=form)
    with pytest.raises(ValueError, match="takes no group_size, got 64"):
        from_codes(*q, format="mxfp4", group_size=64)
    with pytest.raises(TypeError, match=r"gate is a tuple of 1, expected a tuple \(codes, scales\)"):
        from_codes(*((codes,) for codes, _ in q), format="int8")
    assert nibbles(torch.tensor([1, 2], dtype=torch.uint8)).item() == 0x21  # the even input in the low nibble
