"""WatchCallback: the first step with NaN, nothing between the watched steps, nothing left behind."""

import math

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import Trainer, TrainerCallback, TrainingArguments

from goldsmith import assay
from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

STEPS = 7


class Poison(torch.nn.Module):
    """Passes its input through, and takes the logarithm of -1 in the given calls; one that is repeated counts once."""

    def __init__(self, calls):
        super().__init__()
        self.calls, self.count, self.last = calls, 0, torch.zeros(())

    def forward(self, x):
        if not torch.equal(x, self.last):
            self.count, self.last = self.count + 1, x.detach().clone()
        return x + (x.new_tensor(-1.0).log() if self.count in self.calls else 0.0)


class Observer(TrainerCallback):
    """Records, in the middle of each step, whether anything watches."""

    def __init__(self):
        self.modes, self.hooks = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.modes.append(_get_current_dispatch_mode() is not None)
        self.hooks.append(any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()))


def trainer(tmp_path, *callbacks, calls=(), **options):
    model = hf.convert(models.model("qwen3_moe"), lora={"rank": 2})
    model.model.norm = torch.nn.Sequential(model.model.norm, Poison(calls))
    rows = [{"input_ids": row, "labels": row} for row in models.tokens(rows=4 * STEPS).tolist()]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=STEPS, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[*callbacks])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_finds_the_first_step_with_nan(accumulated, tmp_path):
    callback = hf.WatchCallback()
    run = trainer(tmp_path, callback, calls=[3 * accumulated], gradient_accumulation_steps=accumulated)
    with pytest.warns(RuntimeWarning, match=r"NaN in the forward of step 3: aten::log in model.norm.1"):
        run.train()
    assert (callback.first.step, callback.first.op, callback.first.module) == (3, "aten::log", "model.norm.1")
    assert callback.first.born and run.state.global_step == STEPS
    assert {event.step for event in callback.events} == {3}  # it ends there, although every later step has NaN


def test_between_the_watched_steps_nothing_is_hooked(tmp_path):
    observer, callback = Observer(), hf.WatchCallback(3, norms=True)
    trainer(tmp_path, callback, observer).train()
    watched = [step % 3 == 0 for step in range(STEPS)]
    assert observer.modes == watched and observer.hooks == watched
    assert callback.first is None and {row.step for row in callback.rows} == {1, 4, 7}
    assert _get_current_dispatch_mode() is None


class BackwardPoison(torch.autograd.Function):
    """Divides the gradient by zero in the given backward."""

    calls, at = 0, 3

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        BackwardPoison.calls += 1
        return grad / 0.0 if BackwardPoison.calls == BackwardPoison.at else grad


class PoisonedBackward(torch.nn.Module):
    def forward(self, x):
        return BackwardPoison.apply(x)


def test_a_backward_of_a_later_step_is_seen_before_the_optimizer_takes_it(tmp_path):
    BackwardPoison.calls = 0
    run = trainer(tmp_path, hf.WatchCallback(stop=True))
    run.model.model.norm = torch.nn.Sequential(run.model.model.norm, PoisonedBackward())
    with pytest.raises(assay.NonFinite, match="backward of step 3"):
        run.train()
    assert run.state.global_step == 2
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())


def test_only_the_first_watched_step_judges_every_operator(tmp_path):
    """The later ones judge the tensors of modules, which costs a fraction, and their norms have ratios."""
    inside = []

    class Probe(torch.nn.Module):
        def forward(self, x):
            inside.append(_get_current_dispatch_mode() is not None)
            return x

    callback = hf.WatchCallback(2, norms=True)
    run = trainer(tmp_path, callback)
    run.model.model.norm = torch.nn.Sequential(run.model.model.norm, Probe())
    run.train()
    assert inside == [True] + [False] * (STEPS - 1)
    compared = {row.step for row in callback.rows if row.ratio is not None}
    assert {row.step for row in callback.rows} == {1, 3, 5, 7} and compared == {3, 5, 7}


def test_with_stop_the_optimizer_takes_no_step_with_nan(tmp_path):
    run = trainer(tmp_path, hf.WatchCallback(stop=True), calls=[2])
    with pytest.raises(assay.NonFinite, match="step 2: aten::log"):
        run.train()
    assert _get_current_dispatch_mode() is None
    assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
    assert all(not m._forward_hooks for m in run.model.modules())


def test_deferred_flags_name_the_step_too(tmp_path):
    with pytest.raises(assay.NonFinite) as caught:
        trainer(tmp_path, hf.WatchCallback(stop=True, sync=False), calls=[2]).train()
    assert caught.value.event.step == 2 and caught.value.event.count is None


def test_close_ends_a_watch_that_an_exception_left_open(tmp_path):
    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    callback = hf.WatchCallback()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callback, Stop()).train()
    callback.close()
    assert _get_current_dispatch_mode() is None and callback.first is None


@pytest.mark.parametrize(
    "options, message", [({"every": 0}, "every=0; expected a whole number"), ({"stop": 1}, "stop=1; expected True")]
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hf.WatchCallback(**options)


def test_the_overflow_of_a_loss_is_an_event_of_its_own_step(tmp_path):
    run = trainer(tmp_path, callback := hf.WatchCallback(), learning_rate=0.0)
    run.model.lm_head.weight.data.fill_(math.inf)
    with pytest.warns(RuntimeWarning, match="step 1"):
        run.train()
    assert callback.first.step == 1 and not callback.first.born and callback.first.source == "lm_head.weight"
