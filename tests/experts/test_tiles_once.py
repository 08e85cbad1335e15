"""With up to 32 rows, an expert uses each weight tile once: tiles are decoded just in time, into a few buffers."""

import pytest
import torch

from goldsmith import experts
from goldsmith.core import native

REASON = native.reason() or (None if native.isa() == "amx" else f"needs level amx; this machine's is {native.isa()}")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"native: {REASON}")
H, I = 288, 160  # nine and five steps of 32: more than there are buffers
FORMATS = ("bf16", "int4", "int4_asym", "int8", "mxfp4", "fp8_block")


def step(base, lora, rows, tokens):
    """y, dx and dw of the first tokens; they do not depend on the other tokens."""
    x, weights, dy = (t[:tokens].clone() for t in rows)
    x.requires_grad_(), weights.requires_grad_()
    y = experts.moe(x, torch.zeros(tokens, 1, dtype=torch.int64), weights, base, lora=lora, backend="native")
    return y.detach(), *torch.autograd.grad(y, [x, weights], dy)


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [9, 20, 32])
def test_a_row_has_the_same_bits_as_with_so_many_rows_that_tiles_are_reused(format, partitions, tokens):
    torch.manual_seed(0)
    group = 32 if format.startswith("int4") else None
    gate_up, down = torch.randn(1, 2 * I, H), torch.randn(1, H, I)
    base = experts.pack(gate_up, down, format=format, group_size=group, partitions=partitions)
    lora = experts.LoRA(1, H, I, rank=4)
    for factor in lora.parameters():
        torch.nn.init.normal_(factor)
    rows = torch.randn(80, H).bfloat16(), torch.rand(80, 1), torch.randn(80, H).bfloat16()
    for alone, among in zip(step(base, lora, rows, tokens), step(base, lora, rows, 80), strict=True):
        assert alone.isfinite().all() and alone.count_nonzero() > 0
        assert torch.equal(alone, among[:tokens])
