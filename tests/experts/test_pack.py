"""Quantisation, bit for bit, against a literal implementation in numpy, one number at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from goldsmith.experts import pack
from goldsmith.experts.packed.formats import E2M1, FORMATS, decode, from_nibbles
from goldsmith.experts.packed.quantisation import quantise

F = np.float32
SCALED = [name for name in FORMATS if FORMATS[name].scales]


def rounded(number, dtype):
    """A float32 rounded to a stored dtype and back: bfloat16 through its bits, float16 through numpy."""
    if dtype == torch.bfloat16:
        bits = int(F(number).view(np.uint32))
        bits += 0x7FFF + (bits >> 16 & 1)
        return np.uint32(bits >> 16 << 16).view(F)
    return F(np.float16(number)) if dtype == torch.float16 else F(number)


def rne(number):
    return round(float(number))  # Python rounds ties to even


def clamp(number, low, high):
    return min(max(number, low), high)


def literal_group(name, w, dtype):
    """(numbers, scale, zero) of one group of float32 weights."""
    amax = max(abs(x) for x in w)
    if name == "mxfp4":
        if amax == 0:
            return [0.0] * len(w), 0, None
        e = clamp(math.floor(math.log2(amax)) - 2 + 127, 0, 254)
        table = sorted({abs(v) for v in E2M1})
        numbers = []
        for x in w:
            size = min(abs(float(x)) / 2.0 ** (e - 127), 6.0)
            near = min(range(8), key=lambda c: (abs(table[c] - size), c % 2))  # a tie goes to the even code
            numbers.append(math.copysign(table[near], x) * 2.0 ** (e - 127))
        return numbers, e, None
    if name == "int4_asym":
        low, high = min(min(w), F(0)), max(max(w), F(0))
        s = rounded(F(high - low) / F(15), dtype)
        if s == 0:
            return [0.0] * len(w), s, 0
        z = clamp(rne(-low / s), 0, 15)
        return [(clamp(rne(x / s) + z, 0, 15) - z) * float(s) for x in w], s, z
    largest, least = (127, -127) if name == "int8" else (7, -8)
    s = rounded(amax / F(largest), dtype)
    if s == 0:
        return [0.0] * len(w), s, None
    return [clamp(rne(x / s), least, largest) * float(s) for x in w], s, None


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.5, 3.5, 5.0, 0.25, 0.75, 1e-8, -1e-8, 1e-30, 1e-40, -448.0, 6.0, 7.0, -7.0, 127.0]


def drawn_weights(seed, size):
    """Numbers of many magnitudes, some of them special: exact ties, zeros, subnormals."""
    random = np.random.default_rng(seed)
    w = random.normal(size=size) * 2.0 ** random.integers(-20, 8)
    special = random.choice(SPECIAL, size=size) * 2.0 ** random.integers(-3, 4)
    return torch.tensor(np.where(random.random(size) < random.choice([0, 0.5, 1]), special, w), dtype=torch.float32)


@settings(max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from([n for n in SCALED if n != "fp8_block"]), st.integers(0, 2))
def test_codes_scales_and_zeros_follow_the_definition(seed, name, which):
    fmt = FORMATS[name]
    dtype = fmt.scales[which % len(fmt.scales)]
    group = 32 if name == "mxfp4" else 8
    w = drawn_weights(seed, (2, 2 * group))
    codes = quantise(fmt, w, group, dtype, "here")
    numbers = decode(fmt, codes, torch.float64)
    for row in range(2):
        for g in range(2):
            part = w[row, g * group : (g + 1) * group].numpy()
            expected, s, z = literal_group(name, part, dtype)
            assert float(codes.scales[row, g]) == float(s)
            assert z is None or int(codes.zeros[row, g]) == z
            assert numbers[row, g * group : (g + 1) * group].tolist() == expected


def test_codes_come_from_a_division_with_ties_to_even():
    """s = 3: 7.5 / 3 is a tie, but 7.5 * (1 / 3) in float32 is above it."""
    w = torch.tensor([[381.0, 7.5, 4.5, -7.5, 10.5, 16.5, -13.5, 0.0]])
    codes = quantise(FORMATS["int8"], w, 8, torch.float32, "here")
    assert codes.scales.item() == 3 and codes.codes.tolist() == [[127, 2, 2, -2, 4, 6, -4, 0]]
    w[0, 0] = 21
    codes = quantise(FORMATS["int4"], w.clamp(-21, 21), 8, torch.float32, "here")
    assert from_nibbles(codes.codes).tolist() == [[7, 2, 2, 14, 4, 6, 12, 0]]


def test_the_error_for_an_overflow_gives_its_row_in_the_whole_matrix():
    """Matrices are quantised in chunks of rows."""
    w = torch.ones(300, 4096)
    w[299, 5] = 3.4e38
    with pytest.raises(ValueError, match=r"^here row 299, input 5: 3.4e\+38 overflows bfloat16"):
        quantise(FORMATS["bf16"], w, None, None, "here")
    with pytest.raises(ValueError, match=r"^here row 299, group 0: its scale .* overflows fp16"):
        quantise(FORMATS["int8"], w, 128, torch.float16, "here")


def test_fp8_blocks_have_a_scale_per_128_x_128_also_at_the_edges():
    w = torch.randn(130, 257)
    w[:128, 128:256] = 0
    codes = quantise(FORMATS["fp8_block"], w, 128, torch.float32, "here")
    assert codes.scales.shape == (2, 3) and codes.scales[0, 1] == 0 and codes.codes.dtype == torch.float8_e4m3fn
    table = decode_e4m3()
    for rows, columns in (
        (slice(0, 128), slice(0, 128)),
        (slice(128, 130), slice(256, 257)),
        (slice(0, 128), slice(256, 257)),
    ):
        block = w[rows, columns]
        s = block.abs().max() / 448
        assert codes.scales[rows.start // 128, columns.start // 128] == s
        for x, code in zip((block / s).flatten().tolist(), codes.codes[rows, columns].float().flatten().tolist()):
            near = min(table, key=lambda entry: (abs(entry[0] - abs(x)), entry[1] % 2))
            assert abs(code) == near[0] and (code == 0 or (code < 0) == (x < 0))
    zero = codes.codes[:128, 128:256].contiguous().view(torch.uint8)
    assert not zero.any()


def decode_e4m3():
    """(value, code) of every non-negative finite E4M3 code."""
    table = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        table.append((mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7), code))
    return table


@pytest.mark.parametrize(
    ("name", "w"), [(n, w) for n in SCALED for w in (0.0, -0.0, 1e-45) if n != "mxfp4" or w == 0]
)  # an E8M0 scale can be smaller than every float32
def test_a_group_whose_scale_is_0_has_codes_0_and_is_exactly_0(name, w):
    fmt = FORMATS[name]
    matrix = torch.full((3, 128), w)
    codes = quantise(fmt, matrix, fmt.group or 128, fmt.scales[-1] if name != "int4_asym" else torch.float16, "here")
    assert not codes.codes.view(torch.uint8).any() and not codes.scales.float().any()
    assert codes.zeros is None or not codes.zeros.any()
    assert decode(fmt, codes).eq(0).all()


def test_mxfp4_reaches_its_smallest_scale_and_saturates():
    w = torch.zeros(1, 32)
    w[0, :3] = torch.tensor([2.0**-127, 2.0**-128, 2.0**-130])
    codes = quantise(FORMATS["mxfp4"], w, 32, torch.uint8, "here")
    assert codes.scales.item() == 0 and from_nibbles(codes.codes)[0, :3].tolist() == [2, 1, 0]
    w[0, :3] = torch.tensor([7.9, -7.9, 4.0])
    codes = quantise(FORMATS["mxfp4"], w, 32, torch.uint8, "here")
    assert codes.scales.item() == 127 and from_nibbles(codes.codes)[0, :3].tolist() == [7, 15, 6]


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_in_16_bits_quantise_like_their_float32_values(name, source):
    fmt = FORMATS[name]
    w = torch.randn(2000, 384).to(source)  # more than one chunk
    a, b = (quantise(fmt, x, fmt.group, fmt.scales[0], "here") for x in (w, w.float()))
    for x, y in ((a.codes, b.codes), (a.scales, b.scales)):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("fp32", "bf16")])
def test_packing_equals_quantising_each_matrix(name):
    fmt = FORMATS[name]
    gate_up, down = torch.randn(3, 256, 128), torch.randn(3, 128, 128)
    base = pack(gate_up, down, format=name)
    both, back = base.unpack(torch.float64)
    for e in range(3):
        for matrix, value in ((gate_up[e, :128], both[e, :128]), (gate_up[e, 128:], both[e, 128:]), (down[e], back[e])):
            codes = quantise(fmt, matrix, fmt.group, fmt.scales[0], "here")
            assert torch.equal(decode(fmt, codes, torch.float64), value)


def test_fp32_is_stored_exactly_and_bf16_is_rounded_to_nearest_even():
    gate_up, down = torch.randn(2, 10, 7), torch.randn(2, 7, 5)
    assert all(torch.equal(a, b) for a, b in zip(pack(gate_up, down, format="fp32").unpack(), (gate_up, down)))
    both, back = pack(gate_up, down).unpack()
    assert torch.equal(back, down.to(torch.bfloat16).float())
    assert both.flatten().tolist() == [float(rounded(F(x), torch.bfloat16)) for x in gate_up.flatten().tolist()]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("H", "I"), [(128, 128), (512, 128), (128, 640)])
def test_bytes_stay_within_two_percent_of_the_payload(name, H, I):
    E, fmt = 64, FORMATS[name]
    base = pack(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I), format=name)
    payload = 3 * E * H * I * fmt.bits / 8
    if name == "fp8_block":
        payload += 3 * E * (H / 128) * (I / 128) * 4
    elif fmt.scales:
        groups = sum(rows * inputs / (fmt.group or inputs) for rows, inputs in ((2 * I, H), (H, I)))
        payload += E * groups * (fmt.scales[0].itemsize + (0.5 if fmt.zeros else 0))
    assert payload <= base.nbytes <= payload * 1.02 + 65536
    assert base.nbytes == base.layout.nbytes() == base.gate_up.numel() + base.down.numel()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("H", "I"), [(128, 1408), (40, 200), (48, 768)])
def test_slices_add_no_more_bytes_than_documented(name, H, I):
    """A slice adds 72 bytes per row of down, two pages, and 16 rows of gate and up unless cut at a multiple of 16."""
    E, group = 2, 8 if FORMATS[name].bits <= 8 and not FORMATS[name].fixed else None
    if name == "mxfp4" and (H % 32 or I % 32):
        H, I = H // 32 * 32, I // 32 * 32
    whole = pack(torch.zeros(E, 2 * I, H), torch.zeros(E, H, I), format=name, group_size=group)
    for n in (2, 3, 7, 11, 50, 300):
        base = whole.partition(n)
        allowed = 0
        for begin, end, place in zip(base.layout.cuts, base.layout.cuts[1:], base.layout.matrices("gate_up")):
            rows = 2 * place.panel_bytes if begin % 16 or end % 16 else 0
            allowed += (begin < end) * (E * (72 * -(-H // 16) * 16 + rows) + 2 * 4096)
        assert whole.nbytes <= base.nbytes <= whole.nbytes + allowed, n
