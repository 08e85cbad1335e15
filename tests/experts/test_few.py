"""Few routes per expert: codes are multiplied as they arrive from memory (csrc/experts/few_rows)."""

import pytest
import torch

from goldsmith import Op, assay, experts
from goldsmith.assay.declare.case import Case
from goldsmith.cli.targets import op_target
from goldsmith.experts.moe.cases import inputs as moe_inputs
from goldsmith.experts.slots.cases import inputs

MOST = 4  # most routes of an expert on this path with AVX-512; 2 without it
GROUPS = {"int4": 32, "int4_asym": 8, "int8_groups": 24}
ODD = {"": (37, 21), "fp32": (35, 19), "bf16": (141, 79), "int8": (139, 67), "fp8_block": (141, 130)}
FORMATS = ("", "fp32", "bf16", "int8", "int8_groups", "int4", "int4_asym", "mxfp4", "fp8_block")


def case(format, T, make=inputs, **more):
    """T routes to one expert of two, with odd sizes if the format allows them."""
    H, I = ODD.get(format, (192, 96))
    group = GROUPS.get(format)
    packed = {"packed": format.removesuffix("_groups"), **({"group": group} if group else {})} if format else {}
    return Case(f"{format}_{T}", make, dict(T=T, H=H, I=I, E=2, k=1, kind="one", **packed, **more), "few routes")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("format", FORMATS)
def test_few_routes_stay_within_the_bounds(format):
    target = op_target(Op.get("experts.slots"), "native")
    for T in range(1, MOST + 2):
        for dtype in (torch.float32, torch.bfloat16):
            assay.check(target, case(format, T), dtype=dtype, probes=("values", "poison", "guard"))


@pytest.mark.parametrize("format", FORMATS[1:])
def test_gradients_of_few_routes_stay_within_the_bounds(format):
    target = op_target(Op.get("experts.moe"), "native")
    for T in range(1, MOST + 1):
        dtype = torch.bfloat16 if T % 2 else torch.float32
        assay.check(target, case(format, T, moe_inputs, on=()), dtype=dtype, probes=("values", "poison", "guard"))


def test_slices_and_lora_with_few_routes_stay_within_the_bounds():
    target = op_target(Op.get("experts.slots"), "native")
    for T in (1, 3):
        assay.check(target, case("int4", T, partitions=3, r=17, bias=True), dtype=torch.bfloat16, probes=("values",))
    whole = op_target(Op.get("experts.moe"), "native")
    few = case("int4", 3, moe_inputs, partitions=3, r=17, bias=True)
    assay.check(whole, few, dtype=torch.float32, probes=("values",))


@pytest.mark.parametrize("format", ["bf16", "int4", "int8"])
def test_a_row_has_the_same_bits_with_and_without_other_rows_of_its_expert(format):
    torch.manual_seed(0)
    H, I = 192, 96
    base = experts.pack(torch.randn(2, 2 * I, H), torch.randn(2, H, I), format=format)
    x = torch.randn(2, H).bfloat16()
    ids = torch.ones(2, 1, dtype=torch.int64)
    together = experts.slots(x, ids, base)
    for t in range(2):
        assert torch.equal(experts.slots(x[t : t + 1], ids[:1], base)[0], together[t])
