"""dx of so many routes an expert that codes are taken apart once for all of them (csrc/experts/weights.h)."""

import pytest
import torch

from goldsmith import Op, assay
from goldsmith.assay.declare.case import Case
from goldsmith.cli.targets import op_target
from goldsmith.core import native
from goldsmith.experts import from_fp8_block
from goldsmith.experts.moe.cases import inputs

REASON = native.reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"native: {REASON}")
LEVELS = ("scalar", "avx2", "avx512")  # each has decoding and a transpose of its own
# format: (H, I, group): sizes that end within a tile, groups that end within one, more outputs than stripes hold
SIZES = {
    "": (69, 37, None), "fp32": (69, 37, None), "bf16": (141, 79, None), "int8": (139, 147, None),
    "int8_groups": (168, 144, 24), "int4": (208, 176, 16), "int4_asym": (152, 136, 8), "mxfp4": (160, 96, None),
    "fp8_block": (141, 147, None),
}  # fmt: skip


@pytest.fixture(params=LEVELS)
def level(request):
    """The library at a level, if the machine has it."""
    wanted, before = LEVELS.index(request.param), native.library().gs_level()
    if wanted > before:
        pytest.skip(f"this machine has {native.isa()}")
    native.check(native.library().gs_set_level(wanted))
    yield request.param
    native.check(native.library().gs_set_level(before))


def held(case):
    target = op_target(Op.get("experts.moe"), "native")
    assay.check(target, case, dtype=torch.float32, probes=("values", "poison", "guard"))


@pytest.mark.parametrize("format", SIZES)
def test_gradients_of_many_routes_keep_the_bounds(level, format):
    H, I, group = SIZES[format]
    packed = {"packed": format.removesuffix("_groups"), "group": group} if format else {}
    sizes = dict(T=7, H=H, I=I, E=2, k=1, kind="one", on=("down",), **packed)
    held(Case(format or "plain", inputs, sizes, "more routes than are multiplied with codes as they come"))


def every_code(make, H, I):
    """A base of all numbers that E4M3 has, those below its normal ones too: of weights that are drawn few are."""

    def projection(out, width):
        codes = torch.arange(out * width, dtype=torch.int32).view(1, out, width) * 37 % 256
        codes = torch.where(codes % 128 == 127, 3, codes).to(torch.uint8).view(torch.float8_e4m3fn)
        return codes, torch.full((1, -(-out // 128), -(-width // 128)), 2.0**-9)

    base = from_fp8_block(projection(I, H), projection(I, H), projection(H, I))
    given = inputs(make, T=7, H=H, I=I, E=1, k=1, on=(), packed="fp8_block")
    return given | {"gate_up": base.gate_up, "down": base.down, "layout": base.layout.text}


def test_every_number_of_e4m3_is_read_forward_and_backward(level):
    held(Case("every_code", every_code, {"H": 72, "I": 40}, "numbers below E4M3's normal ones are their own branch"))
