"""The page of a diagnosis: the story stands first, then pictures, then the evidence of each cause, then the tables."""

import re

import pytest

from assay import html_samples as samples
from assay.html_reader import Reader
from goldsmith import assay
from goldsmith.assay.diagnosis import diagnosis_page, diagnosis_view
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import Finding, Note


def page_of(found, **more):
    return Reader(diagnosis_page.render(found, **more))


def test_the_story_comes_before_the_pictures_and_the_pictures_before_the_tables():
    said = page_of(samples.diagnosis()).said()
    order = [
        "bias.grad is wrong: a factor is wrong.",
        "Where: bias.grad: segment res; 64 of 96 elements (66.7 %).",
        "y / g is 1.7 = a_res in res.",
        "Try check where the factor is applied.",
        "Stages, in the reference's order",
        "Where it is wrong",
        "What the result depends on",
        "Traced to its origin bias.grad is wrong with grad_h_in alone, and right with grad_h_post alone.",
        "Causes, the likeliest first",
        "What could not be decided",
        "The smallest failing case",
        "Tables",
        "What the check found",
    ]
    places = [said.find(part) for part in order]
    assert min(places) > 0 and places == sorted(places)


def test_the_strip_marks_the_culprit_and_tells_it_from_what_is_wrong_by_inheritance():
    strip = {box["name"]: box for box in diagnosis_view.strip(samples.diagnosis())}
    assert {name: box["word"] for name, box in strip.items()} == {
        "inv_rms": "right",
        "h_mix": "not named",
        "h_in": "wrong, not isolated",
        "bias.grad": "first wrong",
        "x.grad": "wrong by inheritance",
    }
    reader = page_of(samples.diagnosis())
    boxes = [a["class"].split() for tag, a, parents in reader.tags if tag == "li" and "ol" in parents]
    assert [c for c in boxes if "first" in c] == [["culprit", "first"]]


def test_the_profile_of_an_axis_shows_where_along_it_the_errors_lie():
    rows, columns = diagnosis_view.profiles(samples.diagnosis())
    assert (rows["name"], rows["length"], columns["name"], columns["length"]) == ("T", 4, "D", 24)
    assert re.findall(r'class="(e\d)" d="([^"]*)"', columns["drawing"]) == [("e1", "M0 0h8"), ("e7", "M8 0h16")]
    assert re.findall(r'class="(e\d)" d="([^"]*)"', rows["drawing"]) == [("e6", "M0 0h4")]


def test_no_profile_is_drawn_where_every_element_is_wrong():
    found = samples.diagnosis()
    found.evidence.got = found.evidence.golden * 2
    assert diagnosis_view.profiles(found) == []


def test_the_dependence_of_golden_and_candidate_stand_one_above_the_other():
    phi, gamma = diagnosis_view.dependence(samples.diagnosis())
    assert (phi["name"], phi["length"]) == ("phi, axis 1", 64)
    assert phi["said"] == "32..63 should reach bias.grad, and does not; 0..1 reaches bias.grad, and should not"
    assert re.findall(r'class="d-(\w+)" x="([\d.]+)%?"[^>]* width="([\d.]+)%"', phi["candidate"]) == [
        ("on", "0", "100"), ("off", "50.00", "50.00"), ("leak", "0.00", "3.12"),
    ]  # fmt: skip
    assert re.findall(r'class="d-(\w+)"', phi["golden"]) == ["on", "off"]
    assert 'width="100.00%"' in gamma["candidate"] and gamma["length"] == 128


def test_each_cause_has_its_evidence_beside_it_and_weak_ones_are_called_weak():
    reader = page_of(samples.diagnosis())
    said = reader.said().partition("Causes, the likeliest first")[2].partition("What could not")[0]
    assert said.index("0.90") < said.index("wrong factor ") < said.index("y / g is 1.7 = a_res in res.")
    assert said.index("0.20 weak") < said.index("absolute eps ") < said.index("scale 2^-12: bias.grad wrong.")
    assert "ratio 1.7, where res" in said


