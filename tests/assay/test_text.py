"""The report for a terminal: one sentence first, 80 columns, plain text."""

import dataclasses
import math

import pytest
import torch

from assay.kernels import normed, plain_sum, rmsnorm, target
from goldsmith import assay
from goldsmith.assay.report import ranking
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import (
    Finding,
    Note,
    ProbeRun,
    Row,
)


def finding(rung, text, probe="values", case="c"):
    return Finding(rung, probe, "y", None, None, None, text, case)


def lines(report):
    text = str(report)
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert text.isprintable() or all(c.isprintable() or c == "\n" for c in text), "no colours, no tabs"
    assert max(map(len, text.splitlines())) <= 80
    return text.splitlines()


def test_a_pass_says_how_much_was_right_in_one_sentence():
    report = assay.check(target(plain_sum, name="weighted_sum"))
    first, _, second, *_ = lines(report)
    assert first == f"PASS  weighted_sum: {len(report.rows)} results right in 1 case"
    assert second.startswith("float32 on cpu, seed 0; ") and " candidate runs, " in second


def test_a_failure_says_the_surest_finding_first_and_then_all_of_them():
    report = Report("kernel", "fail", cases=["c"], dtypes=["float32"])
    report.findings = [
        finding("STATISTICAL", "second"),
        finding("CERTAIN", "first", "guard"),
        finding("QUALITY", "third"),
    ]
    shown_lines = lines(report)
    assert shown_lines[0] == "FAIL  kernel: first"
    shown = [line.split()[0] for line in shown_lines if line.startswith("  ")][:3]
    assert shown == ["CERTAIN", "STATISTICAL", "QUALITY"]
    assert "  CERTAIN     guard: first [c]" in shown_lines


def test_problems_of_the_golden_come_first():
    report = Report("kernel", "reference_fault", findings=[finding("CERTAIN", "a"), finding("CERTAIN", "b", "golden")])
    assert lines(report)[0] == "REFERENCE FAULT  kernel is not accused: b"


def test_long_names_texts_and_tables_stay_within_80_columns():
    case = "a_very_long_name_of_a_case[T=1024,experts=128,hidden=7168,sharded=True,dtype=bfloat16]"
    row = Row(
        case, "layout:stride0(grad_y, x, w)", "coefficients.residual.grad", "grad", "float32", (3, 4), 1e-300, 1e9
    )
    report = Report("package.module.kernel_with_a_very_long_name", "fail", cases=[case, "b"], dtypes=["float32"] * 3)
    report.rows = [
        row,
        *[Row(case, f"run{i}", "y", "output", "float32", (1,), 0.0, 0.0, state="bad") for i in range(30)],
    ]
    report.findings = [finding("CERTAIN", f"{'word ' * 40}{i}", case=case) for i in range(20)]
    report.notes = [Note(f"note{i}", "y", "text " * 30, case) for i in range(12)]
    report.probes = [
        ProbeRun("taint", False, "the candidate raised in its forward pass, early"),
        ProbeRun("values", True),
    ]
    shown_lines = lines(report)
    more = "report.text(every=True) shows all"
    assert f"  ... and 12 more; {more}" in shown_lines and f"  ... and 4 more kinds; {more}" in shown_lines
    assert "more" not in report.text(every=True) and f"{'word ' * 40}19 [a_very" in " ".join(
        report.text(every=True).split()
    )
    assert any(line.startswith("  16 of 31 rows") for line in shown_lines) and any("…" in line for line in shown_lines)


def test_equal_notes_appear_once_with_the_number_of_cases():
    report = Report("kernel", cases=["a", "b", "c"], notes=[Note("not_proven", "y", "3 rows", c) for c in "abc"])
    assert "  not_proven: 3 rows [a] (and 2 more)" in lines(report)


def test_notes_that_ask_for_nothing_are_counted_and_shown_on_request():
    notes = [Note("tie", "index", "3 rows", c) for c in "abc"]
    report = Report(
        "kernel", cases=["a", "b", "c"], notes=[*notes, Note("refused_layout", "x", "x must be dense", "a")]
    )
    assert "  3 observations, not faults (tie); report.text(every=True) shows all" in lines(report)
    assert "  refused_layout: x must be dense [a]" in lines(report) and "3 rows" not in str(report)
    assert "  tie: 3 rows [a] (and 2 more)" in report.text(every=True).splitlines()
    report.notes = notes[:1]
    assert "  1 observation, not a fault (tie); report.text(every=True) shows all" in lines(report)


