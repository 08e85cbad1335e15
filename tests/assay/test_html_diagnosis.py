"""The page of a diagnosis: the story comes first, then pictures, the evidence of each cause, and tables."""

import re

import pytest
import torch

from assay import html_samples as samples
from assay.html_reader import Reader
from goldsmith import assay
from goldsmith.assay.diagnosis import Cause
from goldsmith.assay.diagnosis.report import page as diagnosis_page
from goldsmith.assay.diagnosis.report import view as diagnosis_view
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import Finding, Note


def page_of(diagnosis, **more):
    return Reader(diagnosis_page.render(diagnosis, **more))


def test_the_story_comes_before_the_pictures_and_the_pictures_before_the_tables():
    text = page_of(samples.diagnosis()).visible_text()
    order = [
        "bias.grad is wrong: a factor is wrong.",
        "Where: bias.grad: segment res; 64 of 96 elements (66.7 %).",
        "y / g is 1.7 = a_res in res.",
        "Try check where the factor is applied.",
        "Stages, in the golden's order",
        "Where it is wrong",
        "What the result depends on",
        "Traced to its origin bias.grad is wrong with grad_h_in alone, and right with grad_h_post alone.",
        "Causes, the likeliest first",
        "What could not be decided",
        "The smallest failing case",
        "Tables",
        "What the check found",
    ]
    places = [text.find(part) for part in order]
    assert min(places) > 0 and places == sorted(places)


@pytest.mark.parametrize(
    "score, params, title",
    [
        (0.9, {}, "y is wrong: a factor is wrong."),
        (0.62, {}, "y is wrong; not explained."),
        (0.95, {"learned": True}, "y is wrong; not explained."),
    ],
)
def test_a_guess_is_not_in_the_title(score, params, title):
    cause = Cause("wrong_factor", score, "y", ["y / g is 1.7"], params, "y is wrong: a factor is wrong", "")
    diagnosis = samples.diagnosis(causes=[cause])
    page = diagnosis_page.render(diagnosis)
    assert f"<h1>{title}</h1>" in page and ("not explained" in title) == (f"{100 * score:.0f} %" in page)


def test_an_exact_edit_of_the_golden_is_the_title():
    cause = Cause(
        "wrong_factor", 0.6, "y", ["y / g is 1.7"], {}, "y is wrong: a factor is wrong", edit="b is read as c"
    )
    page = diagnosis_page.render(samples.diagnosis(causes=[cause]))
    assert "<h1>y is wrong: the golden gives it when b is read as c.</h1>" in page


def test_the_cases_are_a_table_of_pass_and_fail():
    report = samples.failing()
    passed, failed = "one[T=1]", report.findings[0].case
    report.cases = [passed, failed, "late[T=9]"]
    report.rows, report.findings = [], [f for f in report.findings if f.case == failed]
    report.notes = [Note("not_run", "k", "the case did not run: the budget was spent", "late[T=9]")]
    diagnosis = samples.diagnosis(report=report)
    assert diagnosis.case_outcomes() == {passed: "pass", failed: "FAIL", "late[T=9]": "not run"}
    table = [(name, result) for name, result, _ in diagnosis_view.case_table(diagnosis)]
    assert table == [(passed, "pass"), (failed, "FAIL"), ("late[T=9]", "not run")]
    assert all(name in page_of(diagnosis).visible_text().partition(" Cases ")[2] for name, _ in table)
    lines = [" ".join(line.split()) for line in str(diagnosis).splitlines()]
    assert f"{passed} pass" in lines and f"{failed} FAIL" in lines
    assert any(line.startswith("(1 case not run, because one failing case is enough") for line in lines)


def test_cases_that_the_diagnosis_did_not_need_are_listed_by_the_target():
    golden, rows = (lambda x: x * 2), assay.case(T=[1, 2, 3])(lambda make, T: {"x": make.normal(T, 4)})
    target = assay.Target(lambda x: x * 3, golden, cases=rows, name="k")
    outcomes = assay.diagnose(target, budget_s=20).case_outcomes()
    assert sorted(outcomes) == [case.name for case in target.cases] and set(outcomes.values()) == {"FAIL", "not run"}


