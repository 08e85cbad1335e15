"""A verdict claims no more than the check knows: budgets, lost gradients, misspelt names, places of errors."""

import time

import pytest
import torch

from assay.kernels import plain_sum, target, texts
from goldsmith import assay
from goldsmith.assay.report.html.view import headline

# a spent budget


def test_a_spent_budget_is_reported_and_certifies_nothing():
    report = assay.check(target(plain_sum), budget_s=1e-9, raises=False)
    skipped = {p.name: p.reason for p in report.probes if not p.ran}
    assert len(skipped) == len(report.probes)
    assert report.verdict == "unjudged" and skipped["values"] == skipped["taint"] == "the budget of 1e-09 s was spent"
    headline = "NOT JUDGED kernel: 1 of 1 case did not run (rows[T=12,D=40]): the budget of 1e-09 s was spent"
    assert " ".join(str(report).split()).startswith(headline) and report.cases == ["rows[T=12,D=40]"]
    with pytest.raises(assay.AssayError, match="^NOT JUDGED"):
        assay.check(target(plain_sum), budget_s=1e-9)


@assay.case(N=[2, 3, 4, 5])
def lengths(make, N):
    return {"x": make.normal(N), "seconds": 0.3 if N == 3 else 0.0}


def test_cases_that_a_budget_left_out_are_named_and_do_not_count():
    def wrong_from_five(x, seconds):
        time.sleep(seconds)
        return x * (2 if len(x) < 5 else 3)

    one = assay.Target(wrong_from_five, lambda x, seconds: x * 2, cases=lengths, name="kernel")
    assert assay.check(one, probes=["values"], raises=False).verdict == "fail"
    for probes in (["values"], ["values", "repeats"]):
        report = assay.check(one, probes=probes, budget_s=0.3, raises=False)
        assert report.verdict == "unjudged" and not report.ok and not report.findings
        assert [n.case for n in report.notes if n.id == "not_run"] == ["lengths[N=4]", "lengths[N=5]"]
        message = "2 of 4 cases did not run (lengths[N=4], lengths[N=5]): the budget of 0.3 s was spent; "
        text = " ".join(str(report).split())
        assert message in text and "right in 2 cases" in text
    assert [(n.case, n.text) for n in report.notes if n.id == "budget"] == [
        ("lengths[N=3]", "the budget of 0.3 s was spent; not run on this case: repeats")
    ]
    assert headline(report) == "2 of 4 cases did not run: the budget of 0.3 s was spent."


# gradients that were lost


def test_a_candidate_that_lost_its_gradient_fails():
    def lost(x, w):
        return plain_sum(x.detach(), w.detach())

    report = assay.check(target(lost), probes="values", raises=False)
    assert [(f.rung, f.tensor) for f in report.findings] == [("CERTAIN", "x.grad")]
    assert texts(report)[0] == (
        "the candidate returns no gradient: none of its outputs requires grad, while the golden's gradient flows from "
        "y to x, w; a kernel that is forward only is declared with backward=None"
    )
    assert "from y to w;" in texts(assay.check(target(lost, grads=("w",)), probes="values", raises=False))[0]
    assert assay.check(target(lost, backward=None), probes="values").ok
    assert assay.check(target(lost, grads=()), probes="values").ok
    own = {"golden_backward": lambda x, w, grad_y: (grad_y[:, None] * w, (grad_y[:, None] * x).sum(0)), "grads": None}
    assert not assay.check(target(lost, outputs=("y",), **own), probes="values", raises=False).ok


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        size = x.square().sum(-1)
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(size)
        return (x * w).sum(-1), size

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        return g[:, None] * w, (g[:, None] * x).sum(0)


def test_one_result_that_lost_its_gradient_fails_unless_it_is_declared():
    def golden(x, w):
        return (x * w).sum(-1), x.square().sum(-1)

    def declared(x, w):
        return (x * w).sum(-1), x.detach().square().sum(-1)

    report = assay.check(target(TwoResults.apply, golden, outputs=("y", "size")), probes="values", raises=False)
    (finding,) = report.findings
    assert finding.tensor == "size" and finding.text == (
        "size of the candidate does not require grad, while the golden's gradient flows from it to x; if size has none "
        "on purpose, declare saved=('size',), or detach it in the golden"
    )
    assert assay.check(target(TwoResults.apply, golden, outputs=("y", "size"), saved=("size",)), probes="values").ok
    assert assay.check(target(TwoResults.apply, golden, saved=("y1",)), probes="values").ok
    assert assay.check(target(TwoResults.apply, declared), probes="values").ok