def test_counts_of_one_and_probes_that_share_a_reason_read_as_english():
    report = Report("kernel", cases=["a"], dtypes=["float32"], environment={"runs": {"candidate": 1, "golden": 2}})
    report.notes = [Note("tie", "index", "3 rows", "a")]
    report.probes = [ProbeRun("taint", False, "a"), ProbeRun("float32", False, "b"), ProbeRun("scaling", False, "a")]
    text = str(report)
    assert "1 candidate run, 2 golden runs" in text and "1 observation, not a fault (tie)" in text
    assert "Not run: taint, scaling (a); float32 (b)" in text


def test_wrong_numbers_come_before_layouts_and_poor_quality_comes_last():
    report = Report("kernel", "fail", cases=["c"], dtypes=["float32"])
    report.findings = [
        finding("QUALITY", "poor"),
        finding("CERTAIN", "wrong for strides", "layouts"),
        finding("SYSTEMATIC", "a slope"),
        finding("CERTAIN", "wrong numbers", "values"),
        finding("CERTAIN", "the golden differs", "golden"),
    ]
    order = ["the golden differs", "wrong numbers", "a slope", "wrong for strides", "poor"]
    assert [f.text for f in ranking.ranked(report)] == order
    assert lines(report)[0] == "FAIL  kernel: the golden differs"


def test_the_worst_report_comes_first():
    def report(*findings, verdict="fail"):
        return Report("kernel", verdict, findings=list(findings), cases=["c"])

    layout = report(finding("CERTAIN", "strides", "layouts"))
    slight = report(dataclasses.replace(finding("CERTAIN", "slight"), measured=2.0, limit=1.0))
    gross = report(dataclasses.replace(finding("CERTAIN", "gross"), measured=math.nan, limit=1.0))
    order = sorted([report(verdict="pass"), layout, slight, gross], key=ranking.severity)
    assert order[:3] == [gross, slight, layout] and order[3].ok


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "–"),
        (math.nan, "NaN"),
        (-math.inf, "−∞"),
        (0.0, "0"),
        (7.634e5, "7.63e+05"),
        (3.1e-7, "3.1e-07"),
        (12.0, "12"),
    ],
)
def test_one_format_of_numbers_for_tables_and_findings(value, text):
    assert ranking.number(value) == text


def test_notes_that_differ_in_tensor_and_numbers_appear_once():
    text = "{}: not proven at {} % of the elements: ill-conditioned"
    tensors = [("h_res", 100), ("x.grad", 66.7), ("phi.grad", 3e-05)]
    notes = [Note("not_proven", t, text.format(t, share), "a") for t, share in tensors]
    shown_lines = lines(Report("kernel", cases=["a"], notes=notes))
    whole = " ".join(line.strip() for line in shown_lines)
    assert (
        "not_proven: h_res: not proven at 100 % of the elements: ill-conditioned [a]; likewise x.grad, phi.grad"
        in whole
    )


def test_a_finding_of_another_run_names_the_run():
    def forgetful(x, w):
        return plain_sum(x, w) if float(x.abs().max()) < 100 else plain_sum(x, w) * 0

    report = assay.check(target(forgetful), raises=False)
    assert any("(scale:2^12)" in f.text for f in report.findings) and "(scale:2^12)" in str(report)


def test_the_table_lists_failures_first_and_no_relative_error_against_zero():
    def kernel(x, w, eps):
        return torch.cat([rmsnorm(x, w, eps)[:, :99], x[:, :1] * 0 + 1e-3], 1)

    def golden(x, w, eps):
        return torch.cat([rmsnorm(x, w, eps)[:, :99], x[:, :1] * 0], 1)

    report = assay.check(target(kernel, golden, normed), probes="values", raises=False)
    shown_lines = lines(report)
    head = next(i for i, line in enumerate(shown_lines) if line.split()[:2] == ["tensor", "run"])
    # the only case is in the heading
    assert shown_lines[head].split() == "tensor run error /bound /noise ulp state".split()
    assert shown_lines[head + 1].split()[0] == "y" and shown_lines[head + 1].split()[-1] == "bad"
    text = " ".join(shown_lines)
    assert "13 of them are nonzero where only 0 is possible" in text and " nan" not in text.lower()


def test_skipped_probes_are_listed_with_a_reason():
    shown_lines = " ".join(lines(assay.check(target(plain_sum), probes="values")))
    assert "scaling, taint, calls, float32 (not selected)" in shown_lines and "Probes: values" in shown_lines


@pytest.mark.parametrize("strict", [False, True])
def test_remarks_on_quality_are_counted_in_a_pass(strict):
    report = Report(
        "kernel", "fail" if strict else "pass", findings=[finding("QUALITY", "worse than honest")], strict=strict
    )
    first = lines(report)[0]
    assert first == (
        "FAIL  kernel: worse than honest" if strict else "PASS  kernel: 0 results right in 0 cases, 1 remark on quality"
    )
