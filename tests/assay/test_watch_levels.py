"""The level "modules": after the first step only modules' tensors are checked, and a call that fails is repeated."""

import math
import random

import pytest
import torch

from goldsmith import assay

levels = pytest.mark.parametrize("level", ["modules", "operators"])


class Own(torch.nn.Module):
    """A module whose forward is a function, between two linear layers."""

    def __init__(self, function):
        super().__init__()
        self.before, self.after, self.function = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), function

    def forward(self, x, **more):
        return self.after(self.function(self.before(x), **more))


def steps(watched, run, count=3, **how):
    """The watch of `run(step)`, of which step 0 is always seen operator by operator."""
    with assay.watch(watched, **how) as w:
        for step in range(count):
            run(step)
    return w


def forward_case():
    state = {}
    model = Own(lambda x: x / (x - x) if state["step"] == 2 else x)
    return model, state, lambda: model(torch.ones(3, 4)).sum().backward()


def backward_case():
    state = {}
    model = Own(lambda x: (x * 0).abs().sqrt() if state["step"] == 2 else x)
    return model, state, lambda: model(torch.ones(3, 4)).sum().backward()


def loss_case():
    state = {}
    model = Own(lambda x: x)

    def run():
        y = model(torch.ones(3, 4))
        (y * 0 if state["step"] == 2 else y.abs()).sqrt().sum().backward()

    return model, state, run


def loss_forward_case():
    state = {}
    model = Own(lambda x: x)

    def run():
        y = model(torch.ones(3, 4))
        ((y * 0).log() if state["step"] == 2 else y).sum()

    return model, state, run


def parameter_case():
    state = {}
    model = Own(lambda x: x)

    def run():
        if state["step"] == 2:
            model.after.weight.data.numpy()[0, 0] = math.nan
        model(torch.ones(3, 4)).sum().backward()

    return model, state, run


def input_case():
    state = {}
    model = Own(lambda x: torch.nan_to_num(x))
    good, bad = torch.ones(3, 4), torch.ones(3, 4)
    bad.numpy()[1, 2] = math.nan
    return model, state, lambda: model(bad if state["step"] == 2 else good).sum().backward()


def overflow_case():
    state = {}
    model = Own(lambda x: (x.half() * (1e9 if state["step"] == 2 else 1)).float())
    return model, state, lambda: model(torch.ones(3, 4)).sum().backward()


CASES = [
    forward_case, backward_case, loss_forward_case, parameter_case, input_case, overflow_case,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_repeated_call_gives_the_events_that_every_operator_gives(case):
    events = {}
    for level in ("modules", "operators"):
        torch.manual_seed(0)
        model, state, run = case()
        w = steps(model, lambda step, state=state, run=run: (state.update(step=step), run()), level=level)
        events[level] = [(str(e), e.stack[0]) for e in w.events]
        assert w.first is not None and w.first.step == 2
    assert events["modules"] == events["operators"]


@levels
def test_the_backward_of_the_loss_names_its_node_and_line(level):
    model, state, run = loss_case()
    w = steps(model, lambda step: (state.update(step=step), run()), level=level)
    op = "SqrtBackward0" if level == "modules" else "aten::div"
    assert [(e.step, e.phase, e.module, e.op, e.born) for e in w.events][:1] == [(2, "backward", "", op, True)]
    assert "in run" in w.first.stack[0] and w.first.inputs[0].finite
    assert len(w.events) == 1 or level == "operators"


def test_a_sound_run_repeats_nothing_and_counts_one_call_a_step():
    calls = []
    model = Own(lambda x: (calls.append(1), x)[1])
    optimizer = torch.optim.AdamW(model.parameters())

    def run(step):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    w = steps(model, run, 5)
    assert w.events == [] and len(calls) == 5
    assert {r.step for r in w.rows} == set(range(5))


def test_dropout_is_repeated_with_the_same_random_numbers_and_the_run_continues_with_its_own():
    def run(watched):
        torch.manual_seed(1)
        random.seed(1)
        state = {}
        model = Own(lambda x: torch.log(torch.dropout(x.abs(), 0.5, True)) if state["step"] else x.abs())
        numbers = []

        def step(now):
            state.update(step=now)
            model(torch.ones(3, 4)).sum().backward()
            numbers.append((float(torch.rand(())), random.random()))

        w = steps(model, step, 2) if watched else [step(now) for now in range(2)]
        return w, numbers

    w, numbers = run(True)
    assert numbers == run(False)[1]
    assert w.first.op == "aten::log" and w.first.born and w.first.likely.id != "missing_sync"


def test_repeating_leaves_buffers_and_gradients_as_they_are():
    def run(watched):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), Own(lambda x: x / x.relu()))
        x = torch.randn(5, 4)

        def step(now):
            model(x).sum().backward()

        if watched:
            assert steps(model, step, 3).first is not None
        else:
            [step(now) for now in range(3)]
        return [*model.buffers(), *(p.grad for p in model.parameters())]

    for mine, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=0, equal_nan=True)


@levels
def test_an_optimizer_that_overflows_is_an_event(level):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def run(step):
        (model(torch.ones(3, 4)) * (1e25 if step == 2 else 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    w = steps(model, run, 3, level=level)
    first = w.first
    assert (first.step, first.kind, first.phase, first.born) == (2, "inf", "forward", True)
    if level == "modules":
        assert (first.op, first.tensor) == ("AdamW.step", "exp_avg_sq of weight")
        assert first.inputs[0].source == "gradient of weight" and first.inputs[0].finite
        assert first.count == 8 and "in run" in first.stack[0]
    else:
        assert first.op == "aten::addcmul_"


def test_a_closure_and_a_step_of_no_torch_optimizer_are_seen_operator_by_operator():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    state = {}

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) * 0).log().sum() if state["step"] == 2 else model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    w = assay.watch(model)
    with w:
        for step in range(3):
            state["step"] = step
            optimizer.step(closure)
            with torch.no_grad():
                model.bias.div_(0 if step == 1 else 1)
    assert w.first.op == "aten::div_" and w.first.tensor == "what it changed"


