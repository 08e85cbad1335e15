"""The smallest case still shows the cause; otherwise the last steps are undone."""

import weakref

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.diagnosis import collect
from goldsmith.assay.diagnosis.shrink import smallest_case
from goldsmith.assay.diagnosis.shrink.steps import shrink

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[4], D=[8])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def drawn(trial):
    return trial.case.build(torch.float32, "cpu", 0)


def always(trial):
    drawn(trial)
    return True


def test_the_last_steps_are_undone_until_the_case_shows_the_cause():
    requests = []

    def tells(trial):
        requests.append(trial)
        return bool(drawn(trial)["w"].any())

    shrunk = shrink(rows[0], always, least={"T": 1, "D": 1}, shows_cause=tells)
    assert bool(drawn(shrunk.trial)["w"].any()) and not bool(drawn(shrunk.trial)["x"].any())
    assert shrunk.steps[-1] == "x: zeros" and len(requests) <= 4


def test_nothing_is_undone_if_the_smallest_case_shows_the_cause():
    shrunk = shrink(rows[0], always, least={"T": 1, "D": 1})
    assert not bool(drawn(shrunk.trial)["w"].any()) and shrunk.steps[-1] == "w: zeros"


def test_the_whole_case_stays_if_only_it_shows_the_cause():
    shrunk = shrink(rows[0], always, shows_cause=lambda trial: trial.case.sizes == {"T": 4, "D": 8})
    assert shrunk.steps == () and shrunk.case.sizes == {"T": 4, "D": 8}


def test_the_smallest_case_is_used_if_not_even_the_whole_one_shows_the_cause():
    shrunk = shrink(rows[0], always, shows_cause=lambda trial: False)
    assert shrunk.steps and all(shrunk.case.sizes[name] < size for name, size in {"T": 4, "D": 8}.items())


def test_a_bundle_gets_the_same_diagnosis_again(tmp_path):
    """With ones, T = 1 and D = 2, a sum that is one short is also a shift."""

    def golden(x, w):
        return assay.stage("p", x * w).sum(-1)

    def short(x, w):
        return (x * w)[:, :-1].sum(-1)

    diagnosis = assay.diagnose(assay.Target(short, golden, cases=rows, name="short"), out=tmp_path)
    kept = assay.load_bundle(diagnosis.bundle)
    again = assay.diagnose(assay.Target(short, golden, cases={**kept.inputs}, name="short"))
    assert diagnosis.first_wrong_stage == again.first_wrong_stage
    assert diagnosis.causes[0].id == again.causes[0].id == "off_by_one"


def test_one_smaller_case_stays_in_memory_and_the_chosen_one_runs_again(monkeypatch):
    """An examination takes many times the memory of its inputs: only the whole case's, the last and the current one
    exist.

    If steps are undone, the displayed case is not the last one that was tried.
    """
    outputs, at_once, examined = [], [], smallest_case.examine

    def examine(*arguments, **options):
        report, examinations = examined(*arguments, **options)
        outputs.extend(map(weakref.ref, examinations))
        at_once.append(sum(examination() is not None for examination in outputs))
        return report, examinations

    def tells(self, trial):
        return trial.case.sizes["T"] > 1

    of = assay.Target(lambda x, w: (x * w).sum(-1) * 1.5, lambda x, w: (x * w).sum(-1), cases=rows, name="factor")
    report, (whole,) = examined(of, [rows[0]], torch.float32, "cpu", 0, frozenset({"values"}), None, until_failing=True)
    evidence = collect.begin(whole, report)
    collect.collect(whole, evidence, collect.Depth(runs=(), influence=(), whatif=frozenset()))
    monkeypatch.setattr(smallest_case, "examine", examine)
    monkeypatch.setattr(smallest_case._ShowsCause, "__call__", tells)
    shrunk, small = smallest_case.smallest_case(
        whole, evidence, "y", "wrong_factor", cause_shown="wrong_factor", spent=lambda more: False
    )
    assert len(outputs) >= 6 and max(at_once) <= 2 and shrunk.steps == ("D: 8 -> 1",)
    assert small.case is shrunk.case and small.material.inputs["x"].shape == (4, 1) and "y" in small.bad


def test_integers_that_number_no_groups_need_no_list_of_all_numbers_below_them():
    @assay.case(T=[5])
    def hashes(make, T):
        return {"x": make.normal(T), "keys": make.integers(10**14, 10**15, T)}

    of = assay.Target(lambda x, keys: x * (keys % 7) * 1.5, lambda x, keys: x * (keys % 7), cases=hashes, name="hash")
    examine = smallest_case.examine
    report, (whole,) = examine(
        of, [hashes[0]], torch.float32, "cpu", 0, frozenset({"values"}), None, until_failing=True
    )
    assert collect.begin(whole, report).unused == {}
