"""Every rule puts its own fault first, is silent on right kernels, and scores lower on other faults."""

import functools

import pytest

from assay import kernels
from assay.diagnosis.fault_table import TABLE, G
from assay.diagnosis.faulty import checked, pair, report
from goldsmith.assay.diagnosis.causes.rank import rank, strength
from goldsmith.assay.diagnosis.causes.rules import CATALOGUE, NOTES, matches
from goldsmith.assay.diagnosis.facts.evidence import Evidence, Influence, MemoryFact, RunFact

IDS = """never_written not_computed
truncated_reduction off_by_one wrong_mask wrong_axis overwritten_accumulator uninitialised_accumulator lost_update
low_precision_accumulation missing_rescale missing_term repeated_term sign_flip wrong_factor scale_bias
transposed permuted shifted wrong_stride swapped_results dtype_width wrong_format layout_assumption expanded_gradient
overrun stray_read aliased input_modified use_after_free stale_state stale_copy stale_config race missing_sync
overflow missing_max_shift nan_swallowed absolute_eps truncating_store index_overflow
invalid_index wrong_decision wrong_saved_tensor missing_partition mask_shift dropout_mismatch empty_group single_element
exception bad_config reference_fault unknown""".split()
NAMES = [f"{cause}: {name}" for cause, name, _ in TABLE]


@functools.cache
def ranked(i):
    return rank(TABLE[i][2](), {})


def test_the_catalogue_is_closed():
    assert sorted(CATALOGUE) == sorted(IDS)
    assert all(entry.text and entry.mend for entry in CATALOGUE.values())
    assert not set(NOTES) & set(CATALOGUE)
    by_edits_alone = {"unknown", "missing_rescale", "mask_shift", "missing_term", "wrong_axis"}
    assert {cause for cause, _, _ in TABLE} == set(IDS) - by_edits_alone


@pytest.mark.parametrize("i", range(len(TABLE)), ids=NAMES)
def test_a_rule_names_its_own_fault_first(i):
    causes = ranked(i)
    assert causes[0].id == TABLE[i][0], [(c.id, c.score, c.evidence) for c in causes[:4]]
    assert causes[0].evidence and all(causes[0].evidence) and causes[0].mend and 0.5 <= causes[0].score <= 1
    assert len(causes) == 1 or causes[1].score < causes[0].score


@pytest.mark.parametrize("i", range(len(TABLE)), ids=NAMES)
def test_a_rule_is_lower_on_other_faults(i):
    cause = TABLE[i][0]
    others = [j for j in range(len(TABLE)) if TABLE[j][0] != cause]
    for j in others:
        scores = {c.id: c.score for c in ranked(j)}
        assert scores.get(cause, 0) < scores[TABLE[j][0]], NAMES[j]


def right():
    again = ("second_call", "other_inputs", "back", "repeat 1", "1 thread")
    runs = {n: RunFact(n) for n in (*again, "layout transposed(x)", "scale 2^12", "scale 2^-12", "flat", "offset")}
    return pair(G.float(), G, report=report(verdict="pass"), runs=runs)


@pytest.mark.parametrize("cause", IDS)
def test_a_rule_is_silent_on_a_right_kernel(cause):
    assert cause not in matches(right())
    assert rank(right()) == []


def test_a_check_that_passes_has_no_causes():
    evidence = checked(kernels.plain_sum, probes="quick")
    assert evidence.report.ok and rank(evidence) == [] and matches(evidence) == {}


@pytest.mark.parametrize("same", [True, False])
def test_a_kernel_that_is_always_wrong_has_no_state_race_or_layout(same):
    again = "zeroed memory,second call,other inputs,back,repeat 1,repeat 2,1 thread,2 threads,golden saved"
    other = "layout transposed,layout stride0,scale 2^12,scale 2^-12,offset,flat"
    names = f"{again},{other}".split(",")
    runs = {n: RunFact(n, wrong=("y",), same=same, difference=1e-7) for n in names}
    late = "stale_state stale_copy stale_config race missing_sync layout_assumption expanded_gradient absolute_eps"
    assert not set(late.split()) & set(matches(pair(G * 3, G, runs=runs)))


