"""shrink: the smallest case that keeps the failure, in at most 64 runs."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.case import given
from goldsmith.assay.diagnosis.shrink.steps import shrink
from goldsmith.core.tracing import TargetError

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[5], D=[100], flag=[True], mode=["a"])
def rows(make, T, D, flag, mode):
    return {"x": make.normal(T, D), "w": make.normal(D), "index": make.integers(1, 5, T), "eps": 1e-6}


def drawn(case):
    return case.build(torch.float32, "cpu", 0)


@pytest.mark.parametrize(
    "wrong, smallest",
    [
        (lambda T, D: True, (0, 0)),
        (lambda T, D: D > 32, (0, 33)),
        (lambda T, D: T >= 2 and D % 32 != 0, (2, 1)),
        (lambda T, D: D % 32 not in range(4), (0, 4)),
        (lambda T, D: T * D >= 100, (5, 20)),
        (lambda T, D: T == 5 and D == 100, (5, 100)),
        (lambda T, D: T > 0 and D > 64, (1, 65)),
    ],
    ids=["always", "block", "tail", "holes", "product", "there_alone", "both"],
)
def test_sizes_are_lowered(wrong, smallest):
    def keeps(case):
        return wrong(*drawn(case)["x"].shape)

    shrunk = shrink(rows[0], keeps)
    sizes = shrunk.case.sizes
    assert (sizes["T"], sizes["D"]) == smallest
    assert shrunk.runs <= 64 and sizes["flag"] is True and sizes["mode"] == "a"
    assert shrunk.case.name == f"rows[T={sizes['T']},D={sizes['D']},flag=True,mode=a]"


def test_trials_that_cannot_be_drawn_or_judged_are_dropped():
    def keeps(case):
        if drawn(case)["x"].shape[1] < 10:
            raise TargetError("no such size")
        return True

    assert shrink(rows[0], keeps).case.sizes["D"] == 10


def test_axes_of_one_length_are_cut_together():
    whole = given({"x": torch.randn(6, 40), "w": torch.randn(40, 7), "k": 2})

    def keeps(case):
        supply = drawn(case)
        assert supply["x"].shape[1] == supply["w"].shape[0] and supply["k"] == 2
        assert supply["x"].is_contiguous() and supply["w"].is_contiguous()  # no gaps remain where the input was cut
        return supply["x"].shape[1] >= 9 and supply["w"].shape[1] >= 1

    shrunk = shrink(whole, keeps)
    supply = drawn(shrunk.case)
    assert supply["x"].shape == (0, 9) and supply["w"].shape == (9, 1)
    assert shrunk.case.name == "given[6->0,7->1,40->9]"


def test_cut_inputs_keep_their_values():
    x = torch.randn(8, 3)
    shrunk = shrink(given({"x": x}), lambda t: bool((drawn(t)["x"][1:, 1:] == x[1:2, 1:2]).any()))
    assert torch.equal(drawn(shrunk.case)["x"], x[:2, :2])


def test_values_become_simple_if_the_failure_stays():
    def keeps(case):
        supply = drawn(case)
        return len(set(supply["x"].flatten().tolist())) > 1 and bool((supply["w"] != 0).all()) and len(supply["w"]) > 0

    shrunk = shrink(rows[0], keeps)
    supply = drawn(shrunk.case)
    assert torch.equal(supply["w"], torch.ones_like(supply["w"]))
    assert torch.equal(supply["x"], supply["x"].round()) and supply["x"].abs().max() <= 8
    assert not supply["index"].any()
    assert "w: ones" in shrunk.steps and "x: whole numbers" in shrunk.steps


def test_layouts_that_do_not_matter_are_dropped():
    case = given({"x": torch.randn(3, 4).t(), "w": torch.randn(4, 3).t()})
    supply = drawn(shrink(case, lambda case: not drawn(case)["x"].is_contiguous()).case)
    assert not supply["x"].is_contiguous() and supply["w"].is_contiguous()


def test_the_number_of_runs_is_counted_and_limited():
    count = []
    shrunk = shrink(rows[0], lambda case: bool(count.append(1)) or drawn(case)["x"].shape[1] > 32, runs=9)
    assert len(count) == shrunk.runs == 9 and shrunk.partial
    assert shrunk.case.sizes["D"] < 100
    assert not shrink(rows[0], lambda case: False).partial


def test_the_smallest_case_of_a_wrong_kernel_still_fails():
    @assay.case(T=[13], D=[100])
    def tokens(make, T, D):
        return {"x": make.normal(T, D)}

    def kernel(x):
        return x[:, :32].sum(-1)

    target = assay.Target(kernel, lambda x: x.sum(-1), cases=tokens)

    def keeps(case):
        return assay.check(target, case, probes=("values",), raises=False).verdict == "fail"

    shrunk = shrink(target.cases[0], keeps)
    assert shrunk.case.sizes == {"T": 1, "D": 33} and shrunk.runs <= 64
    assert keeps(shrunk.case)
