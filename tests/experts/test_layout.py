"""The packed blobs, byte by byte, against a literal implementation of their description; and the layout's text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldsmith.experts.packed.formats import FORMATS, Codes, decode, from_nibbles
from goldsmith.experts.packed.layout import Expert, Layout, cuts, read_expert, unpack, unpack_expert, write_expert

EACH = list(FORMATS)


def layout_of(name, E=2, H=40, I=24, group=None, borders=None, scale=None):
    fmt = FORMATS[name]
    group = group or {"int4": 8, "int4_asym": 8}.get(name, fmt.group)
    scale = scale or (fmt.scales[0] if fmt.scales else None)
    return Layout(name, E, H, I, group, scale, borders or (0, I))


def random_codes(layout, rows, inputs):
    """Random codes and finite scales, without a quantiser."""
    fmt, size = layout.kind, (rows, inputs // layout.kind.per_code)
    if not fmt.scales:
        return Codes(torch.randn(size).to(fmt.codes))
    codes = torch.randint(0, 256, size, dtype=torch.uint8)
    if fmt.name == "fp8_block":
        codes[codes & 127 == 127] = 1  # NaN
        return Codes(codes.view(fmt.codes), torch.rand(-(-rows // 128), -(-inputs // 128)))
    groups = inputs // (layout.group_size or inputs)
    scales = torch.rand(rows, groups).to(layout.scale_dtype)
    if fmt.name == "mxfp4":
        scales = torch.randint(0, 250, (rows, groups), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (rows, groups), dtype=torch.uint8) if fmt.zeros else None
    return Codes(codes.view(fmt.codes), scales, zeros)


def random_expert(layout):
    H, I = layout.hidden_size, layout.intermediate_size
    return Expert(random_codes(layout, I, H), random_codes(layout, I, H), random_codes(layout, H, I))


def blobs(layout):
    return [torch.zeros(layout.nbytes(which), dtype=torch.uint8) for which in ("gate_up", "down")]


def packed(layout):
    experts = [random_expert(layout) for _ in range(layout.num_experts)]
    gate_up, down = blobs(layout)
    for e, expert in enumerate(experts):
        write_expert(layout, gate_up, down, e, expert)
    return experts, gate_up, down


def bits(tensor):
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(a, b):
    for name in ("codes", "scales", "zeros"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        assert x is None or (x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))), name


# -- a literal implementation of the description: one weight at a time, from bytes -------------------------------------


def code_at(layout, place, panel, row, k):
    """The bits of the weight at (row of the panel, input k), read from the panel's bytes."""
    per = layout.kind.per_word
    tile, unit, j = k // (16 * per), k // per % 16, k % per
    at = tile * 1024 + unit * 64 + row * 4
    word = int.from_bytes(panel[at : at + 4], "little")
    if per == 8:
        return word >> (4 * (j // 2) + (16 if j % 2 else 0)) & 15
    return word >> (32 // per * j) & ((1 << 32 // per) - 1)


def stored(codes, fmt, n, k):
    """The bits of the same weight, read from the row-major codes."""
    if fmt.bits == 4:
        return int(codes[n, k // 2]) >> (4 if k % 2 else 0) & 15
    return int.from_bytes(bytes(bits(codes[n, k].reshape(1)).tolist()), "little")


@pytest.mark.parametrize("name", EACH)
def test_every_bit_is_where_the_description_says(name):
    layout = layout_of(name, E=2, H=64, I=32) if name == "mxfp4" else layout_of(name)
    fmt = layout.kind
    experts, gate_up, down = packed(layout)
    for which, blob, matrices in (("gate_up", gate_up, ("gate", "up")), ("down", down, ("down",))):
        (place,) = layout.matrices(which)
        data = bytes(blob.tolist())
        assert len(data) == layout.nbytes(which) and place.panel_bytes % 64 == 0
        for e, expert in enumerate(experts):
            for part, matrix in enumerate(matrices):
                begin = place.offset + e * place.expert_stride + place.parts[part]
                literal(layout, place, fmt, getattr(expert, matrix), data[begin:])


def literal(layout, place, fmt, matrix, data):
    tiles = -(-place.inputs // (16 * fmt.per_word))
    for n in range(-(-place.rows // 16) * 16):
        panel, row = data[n // 16 * place.panel_bytes :][: place.panel_bytes], n % 16
        for k in range(tiles * 16 * fmt.per_word):
            inside = n < place.rows and k < place.inputs
            assert code_at(layout, place, panel, row, k) == (stored(matrix.codes, fmt, n, k) if inside else 0)
        if matrix.scales is None:
            continue
        size = layout.scale_dtype.itemsize
        for g in range(place.groups):
            at = tiles * 1024 + (g if name_is_block(fmt) else g * 16 + row) * size
            scale = matrix.scales[n // 128 if name_is_block(fmt) else n, g] if n < place.rows else None
            wanted = bytes(bits(scale.reshape(1)).tolist()) if scale is not None else bytes(size)
            assert panel[at : at + size] == wanted or (name_is_block(fmt) and n >= place.rows)
            if fmt.zeros:
                at = tiles * 1024 + place.groups * 16 * size + g * 8 + row % 8
                zero = int(matrix.zeros[n, g]) if n < place.rows else 0
                assert panel[at] >> (4 if row >= 8 else 0) & 15 == zero


def name_is_block(fmt):
    return fmt.name == "fp8_block"


# -- round trips -------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    name = draw(st.sampled_from(EACH))
    fmt = FORMATS[name]
    if fmt.bits == 4:
        group = 32 if name == "mxfp4" else draw(st.sampled_from([8, 16, 24, 128]))
        H, I = (group * draw(st.integers(1, 3)) for _ in range(2))
        step = group
    else:
        group = {"int8": draw(st.sampled_from([None, 8])), "fp8_block": 128}.get(name)
        H, I = draw(st.integers(1, 300)), draw(st.integers(1, 300))
        if name == "int8" and group:
            H, I = -(-H // 8) * 8, -(-I // 8) * 8
        step = group or draw(st.sampled_from([1, 16]))
    parts = draw(st.integers(1, 9))
    scale = draw(st.sampled_from(fmt.scales)) if fmt.scales else None
    return Layout(name, draw(st.integers(1, 3)), H, I, group, scale, cuts(I, parts, step))


@given(layouts())
def test_codes_survive_writing_and_reading_in_any_layout_bit_for_bit(layout):
    experts, gate_up, down = packed(layout)
    for e, expert in enumerate(experts):
        back = read_expert(layout, gate_up, down, e)
        for matrix in ("gate", "up", "down"):
            same(getattr(back, matrix), getattr(expert, matrix))


@given(layouts())
def test_a_layout_survives_conversion_to_text_and_back(layout):
    assert Layout.parse(layout.text) == layout
    assert Layout.parse(layout.text).text == layout.text


@given(layouts())
def test_slices_and_experts_follow_one_another_without_overlap(layout):
    for which in ("gate_up", "down"):
        end = 0
        for place in layout.matrices(which):
            assert place.offset >= end and (layout.partitions == 1 or place.offset % 4096 == 0)
            assert place.offset - end < 4096
            assert place.expert_stride == len(place.parts) * place.panels * place.panel_bytes
            assert place.expert_stride % 64 == 0
            end = place.offset + place.expert_stride * layout.num_experts
        assert end == layout.nbytes(which)
    assert layout.nbytes() == layout.nbytes("gate_up") + layout.nbytes("down")


# -- numbers -----------------------------------------------------------------------------------------------------------


def value(fmt, bits_):
    """The value of a code by the format's definition."""
    if fmt.name in ("int4", "int8"):
        half = 1 << (fmt.bits - 1)
        return bits_ - 2 * half if bits_ >= half else bits_
    if fmt.name == "int4_asym":
        return bits_
    sign = -1.0 if bits_ >> (fmt.bits - 1) else 1.0
    exponent_bits, mantissa_bits, bias = (2, 1, 1) if fmt.name == "mxfp4" else (4, 3, 7)
    exponent = bits_ >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = (bits_ & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return sign * (mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))


@pytest.mark.parametrize("name", [n for n in EACH if FORMATS[n].scales])
def test_every_code_has_the_value_that_its_format_defines(name):
    fmt = FORMATS[name]
    every = torch.arange(256, dtype=torch.uint8)
    if name == "fp8_block":
        every = every[every & 127 != 127]
    codes = every.view(1, -1)
    inputs = codes.shape[1] * fmt.per_code
    scales = torch.full((1, -(-inputs // 128)), 0.75) if name == "fp8_block" else torch.full((1, 1), 0.75)
    factor, zeros = 0.75, None
    if name == "mxfp4":
        scales, factor = torch.full((1, 1), 124, dtype=torch.uint8), 2.0**-3
    if fmt.zeros:
        zeros = torch.full((1, 1), 5, dtype=torch.uint8)
    numbers = decode(fmt, Codes(codes.view(fmt.codes), scales, zeros), torch.float64)[0].tolist()
    code_list = from_nibbles(every).tolist() if fmt.bits == 4 else every.tolist()
    assert numbers == [(value(fmt, c) - (5 if fmt.zeros else 0)) * factor for c in code_list]


@pytest.mark.parametrize("exponent", [0, 1, 127, 252])
def test_scales_of_mxfp4_are_powers_of_two_down_to_the_smallest(exponent):
    matrix = Codes(torch.full((1, 16), 0x21, dtype=torch.uint8), torch.full((1, 1), exponent, dtype=torch.uint8))
    for dtype in (torch.float32, torch.float64):
        numbers = decode(FORMATS["mxfp4"], matrix, dtype)[0, :2].double().tolist()
        assert numbers == [0.5 * 2.0 ** (exponent - 127), 2.0 ** (exponent - 127)]


@pytest.mark.parametrize("name", EACH)
def test_unpacked_weights_are_code_times_scale_rounded_once(name):
    layout = layout_of(name, H=64, I=96, borders=(0, 96))
    experts, gate_up, down = packed(layout)
    exact = unpack(layout, gate_up, down, torch.float64)
    assert exact[0].shape == (2, 192, 64) and exact[1].shape == (2, 64, 96)
    for e, expert in enumerate(experts):
        whole = [decode(layout.kind, m, torch.float64) for m in (expert.gate, expert.up, expert.down)]
        assert torch.equal(exact[0][e], torch.cat(whole[:2])) and torch.equal(exact[1][e], whole[2])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert all(torch.equal(a, b.to(dtype)) for a, b in zip(unpack(layout, gate_up, down, dtype), exact))
    one = unpack_expert(layout, gate_up, down, 1)
    assert torch.equal(torch.cat(one[:2]), exact[0][1].float()) and torch.equal(one[2], exact[1][1].float())


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_slices_together_hold_the_whole_matrix(name, parts):
    step = {"int4": 8, "int4_asym": 8, "mxfp4": 32, "fp8_block": 128}.get(name, 1)
    size = 3 * step + (5 if name in ("fp32", "bf16", "int8", "fp8_block") else 0)
    H = 96
    whole = layout_of(name, H=H, I=size)
    experts, gate_up, down = packed(whole)
    cut = layout_of(name, H=H, I=size, borders=cuts(size, parts, step))
    sliced = blobs(cut)
    for e, expert in enumerate(experts):
        write_expert(cut, *sliced, e, expert)
    for a, b in zip(unpack(whole, gate_up, down), unpack(cut, *sliced)):
        assert torch.equal(a, b)


# -- cuts and texts ----------------------------------------------------------------------------------------------------


def test_cuts_are_multiples_of_the_group_size_and_the_first_slices_are_longer():
    assert cuts(2048, 3, 32) == (0, 22 * 32, 43 * 32, 2048)
    assert cuts(100, 3, 16) == (0, 48, 80, 100)
    assert cuts(64, 4, 32) == (0, 32, 64, 64, 64)
    assert cuts(7, 1, 1) == (0, 7)


def test_the_text_of_a_layout():
    layout = Layout("int4", 64, 1024, 512, 32, torch.bfloat16, (0, 256, 512))
    assert layout.text == "int4:64x1024x512:g32:bf16:0,256,512"
    assert Layout("fp32", 2, 5, 3, None, None, (0, 3)).text == "fp32:2x5x3:row:-:0,3"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("int5:64x1024x512:g32:bf16:0,512", "format='int5' is unknown; known: fp32, bf16, int8"),
        ("int4:64x1024x512:g32:0,512", "is not a layout; an example is"),
        ("int4:64x1024x512:g32:fp17:0,512", "is not a layout"),
        ("int4:64x1024x512:g24:bf16:0,512", "group_size=24 does not divide 1024 and 512"),
        ("int4:64x1024x512:row:bf16:0,512", "group_size=None does not divide"),
        ("mxfp4:64x1024x512:g64:e8m0:0,512", "group_size=64, but mxfp4 has group_size=32"),
        ("bf16:64x1024x512:g32:-:0,512", "group_size=32, but bf16 has group_size=None"),
        ("int4:64x1024x512:g32:e8m0:0,512", "int4 has no scales in torch.uint8"),
        ("int4:64x1024x512:g32:bf16:0,500", "cuts=(0, 500) do not rise from 0 to 512"),
        ("int4:64x1024x512:g32:bf16:0,48,512", "not multiples of the group size 32"),
        ("int4:0x1024x512:g32:bf16:0,512", "num_experts=0, expected at least 1"),
    ],
)
def test_the_error_for_a_wrong_text_names_the_mistake(text, says):
    with pytest.raises(ValueError) as error:
        Layout.parse(text)
    assert says in str(error.value)


def test_the_error_for_an_unknown_blob_lists_both_blobs():
    with pytest.raises(ValueError, match="unknown blob 'up'; known: 'gate_up' and 'down'"):
        layout_of("bf16").matrices("up")
