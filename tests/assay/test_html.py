"""The page as text: what comes first, no network access or scripts, escaped names, sizes, contrast."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from assay import html_samples as samples
from assay.html_reader import Reader
from goldsmith import assay
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.html import maps, page, prose, svg, view
from goldsmith.assay.report.html.view import Entry
from goldsmith.assay.report.results import Finding, Note

CONDITIONS = ["Intel Xeon, 2 cores", "torch 2.13.0"]
REMARKS = ["Run: 9 cases through all probes.", "Not run: 21 large cases, which a GPU runs."]
PAGES = {
    "pass": lambda: page.render([samples.passing()]),
    "fail": lambda: page.render([samples.failing()]),
    "reference": lambda: page.render([samples.reference_fault()]),
    "hostile": lambda: page.render([samples.hostile()]),
    "verify": lambda: page.render(samples.verify_entries(), conditions=CONDITIONS, remarks=REMARKS),
}


@pytest.fixture(params=PAGES, scope="module")
def read(request):
    return Reader(PAGES[request.param]())


def test_every_tag_is_closed_where_it_was_opened(read):
    assert len(read.tags) > 20


def test_nothing_is_fetched_and_nothing_is_run(read):
    policy = [a for tag, a, _ in read.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert [p["content"] for p in policy] == ["default-src 'none'; style-src 'unsafe-inline'"]
    for tag, attributes, _ in read.tags:
        assert tag not in ("script", "link", "iframe", "img", "object", "embed", "form", "base")
        assert not any(name.startswith("on") for name in attributes), attributes
        assert attributes.get("href", "#").startswith("#")
    styles = "".join(data for tag, data in read.text if tag == "style")
    assert "@import" not in styles and "url(" not in styles and "@font-face" not in styles


def test_every_drawing_has_a_title_and_every_table_headers(read):
    tags = read.tags
    for k, (tag, attributes, _) in enumerate(tags):
        if tag == "svg":
            assert attributes["role"] == "img" and tags[k + 1][0] == "title"
        if tag == "table":
            inside = [t for t in tags[k + 1 :] if "table" in t[2]]
            headers = [a for t, a, _ in inside if t == "th"]
            assert headers and all(a.get("scope") in ("col", "row") for a in headers)


def test_links_have_targets_and_ids_are_unique(read):
    names = [a["id"] for _, a, _ in read.tags if "id" in a]
    assert len(names) == len(set(names))
    assert {a["href"][1:] for _, a, _ in read.tags if "href" in a} <= set(names)


def test_names_from_users_are_text_and_never_markup():
    for text in (page.render([samples.hostile()]), page.render([samples.hostile(), samples.passing()])):
        assert "<script" not in text and "alert(&#39;x&#39;)" in text
        assert samples.EVIL in Reader(text).visible_text()
        assert "60481729" not in Reader(text).visible_text()[:400], "a name went through the template"


def test_the_verdict_comes_first_in_one_sentence():
    first = {name: Reader(make()).visible_text().partition(", backend, case")[0][:700] for name, make in PAGES.items()}
    assert (
        "Everything tried here holds: 12 cases, 36 runs, 10 tensors, all within what rounding allows." in first["pass"]
    )
    assert "bias.grad is wrong: every element of segment res is 16.000 times the reference." in first["fail"]
    assert "CERTAIN more than rounding can do to the golden's formula in any order of its sums" in first["fail"]
    assert "the golden computes in float32: aten.rsqrt at head.py" in first["reference"]
    assert "3 of 6 checks are rejected: mhc.pre on triton, " in first["verify"]
    assert "and mhc.head on reference." in first["verify"]
    assert "7 checks" not in first["verify"] and "6 checks" in first["verify"], "what could not run is no check"
    assert "1 check could not run here" in first["verify"]


def test_no_rung_claims_more_than_it_proves():
    text = Reader(PAGES["fail"]()).visible_text()
    for word in ("every legal order", "no legal order", "explains it"):
        assert word not in text


def test_one_failing_check_among_many_is_named_with_what_is_wrong():
    text = Reader(page.render([samples.passing("mhc.post"), samples.failing("mhc.pre")])).visible_text()
    head = text.partition(", backend, case")[0]
    assert "1 of 2 checks is rejected: mhc.pre." in head
    assert "every element of segment res is 16.000 times the reference." in head


def test_a_faulty_reference_does_not_reject_the_candidate():
    summary = page.summary([Entry("mhc.head", "reference", samples.reference_fault())])
    assert summary["verdict"] == "reference_fault"
    assert summary["headline"] == (
        "1 of 1 check is without a verdict, because the reference is at fault: mhc.head on reference."
    )


def test_an_unjudged_report_is_not_called_right():
    note = Note("not_judged", "k", "cannot run in the interpreter: AttributeError: 'float' has no attribute 'to'", "a")
    report = Report("kernel", cases=["a"], notes=[note])
    assert Entry("kernel", "", report).verdict == "partial"
    assert view.headline(report).startswith("Nothing was judged: cannot run in the interpreter")
    assert view.case_states(report) == {"a": "absent"}
    text = Reader(page.render([report])).visible_text()
    assert "all within what rounding allows" not in text


def test_a_long_finding_is_a_short_title_and_the_rest_below_it():
    report = samples.failing()
    text = "y exceeds its bound up to 2.6e+05 times: every element; 3 of 3 elements (100 %); worst at [0, 0]: got 0.25"
    report.findings = [dataclasses.replace(report.findings[0], text=text)]
    section = view.section(Entry("k", report=report))
    assert section.title == "y exceeds its bound up to 2.6e+05 times: every element."
    assert section.rest == "3 of 3 elements (100 %); worst at [0, 0]: got 0.25."
    assert section.headline == f"{text}." and section.rest in Reader(page.render([report])).visible_text()


def test_a_replay_leads_with_its_answer():
    report = samples.failing()
    report.notes.append(Note("replay", "", "reproduced: the verdict was fail, here it is fail", report.cases[0]))
    report.environment["replay"] = {"answer": "reproduced", "versions": {}, "bits": []}
    text = page.render([report])
    assert "<h1>Reproduced: the verdict was fail, here it is fail.</h1>" in text
    assert text.count("here it is fail") == 1 and "&#39;answer&#39;" not in text


def test_the_rows_that_are_not_right_come_first():
    report = samples.failing()
    rows = view.section(Entry("k", report=report), max_rows=12).rows
    states = [row.state for row in rows]
    assert len(rows) == 12 < len(report.rows) and states == sorted(states, key=lambda state: state == "ok")


def test_numbers_and_options_stay_whole_and_code_is_code():
    text = prose.prose(
        "got -0.064 and 1.1e-08 <b>, 512 (100 %), run with --thorough, in_place `other` at 8..23 of 2^-12"
    )
    whole = re.findall(r'<span class="whole">([^<]*)</span>', text)
    assert whole == ["-0.064", "1.1e-08", "100 %", "--thorough", "-12"]
    assert "&lt;b&gt;" in text and "<code>other</code>" in text and "in_place" in text
    assert Reader(text).visible_text().startswith("got -0.064 and 1.1e-08 <b>, 512 (100 %), run")


def test_the_surest_finding_leads_whatever_the_order_they_came_in():
    report = samples.failing()
    report.findings.reverse()
    report.findings.insert(0, Finding("QUALITY", "ensemble", "h_in", None, None, None, "h_in is poor", "x"))
    assert view.headline(report) == "the backward wrote over its input phi: 96 of 6144 bytes differ afterwards."


def test_a_page_without_failures_claims_only_what_was_tried_and_says_what_was_not():
    remarks = ["Run: 2 cases with all probes.", "Not run: 21 large cases, which a GPU runs."]
    for reports in ([samples.passing()], [samples.passing(), samples.passing("mhc.post")]):
        text = Reader(page.render(reports, remarks=remarks)).visible_text()
        assert "Everything tried here holds" in text[:200] and "certified" not in text
        assert text.count(remarks[1]) == 1 and 0 < text.find(remarks[1]) < 700 and remarks[0] in text


def test_the_worst_check_leads_with_its_finding():
    mild = samples.failing("mild")
    mild.findings = [dataclasses.replace(f, rung="SYSTEMATIC", text="a slope") for f in mild.findings]
    text = Reader(page.render([samples.passing(), mild, samples.failing("gross")])).visible_text()
    assert "2 of 3 checks are rejected: gross and mild. gross: bias.grad is wrong" in text[:400]
    checks = text.partition("Every check, the worst first")[2]
    assert checks.find("gross") < checks.find("mild") < checks.find("mhc.pre")


def test_a_single_number_has_no_picture():
    report = samples.failing()
    report.maps = {"one": samples.error_map(height=1, width=1)}
    assert view.shown_maps(report, 4) == {}
    report.maps["row"] = samples.error_map(tensor="h_in", case=report.findings[0].case, height=1, width=2)
    report.findings.append(dataclasses.replace(report.findings[0], tensor="h_in"))
    assert list(view.shown_maps(report, 4)) == ["row"]


def test_observations_are_folded_away_and_notes_to_act_on_are_not():
    notes = [Note("tie", "index", "3 rows tie", "a"), Note("refused_layout", "x", "x must be dense", "a")]
    report = Report("kernel", cases=["a"], notes=notes)
    text = page.render([report])
    before, _, folded = text.partition("Observations that ask for nothing: tie")
    assert "x must be dense" in before and "3 rows tie" not in before and "3 rows tie" in folded


def test_the_matrix_has_a_square_for_every_case_and_a_reason_for_every_absence():
    reader = Reader(PAGES["verify"]())
    squares = [a["class"] for tag, a, _ in reader.tags if tag == "rect" and "s" in a.get("class", "").split()]
    assert len(squares) == 9 + 1 + 6 + 40 + 3 + 2
    assert squares.count("s bad") >= 6 + 1
    assert "needs a CUDA device; the inputs are on cpu" in reader.visible_text()
    assert "triton interpreter" in reader.visible_text()
    for remark in REMARKS:
        assert remark in reader.visible_text()


def test_the_stage_strip_keeps_the_golden_order_and_marks_the_first_wrong_stage():
    report = samples.failing()
    report.rows = samples.rows(report.cases, bad=("h_in", "x.grad"))
    report.findings = [f for f in report.findings if f.tensor == "x.grad"]
    report.stages = ["unseen", *samples.STAGES]
    strip = view.stage_strip(report)
    assert [box["name"] for box in strip] == report.stages
    assert [box["name"] for box in strip if box["first"]] == ["h_in"]
    assert strip[0]["word"] == "not named by the candidate"


def test_an_input_and_a_call_are_no_stages():
    report = samples.failing()
    report.findings += [Finding("CERTAIN", "layouts", "forward", None, None, None, "refused", report.cases[0])]
    assert {f.tensor for f in report.findings} >= {"phi", "forward"}
    assert [box["name"] for box in view.stage_strip(report)] == samples.STAGES


def test_a_saved_result_and_its_stage_are_one_box():
    report = samples.passing()
    report.rows += [r.__class__(**{**r.__dict__, "tensor": "saved.h_mix", "kind": "saved"}) for r in report.rows[:1]]
    assert [box["name"] for box in view.stage_strip(report)] == samples.STAGES


def test_findings_of_other_cases_are_folded_away():
    report = samples.failing()
    other = Finding("CERTAIN", "values", "h_in", None, 3.0, 1.0, "h_in is wrong here, too", report.cases[0])
    report.findings.append(other)
    reader = Reader(page.render([report]))
    assert "1 finding in other cases" in reader.visible_text()
    articles = [parents for tag, a, parents in reader.tags if tag == "article"]
    assert ["details" in parents for parents in articles] == [False, False, False, True]


def test_maps_draw_the_borders_of_segments_and_show_nan_in_another_colour():
    text = page.render([samples.failing()])
    assert 'class="border"' in text and 'class="en"' in text and "segments pre, post, res" in text


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("same", [-INF, INF, NAN], ids=["-inf", "inf", "nan"])
def test_a_map_shows_no_error_where_golden_and_candidate_are_the_same_infinity_or_nan(same):
    def golden(x):
        return torch.where(x > 0, same, x)

    x = torch.randn(40, 300)
    x[0] = -1.0
    right = {"x": x}
    wrong = assay.Target(lambda x: torch.cat([-golden(x)[:1], golden(x)[1:]]), golden, cases=right, backward=None)
    (m,) = assay.check(wrong, raises=False).maps.values()
    assert m.shape == (40, 300) and len(m.error_over_limit[0]) < 300, "folded"
    assert m.error_over_limit[0][0] > 1 and not any(v for row in m.error_over_limit[1:] for v in row)
    beyond = len(svg.ERROR_STEPS)
    assert maps.map_view(m, 128)["error"].count(f'class="e{beyond}"') == 1


def test_a_right_target_with_a_mask_has_no_cell_beyond():
    def causal(x):
        return x.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -INF)

    target = assay.Target(causal, causal, cases={"x": torch.randn(6, 6)}, backward=None, name="causal")
    report = assay.check(target)
    (m,) = report.maps.values()
    assert not any(v for row in m.error_over_limit for v in row)


def test_many_large_reports_together_stay_below_two_megabytes():
    reports = [samples.passing(f"family.op{k} on triton", 20, seed=k) for k in range(25)]
    reports += [samples.failing(f"family.bad{k}", 12) for k in range(8)]
    assert len(page.render(reports).encode()) <= page.LIMIT_BYTES


def test_a_page_is_written_into_a_folder_that_does_not_exist_yet(tmp_path):
    path = page.write([samples.passing()], tmp_path / "new" / "report.html")
    assert Path(path).read_text(encoding="utf-8").startswith("<!doctype html>")
    samples.passing().to_html(str(tmp_path / "own.html"))
    assert (tmp_path / "own.html").stat().st_size > 5000


def test_without_reports_there_is_no_page():
    with pytest.raises(ValueError, match="at least one report"):
        page.render([])


# contrast, from the colours of the style sheet

STYLE = (Path(page.__file__).parent / "style.css").read_text(encoding="utf-8")
TEXT = ("ink", "soft", "gold", "ok", "bad", "note", "qual")  # every colour of letters and signs
GROUNDS = ("paper", "card")


def palette(scheme):
    light, _, dark = STYLE.partition("@media (prefers-color-scheme: dark)")
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", dark.partition("\n}\n")[0]))
    return colours


def luminance(colour):
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("ink", TEXT)
def test_letters_have_a_contrast_of_at_least_four_and_a_half(ink, ground, scheme):
    colours = palette(scheme)
    a, b = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
    assert (a + 0.05) / (b + 0.05) >= 4.5


def test_the_two_schemes_differ_and_no_letter_is_set_in_another_colour():
    assert palette("light")["paper"] != palette("dark")["paper"]
    named = re.findall(r"(?<![\w-])color: var\(--(\w+)\)", STYLE)
    assert set(named) <= set(TEXT)
    assert not re.findall(r"(?<![\w-])color: (?!var|inherit)[^;]*#", STYLE)
