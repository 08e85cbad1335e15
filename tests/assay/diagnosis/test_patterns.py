"""Rearranged, half filled, stored in another width: each is recognised, but not in clean or random data."""

import pytest
import torch

from goldsmith.assay.diagnosis.facts.patterns import patterns


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(golden):
    return 2.0**-21 * golden.abs() + 1e-7


def only(got, golden, **more):
    (matches,) = patterns("y", got, golden, bound=bound(golden), **more)
    return matches


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("shape", [(7,), (6, 6), (5, 4, 8)])
def test_clean_and_random_data_have_no_pattern(shape, seed):
    golden = draw(*shape, seed=seed)
    others = {"z": draw(*shape, seed=seed + 500)}
    clean = golden + bound(golden) * (draw(*shape, seed=seed + 1).sigmoid() - 0.5)
    assert patterns("y", clean.float(), golden, bound=bound(golden), others=others) == []
    assert patterns("y", clean, golden, bound=bound(golden), others=others) == []
    wrong = draw(*shape, seed=seed + 100).float()
    assert patterns("y", wrong, golden, bound=bound(golden), others=others) == []
    assert patterns("y", (golden * 1.5).float(), golden, bound=bound(golden), others=others) == []


def test_a_square_transposed():
    golden = draw(6, 6)
    match = only(golden.mT.float(), golden)
    assert (match.kind, match.params, match.match) == ("transposed", {"axes": [0, 1]}, pytest.approx(1))


@pytest.mark.parametrize("inverse", [False, True])
def test_a_rectangle_read_with_the_other_strides(inverse):
    golden = draw(4, 6)
    got = golden.reshape(6, 4).mT if inverse else golden.mT.reshape(4, 6)
    match = only(got.float(), golden)
    assert match.kind == "transposed" and match.params.get("inverse", False) is inverse


@pytest.mark.parametrize("axis, step", [(0, 1), (1, -1), (1, 3)])
def test_a_shift_along_an_axis(axis, step):
    golden = draw(7, 9)
    match = only(golden.roll(step, axis).float(), golden)
    assert (match.kind, match.params) == ("shifted", {"axis": axis, "step": step, "around": True})


def test_a_shift_that_is_cut_off():
    golden = draw(7, 9)
    got = torch.cat([draw(7, 1, seed=3), golden[:, :-1]], 1)
    match = only(got.float(), golden)
    assert (match.kind, match.params) == ("shifted", {"axis": 1, "step": 1, "around": False})


def test_a_shift_in_memory():
    golden = draw(7, 9)
    match = only(golden.flatten().roll(1).reshape(7, 9).float(), golden)
    assert match.kind == "shifted" and match.params["axis"] is None


def test_rows_reversed():
    golden = draw(7, 9)
    assert (only(golden.flip(0).float(), golden).kind) == "reversed"


def test_rows_in_another_order():
    golden, order = draw(8, 5), torch.tensor([3, 1, 0, 2, 7, 4, 6, 5])
    match = only(golden[order].float(), golden)
    assert match.kind == "permuted" and match.params["index"] == order.tolist() and match.params["bijective"]


def test_slices_copied_from_another_position_are_recognised():
    golden = draw(8, 5, 3)
    match = only(golden[torch.arange(8) // 2].float(), golden)  # expert e reads e // 2
    assert match.kind == "permuted" and not match.params["bijective"] and match.params["axis"] == 0


def test_a_result_stored_in_place_of_another_is_explained():
    golden, other = draw(8, 5), draw(8, 5, seed=4)
    match = only(other.float(), golden, others={"w.grad": other})
    assert (match.kind, match.params) == ("swapped", {"with": "w.grad"})


def test_two_equivalent_patterns_name_each_other():
    golden = draw(2, 5)  # two rows: reversed is shifted by one
    matches = patterns("y", golden.flip(0).float(), golden, bound=bound(golden))
    assert matches[0].kind == "reversed"
    golden = draw(5, 2)
    matches = patterns("y", golden.float(), golden.flip(1), bound=bound(golden), others={"z": golden})
    assert {p.kind for p in matches} == {"reversed", "swapped"} and all(p.also for p in matches)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrow_store_into_a_wide_buffer(narrow):
    golden = draw(8, 10)
    buffer = torch.zeros(80)
    buffer.view(narrow)[:80] = golden.flatten().to(narrow)
    matches = patterns("y", buffer.view(8, 10), golden, bound=bound(golden))
    (width,) = matches
    assert width.kind == "dtype_width"
    assert width.params == {"dtype": str(narrow).removeprefix("torch."), "in": "float32", "elements": 80}


def test_a_wide_store_into_a_narrow_buffer():
    golden = draw(8, 10)
    got = golden.float().flatten()[:40].view(torch.bfloat16).view(8, 10)
    result = [p for p in patterns("y", got, golden) if p.kind == "dtype_width"]
    assert result and result[0].params["dtype"] == "float32" and result[0].params["elements"] == 40
