"""experts.LoRA: its parameters, scales and initial values, and merging into weights."""

import copy
import math

import pytest
import torch

from goldsmith import ShapeError, assay, experts

E, H, I = 3, 8, 6


def make(**options):
    return experts.LoRA(E, H, I, **options)


def test_parameters_have_the_shapes_that_moe_expects():
    lora = make(rank={"gate": 1, "up": 2, "down": 5}, alpha={"gate": 1, "up": 2, "down": 3})
    shapes = {name: tuple(p.shape) for name, p in lora.named_parameters()}
    assert shapes == {
        "gate_a": (E, 1, H), "gate_b": (E, I, 1), "up_a": (E, 2, H), "up_b": (E, I, 2),
        "down_a": (E, 5, I), "down_b": (E, H, 5),
    }  # fmt: skip
    assert lora.num_parameters() == sum(math.prod(s) for s in shapes.values())


def test_a_projection_outside_targets_has_no_parameters():
    lora = make(targets=("down", "gate"))
    assert lora.up_a is None and lora.up_b is None and list(lora.factors()) == ["gate", "down"]
    assert set(lora.state_dict()) == {"gate_a", "gate_b", "down_a", "down_b"}


def test_a_new_lora_has_gradients_in_b_only():
    lora, x, ids = make(), torch.randn(5, H), torch.randint(0, E, (5, 2))
    base = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    y = experts.moe(x, ids, torch.rand(5, 2), base, lora=lora)
    y.sum().backward()
    assert all(p.grad.any() == name.endswith("_b") for name, p in lora.named_parameters())


def test_matrix_a_of_a_new_lora_is_uniform_within_one_over_the_root_of_its_inputs():
    lora = experts.LoRA(64, 16, 400, rank=8)
    for a in (lora.gate_a, lora.up_a, lora.down_a):
        bound = a.shape[-1] ** -0.5
        assert 0.99 * bound < a.max() <= bound and -bound <= a.min() < -0.99 * bound
    assert not (lora.gate_b.any() or lora.up_b.any() or lora.down_b.any())


@pytest.mark.parametrize("rslora, wanted", [(False, 4.0), (True, 8.0)])
def test_scales_follow_rank_and_alpha(rslora, wanted):
    lora = make(rank={"gate": 4, "up": 4, "down": 1}, alpha=16, rslora=rslora)
    assert lora.scaling == {"gate": wanted, "up": wanted, "down": 16.0}


def test_a_shared_a_is_one_parameter_and_stays_one():
    lora = make(shared_a=True, rank=2)
    assert lora.up_a is lora.gate_a and lora.num_parameters() == 2 * E * (2 * H + 3 * I)
    lora.to(torch.float64)
    other = copy.deepcopy(lora)
    assert lora.up_a is lora.gate_a and other.up_a is other.gate_a and lora.gate_a.dtype == torch.float64
    fresh = make(shared_a=True, rank=2)
    fresh.load_state_dict(lora.state_dict())
    assert fresh.up_a is fresh.gate_a and torch.equal(fresh.up_a, lora.gate_a.float())


def test_dropout_is_on_only_in_training_and_draws_one_number_per_call():
    lora = make(dropout=0.5)
    x, ids, w = torch.randn(5, H), torch.randint(0, E, (5, 2)), torch.rand(5, 2)
    base = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    with torch.no_grad():
        lora.gate_b.normal_()

    def after(mode):
        lora.train(mode)
        torch.manual_seed(3)
        y = experts.moe(x, ids, w, base, lora=lora)
        return y, torch.random.get_rng_state()

    trained, moved = after(True)
    again, _ = after(True)
    still, unmoved = after(False)
    torch.manual_seed(3)
    assert torch.equal(unmoved, torch.random.get_rng_state())
    torch.randint(-(2**63), 2**63 - 1, ())
    assert torch.equal(moved, torch.random.get_rng_state())
    assert torch.equal(trained, again) and not torch.equal(trained, still)


@assay.case(E=[3], H=[8], I=[6], why="all three projections")
def weights(make, E, H, I):
    return {"gate_up": make.normal(E, 2 * I, H), "down": make.normal(E, H, I)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_weights_are_w_plus_scaled_ba(dtype):
    lora = make(rank=2, alpha=3)
    with torch.no_grad():
        for p in lora.parameters():
            p.normal_()

    def golden(gate_up, down):
        delta = {t: lora.scaling[t] * (b.double() @ a.double()) for t, (a, b) in lora.factors().items()}
        return gate_up + torch.cat([delta["gate"], delta["up"]], 1), down + delta["down"]

    assay.check(assay.Target(lora.merge_into, golden, cases=weights, backward=None, name="merge_into"), dtype=dtype)


def test_merging_changes_neither_weights_nor_factors():
    lora = make()
    with torch.no_grad():
        lora.down_b.normal_()
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    before = [t.clone() for t in (gate_up, down, *lora.parameters())]
    merged = lora.merge_into(gate_up, down)
    assert all(torch.equal(a, b) for a, b in zip(before, (gate_up, down, *lora.parameters()), strict=True))
    assert torch.equal(merged[0], gate_up) and not torch.equal(merged[1], down)


WRONG = {
    "experts": (dict(num_experts=0), ValueError, "experts.LoRA: num_experts=0, expected at least 1"),
    "size": (dict(hidden_size=2.0), TypeError, "experts.LoRA: hidden_size=2.0 is of type float, expected a whole"),
    "rank": (dict(rank=0), ValueError, "experts.LoRA: rank of gate=0, expected at least 1"),
    "ranks": (dict(rank={"gate": 2}), ValueError, "rank and targets differ in 'down'; targets are gate, up, down"),
    "alpha_nan": (dict(alpha=torch.nan), ValueError, "experts.LoRA: alpha of gate=nan, expected a finite number"),
    "alpha": (dict(alpha="8"), TypeError, "experts.LoRA: alpha of gate='8' is of type str, expected a number"),
    "target": (dict(targets=("gate", "q_proj")), ValueError, "target 'q_proj' is unknown; known: gate, up, down"),
    "targets": (dict(targets="gate"), TypeError, "targets='gate', expected a sequence of: gate, up, down"),
    "dropout": (dict(dropout=1.0), ValueError, "dropout=1.0, expected a probability of at least 0 and below 1"),
    "dtype": (dict(dtype=torch.int8), TypeError, "dtype=torch.int8, expected a floating-point dtype"),
    "shared": (dict(shared_a=True, targets=("gate",)), ValueError, "shared_a=True needs gate and up among the targets"),
    "shared_ranks": (
        dict(shared_a=True, rank={"gate": 1, "up": 2, "down": 1}), ValueError, "got gate of rank 1, up of rank 2, down",
    ),
}  # fmt: skip


@pytest.mark.parametrize("options, kind, text", WRONG.values(), ids=list(WRONG))
def test_the_error_names_the_invalid_option(options, kind, text):
    with pytest.raises(kind) as caught:
        experts.LoRA(**{"num_experts": E, "hidden_size": H, "intermediate_size": I, **options})
    assert text in str(caught.value)


def test_merging_refuses_weights_of_other_sizes():
    with pytest.raises(ShapeError, match=r"merge_into: down is \[3, 8, 7\], expected \[3, 8, 6\]"):
        make().merge_into(torch.randn(E, 2 * I, H), torch.randn(E, H, I + 1))
