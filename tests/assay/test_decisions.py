"""Discrete results are judged before the numbers that depend on them: legality, ties, margins, kinks, masks."""

import pytest
import torch

from assay.kernels import probes_of, texts
from goldsmith import assay


@assay.case(T=[32], E=[16])
def untied(make, T, E):
    return {"scores": make.normal(T, E), "x": make.normal(T), "k": 4}


@assay.case(T=[32], E=[16])
def tied(make, T, E):
    return {"scores": make.tied(T, E), "x": make.normal(T), "k": 4}


@assay.case(T=[32], E=[16])
def some_nan(make, T, E):
    scores = make.normal(T, E)
    scores[3, 5] = float("nan")
    return {"scores": scores, "x": make.normal(T), "k": 4}


def route(scores, x, k):
    index = assay.stage("index", scores.topk(k, -1).indices)
    return {"weight": scores.gather(-1, index) * x.unsqueeze(-1), "index": index}


def routed(choose):
    def kernel(scores, x, k):
        index = choose(scores.detach(), k)
        safe = index.clamp(0, scores.shape[1] - 1)
        weight = scores.float().gather(-1, safe) * x.float().unsqueeze(-1)
        return {"weight": weight.to(x.dtype), "index": index}

    return kernel


def lowest_first(scores, k):
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def highest_first(scores, k):
    return scores.shape[1] - 1 - lowest_first(scores.flip(-1), k)


def router(choose, cases=untied, ordered=True, **more):
    decisions = {"index": assay.topk(scores="scores", k="k", ordered=ordered)}
    return assay.Target(routed(choose), route, cases=cases, name="router", decisions=decisions, **more)


def changed(row, column, value):
    def choose(scores, k):
        index = scores.topk(k, -1).indices.clone()
        index[row, column] = value if isinstance(value, int) else index[row, 0]
        return index

    return choose


# top-k


