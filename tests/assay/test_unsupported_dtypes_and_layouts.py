"""Complex tensors are refused or judged by their parts; sparse gradients are judged in dense form."""

import pytest
import torch

from goldsmith import assay


@assay.case(T=[5], D=[6])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def check(candidate, golden, **options):
    return assay.check(assay.Target(candidate, golden, cases=rows, **options), probes="quick", raises=False)


def plain(x, w):
    return x * w


def test_a_complex_result_is_refused_and_its_parts_are_judged():
    turned = lambda x, w: torch.complex(x, x * w)  # noqa: E731
    for candidate, golden, who in ((turned, plain, "candidate"), (plain, turned, "golden")):
        with pytest.raises(
            assay.TargetError, match=f"the {who}'s 'y' is complex, which cannot be judged; return torch"
        ):
            check(candidate, golden)

    def parts(x, w, wrong=1.0):
        return torch.view_as_real(torch.complex(x, wrong * x * w))

    assert check(parts, parts).ok
    assert check(lambda x, w: parts(x, w, 1.01), parts).verdict == "fail"


def test_a_result_in_8_bits_is_refused_and_its_numbers_are_judged():
    narrow = lambda x, w: (x * w).to(torch.float8_e4m3fn)  # noqa: E731
    with pytest.raises(assay.TargetError, match="'y' is float8_e4m3fn, which cannot be judged; return .float"):
        check(narrow, plain, backward=None)


def test_a_complex_stage_is_judged_by_its_parts_and_returned_unchanged():
    def golden(x, w, wrong=1.0):
        h = assay.stage("h", torch.complex(x, wrong * x).conj())
        assert h.is_complex() and h.shape == x.shape
        return (h * h.conj()).real * w

    assert check(golden, golden).ok
    report = check(lambda x, w: golden(x, w, 1.01), golden)
    assert report.verdict == "fail" and "h" in report.stages


def test_a_sparse_result_is_refused():
    with pytest.raises(assay.TargetError, match=r"'y' is of layout torch.sparse_coo, .*; return it as a plain dense"):
        check(lambda x, w: plain(x, w).to_sparse(), plain)


@pytest.mark.parametrize("own", [False, True])
def test_a_sparse_gradient_is_judged_as_its_dense_form(own):
    at = torch.tensor([0, 2, 2])

    def golden(x, w):
        return x[at] * w

    def target(places):
        def embedded(x, w):
            return torch.nn.functional.embedding(at, x, sparse=True) * w

        def backward(x, w, grad_y):
            rows = torch.sparse_coo_tensor(places.unsqueeze(0), grad_y * w, x.shape, check_invariants=False)
            return {"x": rows, "w": (grad_y * x[at]).sum(0)}

        return (golden, {"backward": backward, "outputs": ("y",)}) if own else (embedded, {})

    candidate, options = target(at)
    assert check(candidate, golden, **options).ok
    if own:
        report = check(candidate, golden, **target(torch.tensor([0, 2, 1]))[1])
        assert report.verdict == "fail" and {f.tensor for f in report.findings} == {"x.grad"}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_inputs_of_8_bits_are_judged_and_have_no_gradient(dtype):
    """8-bit dtypes only store numbers: torch computes nothing in them, and float64 copies are exact."""

    def target(factor=1.0, **options):
        case = {"a": torch.randn(6, 8).to(dtype), "w": torch.randn(8)}
        return assay.Target(lambda a, w: a.float() * w * factor, lambda a, w: a * w, cases=case, **options)

    right, wrong = target(), target(1.25)
    report = assay.check(right)
    assert {row.tensor for row in report.rows} == {"y", "w.grad"}
    assert assay.diagnose(right).ok
    assert not assay.check(wrong, raises=False).ok
    assert assay.diagnose(wrong).causes[0].id == "wrong_factor"
    with pytest.raises(ValueError, match="grads"):
        target(grads=("a",))