def test_masks_are_no_events_whether_a_module_gets_or_returns_them_and_are_repeated_once():
    calls = []
    upper = torch.ones(4, 4, dtype=torch.bool).triu(1)

    class Masked(torch.nn.Module):
        def forward(self, x, mask):
            calls.append(1)
            return (x @ x.mT).masked_fill(upper, -math.inf) + mask

    masked = Masked()
    mask = torch.zeros(4, 4).masked_fill(upper, -math.inf)
    with assay.watch(masked, stop=True) as w:
        for _ in range(5):
            masked(torch.randn(4, 3, requires_grad=True), mask).softmax(-1).sum().backward()
    assert w.first is None and len(calls) == 6, "five calls, and the first of the level is repeated"
    good, bad = torch.ones(4, 3), torch.full((4, 3), math.nan)
    with assay.watch(masked) as w:
        for step in range(4):
            masked(bad if step == 3 else good, mask)
    assert [e.step for e in w.events] == [3]


def test_what_is_finite_when_it_is_repeated_is_an_event_of_the_module():
    state = {"bad": False}

    def racy(x):
        bad, state["bad"] = state["bad"], False
        return x * math.nan if bad else x

    model = Own(racy)

    def run(step):
        state["bad"] = step == 1
        model(torch.ones(3, 4)).sum().backward()

    first = steps(model, run, 2).first
    assert (first.module, first.op, first.tensor, first.born) == ("after", "Linear.forward", "output", True)
    assert first.count == 6 and "finite when the call is repeated" in first.likely.evidence


def test_a_module_that_overwrites_its_argument_cannot_be_repeated_and_says_so():
    class Root(torch.nn.Module):
        def forward(self, x, number):
            return x.mul_(number).div_(x - x) if number else x

    root = Root()
    with assay.watch(root) as w:
        for number in (0.0, 2.0):
            root(torch.ones(3), number)
    assert w.first.op == "Root.forward" and "overwritten since" in w.first.likely.evidence


def test_a_module_that_raises_because_of_a_nan_has_its_event():
    state = {}

    def refuse(x):
        if not x.isfinite().all():
            raise ValueError("not finite")
        return x

    model = torch.nn.Sequential(torch.nn.ReLU(), Own(lambda x: x / (x - x) if state["bad"] else x))
    model[1].after = torch.nn.Sequential()
    model[1].after.forward = refuse
    with pytest.raises(ValueError, match="not finite"), assay.watch(model) as w:
        for bad in (False, True):
            state["bad"] = bad
            model(torch.ones(3, 4))
    assert (w.first.op, w.first.step) == ("aten::div", 1)


def test_stop_raises_at_the_end_of_the_call_or_of_the_backward():
    model, state, run = backward_case()
    with pytest.raises(assay.NonFinite, match="backward of step 2"), assay.watch(model, stop=True):
        for step in range(3):
            state.update(step=step)
            run()
        raise AssertionError("went on")
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_wrong_levels_are_named():
    with pytest.raises(ValueError, match="level='tensors'"):
        assay.watch(level="tensors")
    with pytest.raises(ValueError, match="needs sync=True"):
        assay.watch(level="modules", sync=False)


@levels
@pytest.mark.parametrize("wrong", [lambda loss: loss * math.nan, lambda loss: loss + (loss * 0).sqrt()])
def test_steps_after_the_first_event_report_nothing_that_follows_from_it(wrong, level):
    """The first event makes the weights NaN, and so everything that later forwards save for their backward."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number):
        loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 2]))
        optimizer.zero_grad()
        (wrong(loss) if number == 2 else loss).backward()
        optimizer.step()

    w = steps(model, step, 5, level=level)
    assert w.events and {event.step for event in w.events} == {2}


def test_a_backward_that_reads_a_non_finite_saved_tensor_does_not_count_as_its_origin():
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.save_for_backward(factor)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    model, factor = torch.nn.Linear(4, 1), torch.full((2, 1), math.nan)
    w = steps(model, lambda number: Saves.apply(model(torch.ones(2, 4)), factor).sum().backward())
    late = [event for event in w.events if event.step > 0]
    assert all(not event.born for event in late) and {event.op for event in late} <= {"SavesBackward"}
    assert not w.first.born


def test_a_watch_that_is_entered_again_goes_on():
    """Its second block is no first step: the modules' tensors are judged, with the norms of the step before."""
    modes, state = {}, {}

    def function(x):
        modes.setdefault(state["block"], torch._C._len_torch_dispatch_stack())  # the first time: a call may be repeated
        return x / (x - x) if state["block"] == 2 else x

    model = Own(function)
    w = assay.watch(model)
    for state["block"] in range(3):
        with w:
            model(torch.ones(3, 4)).sum().backward()
        assert not model._forward_hooks and torch._C._len_torch_dispatch_stack() == 0
        model.zero_grad()
    assert modes == {0: 1, 1: 0, 2: 0} and {row.step for row in w.rows} == {0, 1, 2}
    assert {row.ratio is None for row in w.rows if row.step == 1 and row.what == "output"} == {False}
    assert (w.first.step, w.first.op) == (2, "aten::div")