def test_the_strip_distinguishes_the_culprit_from_inherited_errors():
    strip = {box["name"]: box for box in diagnosis_view.strip(samples.diagnosis())}
    assert {name: box["word"] for name, box in strip.items()} == {
        "inv_rms": "right",
        "h_mix": "not named by the candidate",
        "h_in": "wrong, not isolated",
        "bias.grad": "first wrong",
        "x.grad": "wrong by inheritance",
    }
    reader = page_of(samples.diagnosis())
    boxes = [a["class"].split() for tag, a, parents in reader.tags if tag == "li" and "ol" in parents]
    assert [c for c in boxes if "first" in c] == [["culprit", "first"]]


def test_a_stage_that_is_wrong_in_another_run_alone_is_not_shown_as_right():
    """exp without the row's maximum: right on the inputs of the case, NaN at scale 2^12."""
    overflowing = assay.Target(
        lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: x.softmax(-1), cases={"x": torch.randn(2, 5)},
        backward=None, name="softmax",
    )  # fmt: skip
    diagnosis = assay.diagnose(overflowing, budget_s=20)
    (box,) = diagnosis_view.strip(diagnosis)
    assert (box["word"], box["state"]) == ("first wrong in scale:2^12", "bad") and "g bad" in box["glyph"]
    assert "ok but wrong in scale:2^12" in page_of(diagnosis).visible_text()
    assert any(
        line.startswith("y ") and line.endswith("ok, but wrong in scale:2^12") for line in str(diagnosis).splitlines()
    )


def test_the_dependences_of_golden_and_candidate_are_drawn_one_above_the_other():
    phi, gamma = diagnosis_view.dependence(samples.diagnosis())
    assert (phi["name"], phi["length"]) == ("phi, axis 1", 64)
    assert phi["said"] == "32..63 should reach bias.grad, but does not; 0..1 reaches bias.grad, but should not"
    assert re.findall(r'class="d-(\w+)" x="([\d.]+)%?"[^>]* width="([\d.]+)%"', phi["candidate"]) == [
        ("on", "0", "100"), ("off", "50.00", "50.00"), ("leak", "0.00", "3.12"),
    ]  # fmt: skip
    assert re.findall(r'class="d-(\w+)"', phi["golden"]) == ["on", "off"]
    assert 'width="100.00%"' in gamma["candidate"] and gamma["length"] == 128


def test_each_cause_shows_its_evidence_and_weak_ones_are_called_weak():
    reader = page_of(samples.diagnosis())
    text = reader.visible_text().partition("Causes, the likeliest first")[2].partition("What could not")[0]
    assert text.index("0.90") < text.index("wrong factor ") < text.index("y / g is 1.7 = a_res in res.")
    assert text.index("0.20 weak") < text.index("absolute eps ") < text.index("scale 2^-12: bias.grad wrong.")
    assert "ratio 1.7, where res" in text


def test_a_changed_golden_with_the_same_errors_is_listed_with_its_share():
    reader = page_of(samples.diagnosis())
    assert "bias.grad when h.grad is multiplied by a_res" in reader.visible_text()
    cells = [text for tag, text in reader.text if tag == "td"]
    assert cells[cells.index("every element") :][:2] == ["every element", "75 %"]


def test_repeats_with_equal_results_share_a_line():
    lines = diagnosis_view.runs(samples.diagnosis())
    assert [(r["name"], r["outcome"], r["bits"]) for r in lines] == [
        ("repeat 1 to 10", "bias.grad wrong", "the same"),
        ("layout stride0", "right", "up to 2e-07 apart"),
        ("backward twice", "raised RuntimeError: freed", ""),
    ]


def test_the_replay_command_can_come_from_the_caller(tmp_path):
    diagnosis = samples.diagnosis("rms norm", bundle=tmp_path / "rms-1")
    # the target has no name
    assert f'goldsmith.assay.replay("{tmp_path / "rms-1"}", target)' in page_of(diagnosis).visible_text()
    assert (
        "goldsmith replay b kernels:rms" in page_of(diagnosis, command="goldsmith replay b kernels:rms").visible_text()
    )


