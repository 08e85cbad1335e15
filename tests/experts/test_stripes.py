"""dx with many routes per expert, for which codes are decoded once (csrc/experts/arithmetic)."""

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
LEVELS = ("scalar", "avx2", "avx512")  # each has its own decoding and transpose
# format: (H, I, group): sizes and groups that end inside a tile, more outputs than stripes hold
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


def check_case(case):
    target = op_target(Op.get("experts.moe"), "native")
    assay.check(target, case, dtype=torch.float32, probes=("values", "poison", "guard"))


@pytest.mark.parametrize("format", SIZES)
def test_gradients_of_many_routes_stay_within_the_bounds(level, format):
    H, I, group = SIZES[format]
    packed = {"packed": format.removesuffix("_groups"), "group": group} if format else {}
    sizes = dict(T=7, H=H, I=I, E=2, k=1, kind="one", on=("down",), **packed)
    check_case(Case(format or "plain", inputs, sizes, "too many routes for the path that multiplies codes directly"))


def every_code(make, H, I):
    """A base with every finite E4M3 value, also the subnormal ones, which random weights rarely contain."""

    def projection(out, width):
        codes = torch.arange(out * width, dtype=torch.int32).view(1, out, width) * 37 % 256
        codes = torch.where(codes % 128 == 127, 3, codes).to(torch.uint8).view(torch.float8_e4m3fn)
        return codes, torch.full((1, -(-out // 128), -(-width // 128)), 2.0**-9)

    base = from_fp8_block(projection(I, H), projection(I, H), projection(H, I))
    arguments = inputs(make, T=7, H=H, I=I, E=1, k=1, on=(), packed="fp8_block")
    return arguments | {"gate_up": base.gate_up, "down": base.down, "layout": base.layout.text}


def test_every_e4m3_value_is_decoded_forward_and_backward(level):
    check_case(Case("every_code", every_code, {"H": 72, "I": 40}, "subnormal E4M3 values have their own branch"))