def test_a_changed_golden_that_makes_the_same_is_said_with_what_it_explains():
    reader = page_of(samples.diagnosis())
    assert "bias.grad when h.grad is multiplied by a_res" in reader.said()
    cells = [text for tag, text in reader.text if tag == "td"]
    assert cells[cells.index("every element") :][:2] == ["every element", "75 %"]


def test_repeats_of_which_the_same_is_to_be_said_stand_in_one_line():
    lines = diagnosis_view.runs(samples.diagnosis())
    assert [(r["name"], r["outcome"], r["bits"]) for r in lines] == [
        ("repeat 1 to 10", "bias.grad wrong", "the same"),
        ("layout stride0", "right", "up to 2e-7 apart"),
        ("backward twice", "raised RuntimeError: freed", ""),
    ]


def test_the_histogram_counts_every_element_once():
    found = samples.diagnosis()
    found.evidence.got[0, 0] = float("nan")
    rows = {r["label"]: r["count"] for r in diagnosis_view.histogram(found)}
    assert rows == {"up to 0.5 ulp": 31, "above 4096 ulp": 64, "not finite on one side": 1}


def test_what_replays_the_bundle_is_said_as_the_caller_knows_it(tmp_path):
    found = samples.diagnosis("rms norm", bundle=tmp_path / "rms-1")
    assert f'goldsmith.assay.replay("{tmp_path / "rms-1"}", target)' in page_of(found).said()  # it has no name
    assert "goldsmith replay b kernels:rms" in page_of(found, command="goldsmith replay b kernels:rms").said()


def test_where_nothing_was_followed_nothing_is_said_of_it():
    assert "Traced to its origin" not in page_of(samples.diagnosis(traced=[])).said()


def test_what_is_right_and_what_is_not_the_candidates_fault_are_no_accusations():
    right = assay.diagnosis.Diagnosis("pass", samples.passing("rmsnorm"))
    assert "Nothing wrong was found in rmsnorm." in page_of(right).said()
    assert "Causes" not in page_of(right).said() and "first wrong" not in page_of(right).said()
    cut = assay.diagnosis.Diagnosis("pass", samples.passing("rmsnorm"), partial="the budget of 5 s was spent")
    assert "Nothing wrong was found in rmsnorm (the budget of 5 s was spent)." in page_of(cut).said()
    fault = assay.diagnosis.Diagnosis("reference_fault", samples.reference_fault())
    said = page_of(fault).said()
    assert "The reference is at fault, so mhc.head is not accused." in said
    assert "the golden computes in float32" in said.partition("What the check found")[0]
    note = Note("not_judged", "k", "cannot run in the interpreter: no atomics", "a")
    unjudged = assay.diagnosis.Diagnosis("unjudged", Report("kernel", "unjudged", cases=["a"], notes=[note]))
    assert "Nothing was judged: cannot run in the interpreter: no atomics." in page_of(unjudged).said()


def test_a_failure_without_a_cause_or_numbers_has_a_page_too():
    finding = Finding("CERTAIN", "values", "forward", None, None, None, "the candidate raised in its forward: no", "a")
    found = assay.diagnosis.Diagnosis("fail", Report("kernel", "fail", [finding], cases=["a"]))
    assert "the candidate raised in its forward: no." in page_of(found).said()[:300]


def test_names_from_users_are_text_and_never_markup():
    text = diagnosis_page.render(samples.hostile_diagnosis(), command=samples.EVIL, conditions=[samples.EVIL])
    assert "<script" not in text and "alert(&#39;x&#39;)" in text
    assert samples.EVIL in Reader(text).said()


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

    found = assay.diagnose(assay.Target(kernel, lambda x, w: x @ w, cases=product, name="last row", backward=None))
    found.to_html(tmp_path / "new" / "page.html")
    said = Reader((tmp_path / "new" / "page.html").read_text(encoding="utf-8")).said()
    assert "y is wrong: part of it is never written." in said and "T 0..8" in said