def test_orders_that_differ_within_the_noise_are_no_race():
    runs = {n: RunFact(n, same=False, difference=1e-7) for n in ("repeat 1", "repeat 2", "2 threads")}
    assert matches(pair(G, G, runs=runs, report=report(verdict="pass"))) == {}


def test_repeats_that_differ_by_the_size_of_the_error_are_a_race():
    got = G.clone()
    got[3] = 0
    runs = {
        n: RunFact(n, wrong=("y",), same=False, difference=float(G[3].abs().max())) for n in ("repeat 1", "repeat 2")
    }
    assert rank(pair(got, G, runs=runs), {})[0].id == "race"


@pytest.mark.parametrize("influence", [Influence("a", 1, none=True), Influence("a", 1, missing=((0, 39),))])
def test_an_input_without_any_influence_is_no_shortened_reduction(influence):
    evidence = pair(G * 0, G, influence={"a[1]": influence}, sizes={"K": 40})
    causes = rank(evidence, {})
    assert causes[0].id == "not_computed"
    assert not {"truncated_reduction", "overwritten_accumulator", "off_by_one"} & {c.id for c in causes}


def test_without_a_fitting_rule_the_cause_is_unknown_with_its_evidence():
    evidence = Evidence(report=report("y exceeds the proven bound"), tensor="y")
    (cause,) = rank(evidence)
    assert (cause.id, cause.score, cause.weak) == ("unknown", 0.0, True)
    assert cause.evidence == ["y exceeds the proven bound"] and cause.text.startswith("y is wrong: no known cause")


def test_if_the_golden_is_at_fault_it_is_the_only_cause():
    evidence = pair(G * 2, G, report=report("float32 inside", probe="golden", verdict="reference_fault"))
    assert [c.id for c in rank(evidence)] == ["reference_fault"]


def test_scores_go_through_the_calibration_and_keep_their_order():
    evidence = pair(G * 16, G, numbers={"n": 4})
    raw = {c.id: c.score for c in rank(evidence, {})}
    table = {"first": [[0.5, 0.2], [1.0, 0.4]], "other": [[0.0, 0.0], [1.0, 0.25]]}
    scores = {c.id: c.score for c in rank(evidence, table)}
    assert list(scores) == list(raw)[: len(scores)] and list(raw)[:2] == ["repeated_term", "wrong_factor"]
    assert scores["repeated_term"] == pytest.approx(0.2 + 0.2 * (raw["repeated_term"] - 0.5) / 0.5, abs=1e-4)
    assert scores["wrong_factor"] == pytest.approx(raw["wrong_factor"] / 4, abs=1e-4)
    higher = rank(evidence, {**table, "other": [[0.0, 0.9], [1.0, 0.9]]})
    assert higher[1].score == higher[0].score  # never above the previous one
    assert strength(evidence) == raw["repeated_term"]


def test_a_stray_read_of_another_tensor_is_not_the_first_fault():
    stray = MemoryFact("stray_read", "w.grad", "w.grad holds memory from outside a buffer; a stray read")
    first, own = (pair(G * 2, G, tensor=name, memory=[stray]) for name in ("product", "w.grad"))
    assert rank(first, {})[0].id != "stray_read" and rank(own, {})[0].id == "stray_read"


def test_zeros_with_lowered_inputs_indicate_the_mask_of_a_maximum():
    of_run = report("y is wrong", kind="bound", run="values:offset", values={"zeros": True, "golden": -126.0})
    evidence = pair(G, G, report=of_run, runs={"offset": RunFact("offset", wrong=("y",))})
    assert rank(evidence, {})[0].id == "wrong_mask"


@pytest.mark.parametrize(
    "text, cause",
    [
        ("scratch was written 8 bytes beyond the region that ends at byte 64 of 128", "overrun"),
        ("no luck", "exception"),
    ],
)
def test_messages_of_libraries_that_guard_their_memory_are_used(text, cause):
    evidence = Evidence(report=report("it raised", kind="raised"), tensor="backward", error=f"RuntimeError: {text}")
    assert rank(evidence, {})[0].id == cause