def test_the_page_has_no_trace_section_without_a_trace():
    assert "Traced to its origin" not in page_of(samples.diagnosis(traced=[])).visible_text()


def test_right_candidates_and_faulty_references_are_not_accused():
    right = assay.diagnosis.Diagnosis("pass", samples.passing("rmsnorm"))
    assert "Nothing wrong was found in rmsnorm." in page_of(right).visible_text()
    assert "Causes" not in page_of(right).visible_text() and "first wrong" not in page_of(right).visible_text()
    cut = assay.diagnosis.Diagnosis("pass", samples.passing("rmsnorm"), partial="the budget of 5 s was spent")
    assert "Nothing wrong was found in rmsnorm (the budget of 5 s was spent)." in page_of(cut).visible_text()
    fault = assay.diagnosis.Diagnosis("reference_fault", samples.reference_fault())
    text = page_of(fault).visible_text()
    assert "The reference is at fault, so mhc.head is not accused." in text
    assert "the golden computes in float32" in text.partition("What the check found")[0]
    note = Note("not_judged", "k", "cannot run in the interpreter: no atomics", "a")
    unjudged = assay.diagnosis.Diagnosis("unjudged", Report("kernel", "unjudged", cases=["a"], notes=[note]))
    assert "Nothing was judged: cannot run in the interpreter: no atomics." in page_of(unjudged).visible_text()


def test_a_failure_without_a_cause_or_numbers_has_a_page_too():
    finding = Finding("CERTAIN", "values", "forward", None, None, None, "the candidate raised in its forward: no", "a")
    diagnosis = assay.diagnosis.Diagnosis("fail", Report("kernel", "fail", [finding], cases=["a"]))
    assert "the candidate raised in its forward: no." in page_of(diagnosis).visible_text()[:300]


def test_names_from_users_are_text_and_never_markup():
    text = diagnosis_page.render(samples.hostile_diagnosis(), command=samples.EVIL, conditions=[samples.EVIL])
    assert "<script" not in text and "alert(&#39;x&#39;)" in text
    assert samples.EVIL in Reader(text).visible_text()


def test_nothing_is_fetched_and_nothing_is_run():
    reader = page_of(samples.hostile_diagnosis())
    policy = [a for _, a, _ in reader.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert [p["content"] for p in policy] == ["default-src 'none'; style-src 'unsafe-inline'"]
    for tag, attributes, _ in reader.tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "form", "base")
        assert not any(name.startswith("on") for name in attributes), attributes


@pytest.mark.parametrize("make", [samples.diagnosis, samples.hostile_diagnosis])
def test_every_drawing_has_a_title_and_every_table_headers(make):
    tags = page_of(make()).tags
    for k, (tag, attributes, _) in enumerate(tags):
        if tag == "svg":
            assert attributes["role"] == "img" and tags[k + 1][0] == "title"
        if tag == "table":
            inside = [t for t in tags[k + 1 :] if "table" in t[2]]
            assert [a for t, a, _ in inside if t == "th"]
    assert all(a.get("scope") in ("col", "row") for tag, a, _ in tags if tag == "th")


def test_a_real_diagnosis_writes_its_page(tmp_path):
    def kernel(x, w):
        y = x.new_empty(len(x), w.shape[1])
        y[:-1] = x[:-1] @ w
        return y

    @assay.case(T=[9], D=[12], E=[40])
    def product(make, T, D, E):
        return {"x": make.normal(T, D), "w": make.normal(D, E)}

    diagnosis = assay.diagnose(assay.Target(kernel, lambda x, w: x @ w, cases=product, name="last row", backward=None))
    diagnosis.to_html(tmp_path / "new" / "page.html")
    text = Reader((tmp_path / "new" / "page.html").read_text(encoding="utf-8")).visible_text()
    assert "y is wrong: part of it is never written." in text
