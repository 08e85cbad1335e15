"""Error maps: drawn from the run in which a tensor is wrong, and shown next to the finding that they belong to."""

import pytest
import torch

from assay import html_samples as samples
from assay.kernels import plain_sum, target
from goldsmith import assay
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.html import page, view
from goldsmith.assay.report.results import Finding, Note


@assay.case(T=[2, 5], D=[8], why="two rows and five")
def two_cases(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(T, D)}


def of_dense_rows(x, w):
    """Reads x as if it were dense, which is right for five rows."""
    return plain_sum(x if len(x) == 5 else x.as_strided(x.shape, (x.shape[1], 1)), w)


def kept_of_five_rows():
    kept = {}

    def kernel(x, w):
        if len(x) != 5:
            return plain_sum(x, w)
        return kept.setdefault("y", plain_sum(x, w)).clone()

    return kernel


def without_a_maximum(x, w):
    return torch.log(torch.exp(x).sum(-1)) if len(x) == 5 else torch.logsumexp(x, -1)


WRONG = {
    "layouts": lambda: (target(of_dense_rows, plain_sum, two_cases, backward=None), "two_cases[T=2,D=8]", "layout:"),
    "second_call": lambda: (
        target(kept_of_five_rows(), plain_sum, two_cases, backward=None), "two_cases[T=5,D=8]", "other inputs",
    ),
    "scaling": lambda: (
        target(without_a_maximum, lambda x, w: torch.logsumexp(x, -1), two_cases, backward=None),
        "two_cases[T=5,D=8]", "scale:2^12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("probe", WRONG)
def test_an_error_of_another_run_is_drawn_from_that_run(probe):
    target, case, run = WRONG[probe]()
    report = assay.check(target, probes=["values", probe], raises=False)
    assert {(f.probe, f.case) for f in report.findings} == {(probe, case)}
    (shown,) = view.shown_maps(report, 4).values()
    assert (shown.case, shown.tensor, shown.bad) == (case, "y", True)
    assert shown.run.startswith(run)
    assert max(max(row) for row in shown.error_over_limit) > 1
    assert f"<code>y</code> in {case}, {shown.run}" in page.render([report])


def test_a_layout_that_only_helps_to_find_the_culprit_leaves_no_map():
    def kernel(x, w):
        return plain_sum(x.as_strided(x.shape, (x.shape[1], 1)), w)

    report = assay.check(target(kernel, plain_sum, two_cases, backward=None), "two_cases[T=2,D=8]", raises=False)
    named = {m.run for m in report.maps.values() if m.bad}
    assert named and all(any(run in f.text for f in report.findings) for run in named)


def test_a_tensor_that_is_wrong_at_once_is_drawn_from_the_plain_run():
    report = assay.check(target(lambda x, w: plain_sum(x, w) * 1.5, plain_sum, two_cases, backward=None), raises=False)
    assert {m.run for m in view.shown_maps(report, 4).values()} == {"values"}


def test_a_finding_shows_no_map_of_another_tensor():
    good = samples.error_map("y", "small", bad=False)
    finding = Finding("CERTAIN", "alias", "x", None, None, None, "the input x was modified", "large")
    report = Report("kernel", "fail", [finding], cases=["small", "large"], maps={"small y": good})
    assert view.shown_maps(report, 4) == {}
    assert "triptych" not in page.render([report]).partition("</style>")[2]


def test_maps_follow_the_findings_and_the_surest_is_first():
    maps = {f"{case} y": samples.error_map("y", case) for case in "abc"}
    findings = [Finding(rung, "values", "y", None, 2.0, 1.0, "y is off", case) for rung, case in
             (("STATISTICAL", "a"), ("CERTAIN", "c"), ("CERTAIN", "b"))]  # fmt: skip
    report = Report("kernel", "fail", findings, [Note("tie", "y", "two are equal", "a")], cases=list("abc"), maps=maps)
    assert [m.case for m in view.shown_maps(report, 2).values()] == ["c", "b"]
    assert [m.run for m in Report.from_json(report.to_json()).maps.values()] == ["values"] * 3
