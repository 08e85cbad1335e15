"""watch: the first NaN or Inf, where it came from, and the norms of modules and gradients."""

import math
import re

import pytest
import torch

from assay.html_reader import Reader
from goldsmith import assay
from goldsmith.assay.nonfinite import events


class Scaled(torch.nn.Module):
    """x / std(x), which fails for rows of equal values"""

    def forward(self, x):
        return x / x.std(-1, keepdim=True)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Scaled(), torch.nn.Linear(4, 2))


def equal_rows(model):
    with torch.no_grad():
        model[0].weight[1:] = model[0].weight[:1]
        model[0].bias.zero_()


def train(model, steps=1, **how):
    with assay.watch(model, **how) as w:
        for _ in range(steps):
            model(torch.ones(3, 4)).sum().backward()
    return w


both = pytest.mark.parametrize("sync", [True, False], ids=["sync", "flags"])


@both
def test_a_sound_run_has_no_event(model, sync):
    optimizer = torch.optim.AdamW(model.parameters())
    with assay.watch(model, sync=sync) as w:
        for _ in range(3):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert w.first is None and w.events == []
    assert {row.step for row in w.rows} == {0, 1, 2}


@pytest.mark.parametrize("full", [torch.full, torch.zeros(1).new_full], ids=["full", "new_full"])
def test_filling_with_a_number_ends_no_step(full):
    with assay.watch() as w:
        full((2,), math.nan) * 2
    assert w.first.op.startswith("aten::") and w.first.likely.evidence == f"{w.first.op} was given the number nan"


@both
def test_the_first_inf_is_born_in_the_operator_of_its_module(model, sync):
    equal_rows(model)
    first = train(model, sync=sync).first
    assert (first.kind, first.phase, first.module, first.op) == ("inf", "forward", "1", "aten::div")
    assert first.born and first.total == 12 and all(i.finite for i in first.inputs)
    assert "in forward" in first.stack[0] and first.stack[0].startswith(__file__)
    if sync:
        assert (first.count, first.index) == (12, (0, 0))
        assert first.inputs[1].shape == (3, 1) and first.inputs[1].absmax == 0
        assert "3 zeros" in first.likely.evidence


@both
def test_propagating_an_event_is_no_new_event(sync):
    with assay.watch(sync=sync) as w:
        x = torch.zeros(3) / torch.zeros(3)
        ((x + 1) * 2).view(3, 1).expand(3, 2).sum()
    assert len(w.events) == 1 and w.first.op == "aten::div" and w.first.kind == "nan"


@both
def test_the_watch_does_not_watch_itself(sync):
    class Masked(torch.nn.Module):
        def forward(self, x):
            scores = (x @ x.mT).masked_fill(torch.ones(3, 3, dtype=torch.bool).triu(1), -math.inf)
            return torch.softmax(scores, -1) @ x

    masked = Masked()
    with assay.watch(masked, sync=sync) as w:
        for _ in range(3):
            masked(torch.randn(3, 4))
    assert w.first is None


@both
def test_running_statistics_that_turn_nan_are_the_same_event(sync):
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 2, 1), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].bias[0] = math.nan
    with assay.watch(model, sync=sync) as w:
        for _ in range(2):
            model(torch.randn(2, 2, 5)).sum().backward()
    assert [e.source for e in w.events] == ["0.bias"]


@both
def test_a_parameter_that_is_not_finite_is_named_once(model, sync):
    with torch.no_grad():
        model[2].weight[0, 1] = math.inf
    w = train(model, sync=sync)
    assert not w.first.born and w.first.source == "2.weight" and w.first.module == "2"
    assert [e.source for e in w.events].count("2.weight") == 1


@both
def test_a_buffer_and_an_input_are_named(sync):
    norm = torch.nn.BatchNorm1d(3).eval()
    norm.running_var.fill_(math.nan)
    with assay.watch(norm, sync=sync) as w:
        norm(torch.randn(2, 3))
    assert w.first.source == "buffer running_var"
    bad = torch.tensor([1.0, math.nan])
    with assay.watch(sync=sync) as w:
        bad * 2
    assert w.first.source == "input" and not w.first.born


@both
def test_a_nan_of_the_backward_alone_is_reported_with_its_forward_line(sync):
    class Root(torch.nn.Module):
        def forward(self, x):
            return (x * self.weight).sqrt()

    root = Root()
    root.weight = torch.nn.Parameter(torch.zeros(2))
    with assay.watch(root, sync=sync) as w:
        root(torch.ones(2)).sum().backward()
    assert (w.first.phase, w.first.module, w.first.op, w.first.born) == ("backward", "Root", "aten::div", True)
    assert "in forward" in w.first.stack[0]


