"""Importers of quantised checkpoints: layers are encoded as their authors document and compared in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experts import encoders
from goldsmith.core.shapes import ShapeError
from goldsmith.experts import from_awq, from_fp8_block, from_k2, from_mxfp4
from goldsmith.experts.packed.formats import E2M1
from goldsmith.experts.packed.layout import read_expert

E, H, I = 2, 64, 32
SIZES = ((I, H), (I, H), (H, I))  # gate, up, down: [out, in]


def random_bits(dtype, *shape):
    """Scales of all magnitudes, also subnormal and negative, but never NaN or infinite."""
    wide = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
    if dtype == torch.float32:
        return torch.randn(shape) * 10.0 ** torch.randint(-38, 30, shape)
    return torch.where(wide.view(dtype).isfinite(), wide.view(dtype), torch.ones((), dtype=dtype))


def k2_layer(group=32, dtype=torch.bfloat16, sizes=SIZES):
    """(arguments of the importer, weights in float64): three projections of E experts."""
    tensors, weights = [], []
    for out, inputs in sizes:
        q = torch.randint(-8, 8, (E, out, inputs))
        scale = random_bits(dtype, E, out, inputs // group)
        tensors.append((torch.stack([encoders.k2(one) for one in q]), scale))
        weights.append(q.double() * scale.double().repeat_interleave(group, -1))
    return tensors, weights


def awq_layer(group=16, sizes=SIZES):
    tensors, weights = [], []
    for out, inputs in sizes:
        q, z = torch.randint(0, 16, (E, inputs, out)), torch.randint(0, 16, (E, inputs // group, out))
        scale = random_bits(torch.float16, E, inputs // group, out)
        tensors.append((*(torch.stack([encoders.awq(one) for one in codes]) for codes in (q, z)), scale))
        every = [t.double().repeat_interleave(group, 1) for t in (z, scale)]
        weights.append(((q.double() - every[0]) * every[1]).transpose(1, 2))
    return tensors, weights


def fp8_layer(sizes=((130, 257), (130, 257), (257, 130))):
    tensors, weights = [], []
    for out, inputs in sizes:
        codes = torch.randint(0, 256, (E, out, inputs), dtype=torch.uint8)
        codes[codes & 127 == 127] = 3
        q = codes.view(torch.float8_e4m3fn)
        scale = random_bits(torch.float32, E, -(-out // 128), -(-inputs // 128))
        every = scale.double().repeat_interleave(128, 1)[:, :out].repeat_interleave(128, 2)[:, :, :inputs]
        tensors.append((q, scale))
        weights.append(q.double() * every)
    return tensors, weights


def mxfp4_layer(interleaved=True, hidden=H, inner=I):
    """(gpt-oss's four tensors, [gate, up, down] in float64)"""
    values = torch.tensor(E2M1, dtype=torch.float64)
    tensors, weights = [], []
    for out, inputs in ((2 * inner, hidden), (hidden, inner)):
        codes = torch.randint(0, 16, (E, out, inputs))
        scale = torch.randint(0, 255, (E, out, inputs // 32), dtype=torch.uint8)
        tensors += [torch.stack([encoders.mxfp4(one) for one in codes]), scale]
        weights.append(values[codes] * torch.exp2(scale.double() - 127).repeat_interleave(32, -1))
    both, down = weights
    halves = (both[:, 0::2], both[:, 1::2]) if interleaved else (both[:, :inner], both[:, inner:])
    return tensors, [*halves, down]


def holds(base, weights):
    both, down = base.unpack(torch.float64)
    assert torch.equal(both, torch.cat(weights[:2], 1)) and torch.equal(down, weights[2])


LAYERS = [(from_k2, k2_layer, {}), (from_awq, awq_layer, {"group_size": 16}), (from_fp8_block, fp8_layer, {})]
LAYERS += [(from_mxfp4, mxfp4_layer, {})]
NAMES = ["k2", "awq", "fp8", "mxfp4"]


@pytest.mark.parametrize(("importer", "layer", "options"), LAYERS, ids=NAMES)
@pytest.mark.parametrize("partitions", [1, 2, 3, 5])
def test_imported_weights_equal_the_source_with_any_number_of_slices(importer, layer, options, partitions):
    tensors, weights = layer()
    base = importer(*tensors, **options, partitions=partitions)
    assert base.partitions == partitions and base.num_experts == E
    holds(base, weights)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([8, 16, 32]), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
def test_any_sizes_and_groups(seed, group, hidden, inner, partitions):
    torch.manual_seed(seed)
    sizes = ((inner * group, hidden * group),) * 2 + ((hidden * group, inner * group),)
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    tensors, weights = k2_layer(group, dtype, sizes)
    base = from_k2(*tensors, group_size=group, partitions=partitions)
    assert (base.format, base.group_size, base.scale_dtype) == ("int4", group, dtype)
    holds(base, weights)
    tensors, weights = awq_layer(group, sizes)
    base = from_awq(*tensors, group_size=group, partitions=partitions)
    assert (base.format, base.group_size, base.scale_dtype) == ("int4_asym", group, torch.float16)
    holds(base, weights)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_codes_zeros_and_scales_are_kept_bit_for_bit():
    """Also bits that do not change a value: codes of -0, scales of -0, a zero that equals every code."""
    tensors, _ = awq_layer()
    tensors[0][2][0, 0, :4] = torch.tensor([0.0, -0.0, 6e-8, -6e-8], dtype=torch.float16)
    base = from_awq(*tensors, group_size=16)
    for e in range(E):
        gate = read_expert(base.layout, base.gate_up, base.down, e).gate
        assert torch.equal(bits(gate.scales), bits(tensors[0][2][e].t()))
        zeros = torch.stack([(tensors[0][1][e] >> 4 * i) & 15 for i in (0, 4, 1, 5, 2, 6, 3, 7)], -1).flatten(1)
        assert torch.equal(gate.zeros.int(), zeros.t())
    tensors, _ = mxfp4_layer()
    base = from_mxfp4(*tensors)
    for e in range(E):
        expert = read_expert(base.layout, base.gate_up, base.down, e)
        assert torch.equal(expert.up.codes, tensors[0][e, 1::2].flatten(1)) and torch.equal(
            expert.gate.scales, tensors[1][e, 0::2]
        )
        assert torch.equal(expert.down.codes, tensors[2][e].flatten(1)) and torch.equal(
            expert.down.scales, tensors[3][e]
        )
    tensors, _ = fp8_layer()
    base = from_fp8_block(*tensors)
    down = read_expert(base.layout, base.gate_up, base.down, 1).down
    assert torch.equal(bits(down.codes), bits(tensors[2][0][1])) and torch.equal(
        bits(down.scales), bits(tensors[2][1][1])
    )


@pytest.mark.parametrize(("importer", "layer", "options"), LAYERS, ids=NAMES)
def test_lists_generators_and_strided_tensors_are_accepted(importer, layer, options):
    tensors, _ = layer()
    wanted = importer(*tensors, **options)
    seen = []
    if importer is from_mxfp4:
        ways = [[list(t) for t in tensors], [iter(t) for t in tensors], [t.flip(0).flip(0) for t in tensors]]
    else:
        ways = [
            [tuple(list(t) for t in part) for part in tensors],
            [[iter(t) for t in part] for part in tensors],
            [tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in part) for part in tensors],
        ]
    for way in ways:
        base = importer(*way, **options, progress=lambda done, total: seen.append(done))
        assert torch.equal(base.gate_up, wanted.gate_up) and torch.equal(base.down, wanted.down)
    assert seen == [1, 2] * 3


def test_mxfp4_imports_biases_and_both_row_orders():
    tensors, weights = mxfp4_layer()
    gate_up_bias, down_bias = torch.randn(E, 2 * I).bfloat16(), torch.randn(E, H).bfloat16()
    base = from_mxfp4(*tensors, gate_up_bias=gate_up_bias, down_bias=down_bias)
    holds(base, weights)
    assert torch.equal(base.gate_up_bias, torch.cat((gate_up_bias[:, 0::2], gate_up_bias[:, 1::2]), 1))
    assert torch.equal(base.down_bias, down_bias)
    tensors, weights = mxfp4_layer(interleaved=False)
    base = from_mxfp4(*tensors, gate_up_bias=gate_up_bias, interleaved=False)
    holds(base, weights)
    assert torch.equal(base.gate_up_bias, gate_up_bias)


# -- wrong arguments --------------------------------------------------------------------------------------------------


def changed(layer, projection, part, change):
    """The layer's arguments with one tensor changed (for mxfp4, `part` is its index)."""
    tensors, _ = layer()
    if projection is None:
        tensors[part] = change(tensors[part])
    else:
        parts = list(tensors[projection])
        parts[part] = change(parts[part])
        tensors[projection] = tuple(parts)
    return tensors


def put(value, *place):
    def change(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


def swapped(t):
    return t.transpose(1, 2)


NAN, INF = float("nan"), float("inf")
K2, AWQ, FP8, MX = ((importer, layer) for importer, layer, _ in LAYERS)
WRONG = [
    (*K2, 0, 0, torch.Tensor.float, TypeError, "gate's weight_packed is float32, expected one of: int32"),
    (*K2, 1, 0, lambda t: t.view(torch.uint8), TypeError, "up's weight_packed is uint8, expected one of: int32"),
    (*K2, 2, 1, torch.Tensor.double, TypeError, "down's weight_scale is float64, expected one of: bfloat16, float16,"),
    (*K2, 2, 1, lambda t: None, TypeError, "down's weight_scale is None, expected a tensor [E, out, in/group], or E"),
    (
        *K2,
        0,
        1,
        lambda t: t[:, :, :1],
        ShapeError,
        "[32, 1], but weight_packed [32, 8] needs [32, 2]; its shape fits group_",
    ),
    (*K2, 0, 1, lambda t: t[:1], ShapeError, "weight_packed has experts=2, but gate's weight_scale has experts=1"),
    (*K2, 1, 1, torch.Tensor.float, TypeError, "up's scales are torch.float32, but gate's torch.bfloat16"),
    (*K2, 1, 1, put(NAN, 1, 3, 0), ValueError, "up's weight_scale of expert 1 is nan at [3, 0]"),
    (*K2, 2, 0, lambda t: t[0], ShapeError, "down's weight_packed is [64, 4], expected [E, out, in/8]"),
    (
        *AWQ,
        0,
        1,
        lambda t: None,
        TypeError,
        "gate's qzeros is None, expected a tensor [E, in/group, out/8], or E tensors ",
    ),
    (
        *AWQ,
        0,
        1,
        lambda t: None,
        TypeError,
        "for (weight_packed, weight_scale), without zeros, use experts.from_k2",
    ),
    (*AWQ, 0, 2, torch.Tensor.bfloat16, TypeError, "gate's scales is bfloat16, expected one of: float16"),
    (*AWQ, 2, 1, swapped, ShapeError, "down's qzeros of expert 0 is [8, 2], but qweight [32, 8] needs [2, 8]"),
    (*AWQ, 0, 0, swapped, ShapeError, "gate's scales of expert 0 is [4, 32], but qweight [4, 64] needs"),
    (*AWQ, 2, 2, put(INF, 0, 1, 5), ValueError, "down's scales of expert 0 is inf at [1, 5]; weights and scales must"),
    (
        *FP8,
        0,
        0,
        torch.Tensor.float,
        TypeError,
        "float32, expected one of: float8_e4m3fn; for unquantised weights use",
    ),
    (
        *FP8,
        1,
        0,
        lambda t: t.view(torch.float8_e5m2),
        TypeError,
        "up's weight is float8_e5m2, expected one of: float8_e4",
    ),
    (*FP8, 1, 1, torch.Tensor.bfloat16, TypeError, "up's weight_scale_inv is bfloat16, expected one of: float32"),
    (*FP8, 2, 1, swapped, ShapeError, "weight_scale_inv of expert 0 is [2, 3], but weight [257, 130] needs [3, 2]"),
    (
        *FP8,
        2,
        0,
        put(NAN, 1, 200, 7),
        ValueError,
        "down's weight of expert 1 is nan at [200, 7]; weights must be finite",
    ),
    (*FP8, 2, 1, put(INF, 1, 2, 1), ValueError, "down's weight_scale_inv of expert 1 is inf at [2, 1]"),
    (
        *FP8,
        2,
        0,
        lambda t: t[:, :, :129],
        ShapeError,
        "is gate [130, 257], up [130, 257], down [257, 129] as [out, in], expected",
    ),
    (*MX, None, 0, lambda t: t.flatten(2), ShapeError, "gate_up_blocks is [2, 64, 32], expected [E, 2I, H/32, 16]"),
    (
        *MX,
        None,
        2,
        lambda t: t[..., :8],
        ShapeError,
        "down_blocks of expert 0 is [64, 1, 8], expected 16 bytes at the end",
    ),
    (*MX, None, 3, lambda t: None, TypeError, "down_scales is None, expected a tensor [E, H, I/32]"),
    (*MX, None, 1, torch.Tensor.float, TypeError, "gate_up_scales is float32, expected one of: uint8"),
    (
        *MX,
        None,
        1,
        put(255, 1, 3, 1),
        ValueError,
        "gate_up_scales of expert 1 holds 255, which means NaN in E8M0, at [3, 1]",
    ),
    (
        *MX,
        None,
        3,
        lambda t: t[:, :7],
        ShapeError,
        "down_scales of expert 0 is [7, 1], but down_blocks [64, 1, 16] needs",
    ),
]


@pytest.mark.parametrize(
    ("importer", "layer", "projection", "part", "change", "error", "says"), WRONG, ids=range(len(WRONG))
)
def test_the_error_names_the_wrong_tensor(importer, layer, projection, part, change, error, says):
    options = {"group_size": 16} if importer is from_awq else {}
    with pytest.raises(error) as raised:
        importer(*changed(layer, projection, part, change), **options)
    assert str(raised.value).startswith(f"experts.{importer.__name__}: ") and says in str(raised.value)


def test_the_two_int4_layouts_are_not_confused():
    k2, awq = k2_layer()[0], awq_layer()[0]
    with pytest.raises(
        TypeError, match=r"from_awq: gate is a tuple of 2, expected a tuple \(qweight, qzeros, scales\); "
    ):
        from_awq(*k2)
    with pytest.raises(TypeError, match="from_k2: gate is a tuple of 3, expected a tuple .*use experts.from_awq"):
        from_k2(*awq)
    with pytest.raises(TypeError, match="from_awq: gate is a Tensor, expected a tuple"):
        from_awq(k2[0][0], k2[1][0], k2[2][0])
    square, _ = k2_layer(16, torch.float16, ((64, 64),) * 3)  # both layouts have the same shapes except for the scales
    zeros = torch.zeros(E, 4, 8, dtype=torch.int32)
    with pytest.raises(
        ShapeError, match=r"from_awq: gate's scales of expert 0 is \[64, 4\], but qweight \[64, 8\] needs"
    ):
        from_awq(*((packed, zeros, scale) for packed, scale in square), group_size=16)


@pytest.mark.parametrize("importer", [from_k2, from_awq])
@pytest.mark.parametrize("group", [0, -32, 12, 2.5, True])
def test_an_invalid_group_size_is_refused_before_any_division(importer, group):
    tensors, _ = k2_layer() if importer is from_k2 else awq_layer()
    with pytest.raises((ValueError, TypeError), match=f"{importer.__name__}: group_size={group} "):
        importer(*tensors, group_size=group)


@pytest.mark.parametrize("group", [0, -32, 12])
def test_the_error_for_an_invalid_group_size_lists_sizes_that_would_work(group):
    tensors, _ = awq_layer()
    (inputs, columns), rows = tensors[0][0].shape[1:], tensors[2][0].shape[1]
    assert (8 * columns, inputs) == (rows, 8 * tensors[2][0].shape[2])
    wanted = rf"group_size={group} must .* hidden_size={inputs} and intermediate_size={rows}; these would work: 8, 16"
    with pytest.raises(ValueError, match=wanted):
        from_awq(*tensors, group_size=group)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="from_k2: partitions=65537, expected at most 65536"):
        from_k2(*k2_layer()[0], partitions=65537)
    with pytest.raises(TypeError, match="from_k2: group_size=None, expected an int"):
        from_k2(*k2_layer()[0], group_size=None)
    with pytest.raises(ValueError, match="from_k2: partitions=0, expected"):
        from_k2(*k2_layer()[0], partitions=0)
    with pytest.raises(TypeError, match="from_mxfp4: interleaved='yes' is a str"):
        from_mxfp4(*mxfp4_layer()[0], interleaved="yes")
    with pytest.raises(ShapeError, match=r"from_mxfp4: down_bias is \[2, 5\], expected \[2, 64\]"):
        from_mxfp4(*mxfp4_layer()[0], down_bias=torch.zeros(E, 5))
    odd, _ = mxfp4_layer()
    with pytest.raises(ShapeError, match="gate_up_blocks of expert 0 has 63 rows, not an even number"):
        from_mxfp4(odd[0][:, :63], odd[1][:, :63], *odd[2:])


def test_a_bias_without_data_is_refused_by_name():
    blocks = [torch.zeros(1, *shape, dtype=torch.uint8) for shape in ((64, 1, 16), (64, 1), (32, 1, 16), (32, 1))]
    with pytest.raises(ValueError, match="gate_up_bias is on the meta device, which holds no data; load it first"):
        from_mxfp4(*blocks, gate_up_bias=torch.zeros(1, 64, device="meta"))