def test_a_gradient_that_is_zero_everywhere_may_be_left_out():
    def signs(x, w):
        return torch.sign(x.detach()) * torch.sign(w.detach())

    report = assay.check(target(signs, lambda x, w: torch.sign(x) * torch.sign(w)), probes="values")
    assert report.ok and not report.notes


# names that only a run can check

X = {"x": torch.randn(4, 5)}


def double(x):
    return x * 2


NOBODY = "takes 'zz', which is not supplied; there are: x, y, grad_y"
MISSPELT = [
    ({"saved": ("zz",)}, "saved: 'zz' is not among the outputs; there are: y"),
    ({"segments": {"zz": {"a": (0, 2)}}}, "segments: 'zz' is not among the results and stages; there are: y, x.grad"),
    ({"segments": {"x": {"a": (0, 2)}}}, "segments: 'x' is not among the results and stages; there are: y, x.grad"),
    ({"decisions": {"zz": assay.sign(of="x")}}, "decisions: 'zz' is neither an output nor a stage of the candidate"),
    ({"backward": lambda x, zz, grad_y: grad_y * 2}, f"backward: <lambda> {NOBODY}"),
    ({"backward": lambda x, zz, grad_y: grad_y * 2, "grads": ()}, f"backward: <lambda> {NOBODY}"),
    ({"backward": None, "golden_backward": lambda x, zz, grad_y: grad_y * 2}, "golden_backward: <lambda> takes 'zz'"),
]


@pytest.mark.parametrize("changes, text", MISSPELT, ids=[f"{i} {next(iter(m[0]))}" for i, m in enumerate(MISSPELT)])
def test_a_misspelt_name_is_an_error_of_the_declaration(changes, text):
    with pytest.raises(assay.TargetError) as error:
        assay.check(assay.Target(double, double, cases=X, **changes), probes="values")
    assert str(error.value).startswith(text)


def test_an_output_cannot_have_the_name_of_an_input():
    with pytest.raises(assay.TargetError, match="^outputs: 'x' is also the name of a case value"):
        assay.Target(double, double, cases=X, outputs=("x",))


def test_segments_may_name_results_stages_gradients_and_inputs_that_a_case_leaves_out():
    def golden(x, bias=None):
        h = assay.stage("h", x * 2)
        return h if bias is None else h + bias, x.square()

    part = {"a": (0, 2)}
    named = {"y": part, "h": part, "x.grad": part, "kept": part, "bias.grad": part}
    one = assay.Target(golden, golden, cases=X, outputs=("y", "kept"), saved=("kept",), segments=named)
    assert assay.check(one, probes="values").ok
    assert set(one.segments_of("saved.kept", {}, (4, 5))) == {"a"}


# where a candidate raised


def raises(x, w):
    raise ZeroDivisionError("no groups")  # the line that is named


def reshaped(x, w):
    return x.view(7, 7)  # torch raises inside


def in_a_kernel(x, w):
    class InterpreterError(Exception):
        pass

    try:
        raises(x, w)
    except ZeroDivisionError as error:
        raise InterpreterError(repr(error)) from error


def line_of(words):
    with open(__file__) as file:
        return 1 + next(i for i, line in enumerate(file) if words in line)


@pytest.mark.parametrize(
    "candidate, words",
    [(raises, "# the line that is named"), (reshaped, "# torch raises inside"), (in_a_kernel, "# the line that")],
)
def test_an_exception_of_the_candidate_is_reported_with_its_line(candidate, words):
    report = assay.check(target(candidate), probes="values", raises=False)
    (finding,) = report.to_json()["findings"]
    assert finding["text"].endswith(f"test_check_claims.py:{line_of(words)})"), finding["text"]
    assert f"test_check_claims.py:{line_of(words)})" in "".join(str(report).split())


def test_an_exception_in_the_backward_is_reported_with_its_line():
    def backward(x, w, grad_y):
        return raises(x, w)

    one = target(plain_sum, backward=backward, outputs=("y",))
    (finding,) = assay.check(one, probes="values", raises=False).findings
    assert finding.text.endswith(f"test_check_claims.py:{line_of('# the line that is named')})")


def test_a_target_whose_results_all_lack_elements_is_not_judged_and_one_empty_case_of_several_passes():
    empty = assay.Target(lambda x: x, lambda x: x, cases={"x": torch.zeros(0, 3)}, name="empty")
    report = assay.check(empty, raises=False)
    assert report.verdict == "unjudged" and "nothing was compared" in str(report)

    @assay.case(T=[0, 2])
    def rows(make, T):
        return {"x": make.normal(T, 3)}

    some = assay.Target(lambda x: x, lambda x: x, cases=rows, name="some")
    assert assay.check(some, raises=False).ok and assay.check(some, "rows[T=0]", raises=False).ok