@both
def test_a_mask_of_infinities_is_no_event_but_a_row_that_is_masked_whole_is(sync):
    scores, mask = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool).triu(1)
    with assay.watch(sync=sync) as w:
        torch.softmax(scores.masked_fill(mask, -math.inf), -1)
        torch.softmax(scores + torch.full((4, 4), -math.inf).triu(1), -1)
    assert w.first is None
    with assay.watch(sync=sync) as w:
        torch.softmax(scores.masked_fill(mask.flip(1) | mask | ~mask, -math.inf), -1)
    assert w.first.op == "aten::_softmax" and w.first.kind == "nan" and w.first.born


def test_an_overflow_is_distinguished_from_an_undefined_value():
    with assay.watch() as w:
        torch.full((2,), 300.0, dtype=torch.float16) * torch.full((2,), 300.0, dtype=torch.float16)
        torch.full((2,), 1e30).to(torch.float16)
        torch.exp(torch.full((2,), 100.0))
        torch.log(torch.tensor([-1.0, 2.0]))
    assert [e.likely.id for e in w.events] == ["overflow", "overflow", "overflow", "unknown"]
    assert "9e+04" in w.first.likely.evidence and "6.55e+04" in w.first.likely.evidence
    assert "zero or negative inputs: 1" in w.events[3].likely.evidence


def test_overflowing_float64_is_an_overflow_and_a_pole_is_not():
    with assay.watch() as w:
        torch.exp(torch.full((2,), 1000.0))
        torch.ones(2) / 0
        torch.atanh(torch.ones(2))
    assert [e.likely.id for e in w.events] == ["overflow", "unknown", "unknown"]
    assert "inputs up to 1000" in w.first.likely.evidence
    assert w.events[1].likely.evidence.endswith("the divisor is the number 0")
    assert w.events[2].likely.evidence.endswith("atanh is not defined there")


def test_results_of_a_written_infinity_are_not_attributed_to_finite_values():
    beside = torch.tensor([3.0, 1e38])
    with assay.watch() as w:
        infinite = torch.ones(2) * math.inf  # no event: the program wrote it down
        assert w.first is None
        infinite - infinite
        torch.where(torch.tensor([True, False]), -math.inf, beside) * 1e38
    assert [(e.kind, e.likely.id) for e in w.events] == [("nan", "unknown"), ("inf", "overflow")]
    assert w.first.likely.evidence == "aten::sub produced it from infinities that the program had written"
    assert w.events[1].count == 1 and "in float64 it reaches 1e+76" in w.events[1].likely.evidence


def nan_empty(monkeypatch):
    """`torch.empty` that happens to return NaN"""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)


@pytest.fixture
def bad_day(monkeypatch):
    nan_empty(monkeypatch)
    yield
    torch.use_deterministic_algorithms(False)


def test_unwritten_memory_is_judged_when_it_is_first_read(bad_day):
    with assay.watch() as w:
        whole = torch.empty(4)
        whole.copy_(torch.ones(4))
        whole + 1
        torch.empty(4)
    assert w.first is None
    with assay.watch() as w:
        half = torch.empty(4)
        half[:2].copy_(torch.ones(2))
        assert w.first is None
        half + 1
    assert w.first.likely.id == "never_written" and w.first.count == 2 and w.first.index == (2,)
    with assay.watch() as w:
        torch.empty(4).add_(1)
    assert w.first.likely.id == "uninitialised_accumulator" and len(w.events) == 1


def test_a_write_outside_the_dispatcher_is_placed_between_two_operators():
    with assay.watch() as w:
        x = torch.ones(4) * 2
        x.numpy()[1] = math.nan
        x + 1
    assert not w.first.born
    assert w.first.source == "written between aten::mul and aten::add"


@pytest.mark.parametrize("use", [lambda x: x.add_(0), lambda x: x + 1], ids=["in_place", "read"])
def test_a_value_that_is_finite_when_it_is_read_again_was_read_too_early(monkeypatch, use):
    late = torch.tensor([math.nan] * 3)
    monkeypatch.setattr(events, "settle", lambda: late.fill_(1))
    with assay.watch() as w:
        use(late)
    assert w.first.likely.id == "missing_sync"


def test_an_operator_that_is_finite_when_it_runs_again_read_too_early(monkeypatch):
    late, measure = torch.tensor([math.nan] * 3), events.peak

    def peak(tensor):
        measured = measure(tensor)
        late.fill_(1)  # the copy arrives during the watch's check
        return measured

    monkeypatch.setattr(events, "peak", peak)
    with assay.watch() as w:
        late + 1
    assert w.first.likely.id == "missing_sync" and w.first.born


def test_stop_raises_where_it_happens(model):
    equal_rows(model)
    with pytest.raises(assay.NonFinite, match="Inf in the forward of step 0: aten::div in 1") as caught:
        with assay.watch(model, stop=True) as w:
            model(torch.ones(3, 4))
            raise AssertionError("went on")
    assert caught.value.event is w.first


def test_stop_with_flags_raises_at_the_end_of_the_step(model):
    equal_rows(model)
    with pytest.raises(assay.NonFinite), assay.watch(model, stop=True, sync=False):
        model(torch.ones(3, 4))