@pytest.mark.parametrize("choose", [lowest_first, highest_first], ids=["lowest", "highest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_in_any_order_are_a_note_and_gradients_follow_the_candidates_choice(choose, dtype):
    report = assay.check(router(choose, tied, dtypes=(dtype,)))
    assert "tie" in {n.id for n in report.notes} or choose is lowest_first
    assert report.ok and {r.tensor for r in report.rows if r.kind == "grad"} == {"scores.grad", "x.grad"}


def test_the_note_counts_the_rows_with_another_choice():
    note = next(n for n in assay.check(router(highest_first, tied), probes="values").notes if n.id == "tie")
    assert note.tensor == "index"
    assert note.text.endswith("of 32 rows choose differently among scores that rounding cannot tell apart; all legal")


WRONG = {
    "a score that loses": lambda scores, k: scores.topk(k + 1, -1).indices[:, 1:],
    "an index twice": changed(3, 1, "first"),
    "an index out of range": changed(2, 3, 16),
}


@pytest.mark.parametrize("reason", WRONG)
def test_an_illegal_choice_is_a_certain_finding_with_its_reason(reason):
    report = assay.check(router(WRONG[reason]), probes="values decisions".split(), raises=False)
    finding = report.findings[0]
    assert (finding.rung, finding.probe, finding.tensor) == ("CERTAIN", "decisions", "index")
    assert finding.text.endswith(f"rows: {reason}") and str(report).startswith(
        "FAIL  router: index is not a legal choice"
    )


def test_minus_one_is_out_of_range():
    report = assay.check(router(changed(0, 0, -1)), probes=["decisions"], raises=False)
    assert texts(report, "decisions") == ["index is not a legal choice in 1 of 32 rows: an index out of range"]


def test_the_order_of_chosen_elements_matters_only_if_declared():
    def ascending(scores, k):
        return scores.topk(k, -1).indices.flip(-1)

    assert assay.check(router(ascending, ordered=False)).ok
    assert probes_of(assay.check(router(ascending), probes="quick", raises=False)) >= {"decisions"}


def test_rows_with_nan_among_the_scores_are_not_judged():
    def first_four(scores, k):
        chosen = torch.nan_to_num(scores, nan=torch.inf).topk(k, -1).indices
        return torch.where(scores.isnan().any(-1, keepdim=True), torch.arange(k), chosen)

    report = assay.check(router(first_four, some_nan, backward=None), probes=["decisions"], raises=False)
    assert texts(report, "decisions") == []


def test_computed_scores_have_a_margin():
    """Two experts whose scores differ by less than rounding may be exchanged; by more, they may not."""

    def golden(x, keys):
        scores = assay.stage("scores", x @ keys)
        index = assay.stage("index", scores.argmax(-1, keepdim=True))
        return {"best": scores.gather(-1, index), "index": index}

    def kernel(x, keys):
        scores = (x.double() @ keys.double()).float()
        index = scores.flip(-1).argmax(-1, keepdim=True)
        index = scores.shape[-1] - 1 - index
        return {"best": (x @ keys).gather(-1, index), "index": index}

    def target(apart):
        generator = torch.Generator().manual_seed(0)
        x, keys = torch.randn(20, 64, generator=generator), torch.randn(64, 6, generator=generator)
        keys[:, 5] = keys[:, 1] * (1 + apart)
        cases = {"x": x, "keys": keys}
        decisions = {"index": assay.argmax(scores="scores")}
        return assay.Target(kernel, golden, cases=cases, decisions=decisions, backward=None)

    report = assay.check(target(0.0), probes=["decisions"])
    assert "tie" in {n.id for n in report.notes}

    def exchanged(x, keys):
        result = kernel(x, keys)
        index = torch.where(result["index"] == 5, 1, result["index"])
        return {"best": (x @ keys).gather(-1, index), "index": index}

    wrong = target(0.01)
    object.__setattr__(wrong, "candidate", exchanged)
    assert texts(assay.check(wrong, probes=["decisions"], raises=False), "decisions")[0].endswith("a score that loses")


def test_argmax_may_keep_its_axis_or_drop_it():
    def make(keep, best):
        def golden(x):
            index = assay.stage("index", x.argmax(-1, keepdim=keep))
            return {"top": x.gather(-1, index if keep else index.unsqueeze(-1)), "index": index}

        def kernel(x):
            index = best(x, keep)
            return {"top": x.gather(-1, index if keep else index.unsqueeze(-1)), "index": index}

        cases = {"x": torch.randn(9, 7)}
        return assay.Target(kernel, golden, cases=cases, decisions={"index": assay.argmax(scores="x")})

    for keep in (True, False):
        assert assay.check(make(keep, lambda x, keep: x.max(-1, keepdim=keep).indices)).ok
        wrong = assay.check(make(keep, lambda x, keep: x.min(-1, keepdim=keep).indices), probes="quick", raises=False)
        assert wrong.findings[0].probe == "decisions"


# a kink


def kinked(kernel, mean=0.0):
    def golden(x, w):
        h = assay.stage("h", x @ w)
        mask = assay.stage("mask", (h > 0).to(h.dtype))
        return {"y": h * mask, "mask": mask}

    @assay.case(T=[8], D=[32])
    def cases(make, T, D):
        x = make.normal(T, D)
        x[0] = 0  # on the kink
        x[1, :16], x[1, 16:] = 1.0, -1.0
        return {"x": x, "w": make.ones(D, 5)}

    return assay.Target(kernel, golden, cases=cases, decisions={"mask": assay.sign(of="h")}, grads=("x", "w"))


def test_both_sides_of_a_kink_are_legal_only_within_the_bound():
    def closed(x, w):
        h = x @ w
        mask = (h.detach() >= 0).to(h.dtype)  # the golden says > 0
        return {"y": h * mask, "mask": mask}

    report = assay.check(kinked(closed), probes="quick")
    assert any(n.id == "tie" and "lie on the kink" in n.text for n in report.notes)

    def wrong(x, w):
        h = x @ w
        mask = (h.detach() >= 1).to(h.dtype)
        return {"y": h * mask, "mask": mask}

    report = assay.check(kinked(wrong), probes="quick", raises=False)
    assert report.findings[0].probe == "decisions" and "has the wrong side of h in" in report.findings[0].text


# a mask that is accepted as drawn


def test_a_dropout_mask_is_accepted_as_drawn_and_its_rate_is_tested():
    def golden(x, p):
        return x * assay.stage("mask", torch.ones_like(x)) / (1 - p)

    def dropout(rate):
        def kernel(x, p):
            mask = assay.stage("mask", (torch.rand_like(x) >= rate).to(x.dtype))
            return x * mask / (1 - p)

        return kernel

    cases, decisions = {"x": torch.randn(64, 128), "p": 0.25}, {"mask": assay.given(rate="p")}
    assert assay.check(assay.Target(dropout(0.25), golden, cases=cases, decisions=decisions)).ok
    report = assay.check(
        assay.Target(dropout(0.3), golden, cases=cases, decisions=decisions), probes="quick", raises=False
    )
    (finding,) = report.findings
    assert finding.rung == "SYSTEMATIC" and finding.limit == 0.25 and abs(finding.measured - 0.3) < 0.02
    untested = {"mask": assay.given()}
    assert assay.check(assay.Target(dropout(0.3), golden, cases=cases, decisions=untested), probes="quick").ok


# mistakes in the declaration


def test_a_decision_must_name_a_result_of_candidate_and_golden():
    def bare(scores, x, k):
        return {"weight": x * 1, "index": scores.topk(k, -1).indices}

    def check(kernel, golden, cases=untied, **decisions):
        assay.check(assay.Target(kernel, golden, cases=cases, decisions=decisions), probes="values")

    with pytest.raises(
        assay.TargetError, match="^decisions: 'choice' is neither an output nor a stage of the candidate"
    ):
        check(bare, bare, choice=assay.topk(scores="scores", k="k"))
    with pytest.raises(
        assay.TargetError, match=r"^decisions: the golden has no 'logits' \(the scores behind 'index'\)"
    ):
        check(bare, bare, index=assay.topk(scores="logits", k="k"))

    def stageless(scores, x, k):
        index = scores.topk(k, -1).indices
        return {"weight": scores.gather(-1, index) * x.unsqueeze(-1), "index": index}

    with pytest.raises(assay.TargetError, match=r"name it there, assay.stage\('index', ...\), so that it can go on"):
        check(routed(highest_first), stageless, index=assay.topk(scores="scores", k=4, ordered=False), cases=tied)
