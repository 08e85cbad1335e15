"""The smallest case still tells what is wrong: the last steps are taken back where it does not."""

import weakref

import torch

from goldsmith import assay
from goldsmith.assay.diagnosis import collect, smallest_case
from goldsmith.assay.diagnosis.shrink import shrink


@assay.case(T=[4], D=[8])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def drawn(trial):
    return trial.case.build(torch.float32, "cpu", 0)


def always(trial):
    drawn(trial)
    return True


def test_the_last_steps_are_taken_back_until_it_tells():
    asked = []

    def tells(trial):
        asked.append(trial)
        return bool(drawn(trial)["w"].any())

    found = shrink(rows[0], always, least={"T": 1, "D": 1}, tells=tells)
    assert bool(drawn(found.trial)["w"].any()) and not bool(drawn(found.trial)["x"].any())
    assert found.steps[-1] == "x: zeros" and len(asked) <= 4


def test_nothing_is_taken_back_where_the_smallest_tells():
    found = shrink(rows[0], always, least={"T": 1, "D": 1})
    assert not bool(drawn(found.trial)["w"].any()) and found.steps[-1] == "w: zeros"


def test_where_only_the_whole_case_tells_it_stays():
    found = shrink(rows[0], always, tells=lambda trial: trial.case.sizes == {"T": 4, "D": 8})
    assert found.steps == () and found.case.sizes == {"T": 4, "D": 8}


def test_where_not_even_the_whole_case_tells_the_smallest_is_shown():
    found = shrink(rows[0], always, tells=lambda trial: False)
    assert found.steps and all(found.case.sizes[name] < size for name, size in {"T": 4, "D": 8}.items())


def test_a_bundle_diagnosed_again_is_told_as_before(tmp_path):
    """Of ones, T = 1 and D = 2, a sum that is one short is also a shift."""

    def golden(x, w):
        return assay.stage("p", x * w).sum(-1)

    def short(x, w):
        return (x * w)[:, :-1].sum(-1)

    found = assay.diagnose(assay.Target(short, golden, cases=rows, name="short"), out=tmp_path)
    kept = assay.load_bundle(found.bundle)
    again = assay.diagnose(assay.Target(short, golden, cases={**kept.inputs}, name="short"))
    assert found.first_wrong_stage == again.first_wrong_stage
    assert found.causes[0].id == again.causes[0].id == "off_by_one"


def test_of_the_smaller_cases_one_is_kept_and_the_one_that_tells_is_run_again(monkeypatch):
    """An examination is many times as large as its inputs: three exist, the whole case's, the last and the present one.

    Where steps are taken back, the case that is shown is not the last one that was tried.
    """
    made, at_once, examined = [], [], smallest_case.examine

    def examine(*arguments, **options):
        report, examinations = examined(*arguments, **options)
        made.extend(map(weakref.ref, examinations))
        at_once.append(sum(examination() is not None for examination in made))
        return report, examinations

    def told(self, trial):
        return trial.case.sizes["T"] > 1

    of = assay.Target(lambda x, w: (x * w).sum(-1) * 1.5, lambda x, w: (x * w).sum(-1), cases=rows, name="factor")
    report, (whole,) = examined(of, [rows[0]], torch.float32, "cpu", 0, frozenset({"values"}), None, until_failing=True)
    evidence = collect.begin(whole, report)
    collect.collect(whole, evidence, collect.Depth(runs=(), influence=(), whatif=frozenset()))
    monkeypatch.setattr(smallest_case, "examine", examine)
    monkeypatch.setattr(smallest_case._Tells, "__call__", told)
    found, small = smallest_case.smallest_case(
        whole, evidence, "y", "wrong_factor", cause_shown="wrong_factor", spent=lambda more: False
    )
    assert len(made) >= 6 and max(at_once) <= 2 and found.steps == ("D: 8 -> 1",)
    assert small.case is found.case and small.material.inputs["x"].shape == (4, 1) and "y" in small.bad
