"""Results that are unwritten memory, or are computed from it; a choice among wrong scores is not the cause."""

import torch

from goldsmith import assay


@assay.case(T=[6], D=[5])
def rows(make, T, D):
    return {"x": make.normal(T, D), "used": torch.tensor([4, 2, 4, 4, 4, 4])}


def golden(x, used):
    return torch.stack([x[t, : used[t]].mean() for t in range(len(x))])


def through_a_workspace(x, used):
    out = torch.empty(len(x))
    for t in range(len(x)):
        work = torch.empty(4)
        work[: used[t]] = x[t, : used[t]]
        out[t] = work.mean()
    return out


def not_stored(x, used):
    out = torch.empty(len(x))
    for t in range(len(x)):
        if used[t] > 2:
            out[t] = x[t, : used[t]].mean()
    return out


def test_a_workspace_that_is_read_beyond_what_was_written():
    diagnosis = assay.diagnose(assay.Target(through_a_workspace, golden, cases=rows, backward=None), budget_s=None)
    assert "uninitialised_accumulator" not in {
        cause.id for cause in diagnosis.causes
    }  # on zeroed memory it is wrong, too
    assert "y is wrong; not explained" in str(diagnosis)
    assert "it is written there, with values computed from such memory" in str(diagnosis)


def test_an_unstored_result_remains_never_written():
    diagnosis = assay.diagnose(assay.Target(not_stored, golden, cases=rows, backward=None), budget_s=None)
    assert diagnosis.causes[0].id == "never_written"


@assay.case(T=[9], G=[4])
def scores(make, T, G):
    return {"s": make.normal(T, 3 * G), "groups": G}


def chosen(s, groups, count):
    merit = assay.stage("merit", s.unflatten(1, (groups, -1)).topk(2, -1).values[..., :count].sum(-1))
    best = assay.stage("best", merit.topk(2, -1).indices)
    return merit.gather(1, best).sum(1)


def test_a_choice_among_wrong_scores_is_not_the_cause():
    target = assay.Target(
        lambda s, groups: chosen(s, groups, 1), lambda s, groups: chosen(s, groups, 2), cases=scores, backward=None,
        decisions={"best": assay.topk(scores="merit", k=2)},
    )  # fmt: skip
    diagnosis = assay.diagnose(target, budget_s=None)
    assert diagnosis.first_wrong_stage == "merit"
    assert diagnosis.causes[0].id == "off_by_one" and all(c.id != "wrong_decision" or c.weak for c in diagnosis.causes)
