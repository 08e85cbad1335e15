"""Missing gradients, freed memory, state between calls, and additions that are stores."""

import functools
import threading
import time
from dataclasses import replace

import pytest
import torch

from assay.diagnosis.faulty import draw, pair, report
from goldsmith import assay
from goldsmith.assay.diagnosis import collect
from goldsmith.assay.diagnosis.causes.rank import rank
from goldsmith.assay.diagnosis.facts.evidence import Evidence, Influence, RunFact, StageState
from goldsmith.assay.report.results import Finding, Location
from goldsmith.assay.support.candidate_state import CandidateState

pytestmark = pytest.mark.sweep(8)


def first(diagnosis):
    return (diagnosis.verdict, diagnosis.first_wrong_stage, diagnosis.causes[0].id), str(diagnosis)


@assay.case(T=[6], D=[8], E=[5])
def tokens(make, T, D, E):
    return {"x": make.normal(T, D), "w": make.normal(D, E)}


def layer(x, w):
    return torch.tanh(assay.stage("h", x @ w))


def test_a_gradient_that_is_lost_on_the_way_is_not_computed():
    for kernel in (lambda x, w: torch.tanh(x.detach() @ w), lambda x, w: torch.tanh(x @ w).detach()):
        diagnosis = assay.diagnose(assay.Target(kernel, layer, cases=tokens, name="lost"), probes="quick")
        cause, text = first(diagnosis)
        assert cause == ("fail", "x.grad", "not_computed"), text
        assert "no_grad()" in diagnosis.causes[0].evidence[1] and not diagnosis.causes[0].weak
        assert [c.id for c in diagnosis.causes] == ["not_computed"]


def test_memory_that_the_kernel_fills_with_nan_and_then_reads_was_freed():
    pool = torch.empty(256)

    def kernel(x, w):
        slot = pool[: w.numel()].view(w.shape)
        slot.copy_(w)
        half = x[:, :4] @ slot[:4]
        pool.fill_(float("nan"))  # marks free memory
        return torch.tanh(assay.stage("h", half + x[:, 4:] @ slot[4:]))

    diagnosis = assay.diagnose(assay.Target(kernel, layer, cases=tokens, backward=None), probes="quick")
    cause, text = first(diagnosis)
    assert cause == ("fail", "h", "use_after_free"), text
    assert "the candidate itself fills memory with NaN at " in diagnosis.causes[0].evidence[1]
    assert diagnosis.traced[1].endswith("the memory had been freed.")


def test_clearing_the_state_reveals_a_configuration_of_the_previous_case():
    blocks = {}

    @assay.case(T=[4], D=[24, 40])
    def widths(make, T, D):
        return {"x": make.normal(T, D)}

    def kernel(x):
        return 2 * assay.stage("h", x[:, : blocks.setdefault("block", x.shape[1])].sum(-1))

    target = assay.Target(kernel, lambda x: 2 * assay.stage("h", x.sum(-1)), cases=widths)
    diagnosis = assay.diagnose(target)
    cause, text = first(diagnosis)
    assert cause == ("fail", "h", "stale_config") and diagnosis.case["name"].startswith("widths[T=4,D=40"), text
    assert blocks == {"block": 24}


def test_state_is_cleared_and_restored():
    state, seen = {"a": torch.zeros(2)}, []

    @functools.lru_cache
    def slow(n):
        seen.append(n)
        return n

    def kernel(x):
        state["b"] = slow(len(x))
        return x * 1

    kept = CandidateState(assay.Target(kernel, lambda x: x * 1, cases={"x": torch.ones(3)}))
    assert not kept.changed
    kernel(torch.ones(3))
    assert kept.changed
    before = dict(state)
    with kept.cleared():
        assert list(state) == ["a"] and state["a"] is before["a"]
        kernel(torch.ones(3))
        assert seen == [3, 3]
    assert state == before and list(state) == ["a", "b"]