def test_stop_in_the_backward_raises_out_of_backward():
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(assay.NonFinite, match="backward"), assay.watch(stop=True):
        x.sqrt().sum().backward()


def test_only_every_nth_step_is_watched(model):
    equal_rows(model)
    w = train(model, steps=5, every=3)
    assert {e.step for e in w.events} == {0, 3} and {r.step for r in w.rows} == {0, 3}


def test_steps_without_a_module_are_ended_by_hand():
    with assay.watch() as w:
        for _ in range(3):
            torch.zeros(1) / torch.zeros(1)
            w.step()
    assert [e.step for e in w.events] == [0, 1, 2]


def test_norms_are_those_of_the_tensors(model):
    x = torch.randn(3, 4)
    with assay.watch(model) as w:
        y = model(x)
        y.sum().backward()
    rows = {(r.name, r.what): r for r in w.rows}
    assert rows["2", "output"].norm == pytest.approx(float(y.detach().norm()), rel=1e-6)
    assert rows["2", "output"].absmax == float(y.detach().abs().max())
    assert rows["0.weight", "gradient"].norm == pytest.approx(float(model[0].weight.grad.norm()), rel=1e-6)
    assert rows["2", "output's gradient"].norm == pytest.approx(math.sqrt(6), rel=1e-6)
    assert assay.watch(model, norms=False).rows == []


def test_a_jump_and_a_gradient_of_zeros_are_remarked_on(model):
    with assay.watch(model) as w:
        model(torch.ones(3, 4))
        with torch.no_grad():
            model[2].weight.mul_(1e4)
        (model(torch.ones(3, 4)) * 0).sum().backward()
    remarks = {(r.step, r.name, r.what): r.remark for r in w.rows}
    assert remarks[1, "2", "output"] == "jump" and remarks[0, "2", "output"] == ""
    assert remarks[1, "0.weight", "gradient"] == "all zero"
    assert "jump" in w.table() and "all zero" in w.table()


def test_a_compiled_function_is_watched_operator_by_operator():
    compiled = torch.compile(lambda x: (x / x.sum()).sin(), backend="eager")
    compiled(torch.ones(3))
    with assay.watch() as w:
        compiled(torch.zeros(3))
    assert w.first.op == "aten::div" and "the divisor holds 1 zero" in w.first.likely.evidence


def test_lists_of_tensors_are_judged_one_by_one():
    with assay.watch() as w:
        torch._foreach_div([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.zeros(3)])
    assert len(w.events) == 1 and w.first.tensor == "result 1" and w.first.total == 3
    assert [i.shape for i in w.first.inputs] == [(3,), (3,)]


def test_nothing_is_left_behind(model):
    train(model)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not model[0].weight._post_accumulate_grad_hooks


def test_a_watch_does_not_change_values_or_gradients(model):
    model(torch.ones(3, 4)).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with assay.watch(model):
        model(torch.ones(3, 4)).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_table_and_page_show_the_first_event(model, tmp_path):
    equal_rows(model)
    w = train(model)
    text = w.table()
    assert text.startswith("First Inf: step 0, forward, born in aten::div in 1")
    w.to_html(tmp_path / "watch.html")
    page = (tmp_path / "watch.html").read_text()
    assert "First Inf: step 0, forward, born in aten::div in 1" in page and "<script" not in page
    assert "default-src 'none'" in page and "&#39;s gradient" in page


def test_the_page_shows_the_events_step_next_to_the_previous_one(tmp_path):
    model = torch.nn.Linear(4, 3)
    with assay.watch(model) as w:
        for step in range(4):
            y = model(torch.ones(2, 4))
            (y / (y - y) if step == 2 else y).sum().backward()
    w.to_html(tmp_path / "watch.html")
    text = (tmp_path / "watch.html").read_text()
    visible = Reader(text).visible_text()
    assert "Norms at the first event: step 2, compared with step 1" in visible
    assert re.search(r"\d\d? [A-Z][a-z]+ 20\d\d, \d\d:\d\d", visible), "the date"
    assert (
        "norms of 4 steps (0 to 3)" in visible
        and "Step 2, forward: aten::div" in visible
        and "Evidence float64 gives inf for the same inputs: the divisor holds 6 zeros." in visible
    )
    assert "First Inf: step 2, forward, born in aten::div." in visible and "test_watch.py:" in visible


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="watch: argument 0 is of type int"):
        assay.watch(3)
    with pytest.raises(ValueError, match="every=0"):
        assay.watch(every=0)
    with pytest.raises(TypeError, match="norms='x'; expected True or False"):
        assay.watch(norms="x")


def test_the_page_does_not_call_an_input_with_a_written_infinity_finite(tmp_path):
    scores = torch.ones(2, 2)
    with assay.watch() as w:
        mask = torch.full((2, 2), -torch.inf)
        scores + mask - mask
    (event,) = w.events
    w.to_html(tmp_path / "watch.html")
    page = (tmp_path / "watch.html").read_text()
    assert event.born and "all inputs were finite" not in page and "infinities written on purpose" in page
