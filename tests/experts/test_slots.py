"""experts.slots: its results, and the tensors `out` and `flags` that receive them."""

import pytest
import torch

from experts.defaults import check
from goldsmith import ShapeError, experts

E, H, I, T, K = 3, 8, 6, 5, 2


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def call():
    ids = torch.rand(T, E).topk(K).indices
    ids[1, 0] = -1
    return torch.randn(T, H), ids, (torch.randn(E, 2 * I, H), torch.randn(E, H, I))


def test_one_slot_with_weight_one_equals_moe():
    x, ids, base = call()
    o = experts.slots(x, ids[:, :1], base, backend="reference")
    assert torch.equal(o[:, 0], experts.moe(x, ids[:, :1], torch.ones(T, 1), base, backend="reference"))
    assert not o[1].any()


def test_rows_and_flags_are_written_to_out_and_flags():
    x, ids, base = call()
    x[3, 2] = torch.nan
    out, flags = torch.full((T, K, H), 7.0), torch.full((T, K), 9, dtype=torch.uint8)
    o = experts.slots(x, ids, base, out=out, flags=flags)
    assert o is out and torch.equal(out.nan_to_num(), experts.slots(x, ids, base).nan_to_num())
    wanted = torch.zeros(T, K, dtype=torch.uint8)
    wanted[3] = 1
    assert torch.equal(flags, wanted)


def test_rows_are_float32_for_16_bit_inputs():
    x, ids, base = call()
    assert experts.slots(x.bfloat16(), ids, base).dtype == torch.float32


def test_dropout_is_never_applied():
    x, ids, base = call()
    lora = experts.LoRA(E, H, I, dropout=0.9)
    torch.nn.init.normal_(lora.gate_b)
    with torch.no_grad():
        state = torch.random.get_rng_state()
        training = experts.slots(x, ids, base, lora=lora)
        assert torch.equal(state, torch.random.get_rng_state())
        assert torch.equal(training, experts.slots(x, ids, base, lora=lora.eval()))


def test_inputs_that_require_a_gradient_are_refused():
    x, ids, base = call()
    with pytest.raises(ValueError, match="experts.slots: has no gradient; call it under torch.no_grad"):
        experts.slots(x.requires_grad_(), ids, base)


WRONG = {
    "shape": (dict(out=torch.empty(T, H)), ShapeError, r"out is \[5, 8\], expected \[5, 2, 8\]"),
    "dtype": (dict(flags=torch.empty(T, K)), TypeError, "flags is float32, expected one of: uint8"),
    "strides": (dict(out=torch.empty(T, H, K).mT), ValueError, "out is not contiguous"),
    "kind": (dict(out=[0.0]), TypeError, "out is a list, expected a torch.Tensor"),
}


@pytest.mark.parametrize("more, kind, text", WRONG.values(), ids=list(WRONG))
def test_a_wrong_out_or_flags_is_refused(more, kind, text):
    with pytest.raises(kind, match=text):
        experts.slots(*call(), **more)


def test_results_do_not_depend_on_torchs_defaults():
    torch.manual_seed(0)
    x, ids, (gate_up, down) = call()
    x = x.bfloat16()

    def work(_):
        base = experts.pack(gate_up, down, format="bf16")
        o = torch.full((T, K, H), 7.0, dtype=torch.float32, device="cpu")
        flags = torch.full((T, K), 9, dtype=torch.uint8, device="cpu")
        rows = [
            experts.slots(x, ids, base),
            experts.slots(x, ids, base, out=o),
            experts.slots(x, ids, base, flags=flags),
        ]
        return rows, flags

    check(work)