def test_only_one_of_several_additions_to_an_element_survives():
    def halves(sx, sy, i):
        return (sx[:, :, None] + sy[:, None, :]).flatten(1).gather(1, i)

    def backward_of_halves(sx, sy, i, grad_y):
        dx, dy = torch.zeros_like(sx), torch.zeros_like(sy)
        n = sx.shape[1]
        return {"sx": dx.scatter_(1, i // n, grad_y), "sy": dy.scatter_add_(1, i % n, grad_y)}

    @assay.case(T=[24], N=[8], k=[4])
    def pairs(make, T, N, k):
        chosen = torch.stack([make.permutation(N * N)[:k] for _ in range(T)])
        return {"sx": make.normal(T, N), "sy": make.normal(T, N), "i": chosen}

    diagnosis = assay.diagnose(assay.Target(halves, halves, cases=pairs, backward=backward_of_halves), probes="quick")
    cause, text = first(diagnosis)
    assert cause == ("fail", "sx.grad", "lost_update"), text
    assert "one is left: a store stands where an addition should" in diagnosis.causes[0].evidence[0]


def test_a_product_of_two_transposed_operands_is_recognised():
    @assay.case(N=[9])
    def square(make, N):
        return {"a": make.normal(N, N), "b": make.normal(N, N)}

    diagnosis = assay.diagnose(
        assay.Target(lambda a, b: a.mT @ b.mT, lambda a, b: a @ b, cases=square, backward=None), probes="quick"
    )
    cause, text = first(diagnosis)
    assert cause == ("fail", "y", "transposed") and diagnosis.causes[0].params["operand"] == "both", text


def test_the_beginning_of_a_sum_is_lost_if_iterations_replace_each_other():
    def kernel(x, w):
        for start in (0, 4):
            h = x[:, start : start + 4] @ w[start : start + 4]
        return torch.tanh(assay.stage("h", h))

    diagnosis = assay.diagnose(assay.Target(kernel, layer, cases=tokens, backward=None), probes="quick")
    cause, text = first(diagnosis)
    assert cause == ("fail", "h", "overwritten_accumulator"), text


def test_unwritten_columns_of_zeros_are_no_truncated_reduction():
    golden = draw(12, 18)
    got = golden.clone()
    got[:, 16:] = 0
    unread = {"b[1]": Influence("b", 1, ((16, 17),), outputs=("y",))}
    causes = rank(pair(got, golden, influence=unread), {})
    assert causes[0].id == "never_written" and "b[axis 1: 16..17]" in causes[0].evidence[1]
    assert "truncated_reduction" not in {c.id for c in causes}


def test_one_of_several_additions_survives_in_the_middle_of_an_axis():
    golden = draw(6, 18)
    part = {"a[1]": Influence("a", 1, ((0, 15), (32, 39)), outputs=("y",))}
    causes = rank(pair(golden + draw(6, 18, seed=3), golden, influence=part, ratios=[], permutations=[]), {})
    assert causes[0].id == "lost_update" and "only 16..31 has influence" in causes[0].evidence[0]


def test_a_store_one_past_the_end_of_a_row_is_off_by_one():
    for row, cause in ((1, "off_by_one"), (4, "wrong_mask")):
        where = Location("y", axes={"M": [(row, row)], "N": [(0, 0)]}, fraction=0.01, text="")
        checked = report("NaN in a[axis M = 0] reaches y", kind="leak", values={"input": "a", "axis": 0, "index": 0})
        checked.findings = [replace(checked.findings[0], probe="taint", location=where)]
        golden = draw(6, 18)
        assert rank(pair(golden, golden, report=checked), {})[0].id == cause


def test_bytes_of_another_format_are_recognised_among_numbers_of_any_size():
    golden = draw(12, 32)
    got = draw(12, 32, seed=4) * torch.exp2(torch.arange(384.0).view(12, 32) - 192)
    got[3, 5] = float("nan")
    assert rank(pair(got, golden, ratios=[], permutations=[]), {})[0].id == "wrong_format"


def test_a_result_that_a_stage_is_named_after_is_isolated_too():
    def golden(x, w):
        return assay.stage("y", x @ w)

    def kernel(x, w):
        return assay.stage("y", x @ w * 1.5)

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    assert first(diagnosis)[0] == ("fail", "y", "wrong_factor"), str(diagnosis)
    assert next(s for s in diagnosis.stages if s.name == "y").state == "culprit"


def test_a_write_past_the_end_of_zeros_is_seen():
    def kernel(x, w):
        y = torch.zeros(x.shape[0], w.shape[1])
        y += x @ w
        torch.as_strided(y, (1,), (1,), y.numel())[0] = 1.0
        return torch.tanh(y)

    report = assay.check(assay.Target(kernel, layer, cases=tokens, backward=None), probes="quick", raises=False)
    assert any(f.probe == "guard" and "4 bytes written past the end" in f.text for f in report.findings), str(report)


def test_a_stage_that_holds_indices_does_not_keep_the_others_from_being_isolated():
    def golden(x, w):
        at = assay.stage("at", x.argsort(-1)).long()
        return assay.stage("h", x.gather(-1, at)) @ w

    def kernel(x, w):
        return assay.stage("h", 1.5 * x.sort(-1).values) @ w

    diagnosis = assay.diagnose(assay.Target(kernel, golden, cases=tokens, backward=None), probes="quick")
    assert first(diagnosis)[0] == ("fail", "h", "wrong_factor"), str(diagnosis)
    assert "isolation" not in diagnosis.evidence.left_out


def test_memory_that_is_written_after_the_call_has_returned_is_missing_a_wait(monkeypatch):
    """The copies arrive while the assay watches the kernel's buffers, however busy the machine is."""
    under_way = []

    def arrive(seconds=0.0):
        while under_way:
            let_go, thread = under_way.pop()
            let_go.set()
            thread.join()

    def kernel(x, w, wait=False):
        staged, let_go = torch.empty(w.shape), threading.Event()

        def copy():
            let_go.wait()
            staged.copy_(w.detach())

        under_way.append((let_go, threading.Thread(target=copy)))
        under_way[-1][1].start()
        if wait:
            arrive()
        return torch.tanh(assay.stage("h", x @ assay.stage("staged", staged)))

    monkeypatch.setattr(time, "sleep", arrive)

    def golden(x, w):
        return torch.tanh(assay.stage("h", x @ assay.stage("staged", w * 1)))

    for wait in (False, True):
        target = assay.Target(functools.partial(kernel, wait=wait), golden, cases=tokens, backward=None)
        diagnosis = assay.diagnose(target, probes="quick")
        arrive()
        if wait:
            assert diagnosis.ok, str(diagnosis)
        else:
            assert first(diagnosis)[0] == ("fail", "staged", "missing_sync"), str(diagnosis)
            assert (
                "bytes of the kernel's own buffers were written after it had returned"
                in diagnosis.causes[0].evidence[0]
            )


def test_an_inheriting_stage_gives_way_to_an_earlier_one_that_fails_in_another_run():
    def reported_stage(state, run_first):
        stages = [StageState("inv_rms", "stage", 0.2, 0.2, "ok"), StageState("x_hat", "stage", 2.0, 0.1, state)]
        runs = {"scale 2^-12": RunFact("scale 2^-12", ("y",), first=run_first)}
        evidence = Evidence(report(), stages=[*stages, StageState("y", "output", 2.0, 0.1, "inherited")], runs=runs)
        evidence.first_wrong = "x_hat"
        collect._before_what_inherits(evidence)
        return evidence.first_wrong

    assert reported_stage("inherited", "inv_rms") == "inv_rms"
    assert reported_stage("culprit", "inv_rms") == "x_hat"
    assert reported_stage("inherited", "y") == reported_stage("inherited", "") == "x_hat"


def test_a_bias_visible_in_only_one_layout_is_no_layout_fault():
    golden = draw(6, 18)
    for rung, named in (("CERTAIN", True), ("SYSTEMATIC", False)):
        checked = report()
        run, text = "layout:transposed(x)", "y exceeds what noise explains"
        checked.findings = [Finding(rung, "layouts", "y", None, None, None, text, "c", kind="noise", run=run)]
        assert ("layout_assumption" in {c.id for c in rank(pair(golden, golden, report=checked), {})}) == named


@assay.case(N=[5], C=[3])
def saved_rows(make, N, C):
    return {"x": make.normal(N, C)}


def unit(x):
    length = x.square().sum(1).sqrt()
    return x / length[:, None], length


def dense_gradient(x, y, length, grad_y):
    g = grad_y.as_strided(x.shape, (x.shape[1], 1))
    return {"x": (g - y * (g * y).sum(1, keepdim=True)) / length[:, None]}


def test_a_gradient_read_as_dense_is_no_wrong_saved_tensor():
    """With the golden's saved tensors and with its own it is right: only another layout makes it wrong."""
    target = assay.Target(
        unit, unit, cases=saved_rows, name="unit", outputs=("y", "length"), saved=("length",), backward=dense_gradient
    )
    diagnosis = assay.diagnose(target)
    assert diagnosis.first_wrong_stage == "x.grad"
    assert diagnosis.causes[0].id in ("layout_assumption", "expanded_gradient")
    assert "wrong_saved_tensor" not in [c.id for c in diagnosis.causes]
