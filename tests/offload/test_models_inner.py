"""A part of an offloaded model, called alone over a GPU's lanes, which report late: no error is lost."""

import sys

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch

from goldsmith.offload import attach
from goldsmith.offload.guard.report import NumericsError
from goldsmith.offload.testing import inject
from hf import models
from offload.test_device import Simulation


@pytest.fixture
def held(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    model = models.model("qwen3_moe", dtype=torch.float32)
    monkeypatch.setattr(sys.modules["goldsmith.hf.offload.attachment"], "Engine", Simulation)
    with torch.no_grad(), attach.offload(model, device="cpu", gpu_budget="24MiB", lanes="mixed") as held:
        yield held


def last_of(held):
    return held.engine.store.layers[-1]


def test_a_nan_of_the_last_layer_is_raised_by_the_base_model_too(held):
    ids = models.tokens()
    clean = held.model.model(ids).last_hidden_state
    for _ in range(2):
        with inject(held.engine, "down", layer=last_of(held), rows=[1]), pytest.raises(NumericsError) as raised:
            held.model.model(input_ids=ids)
        report = raised.value.report
        assert (report.layer, report.positions) == (last_of(held), ((0, 1),))
        assert torch.equal(held.model.model(ids).last_hidden_state, clean) and held.model(ids).logits.isfinite().all()


def test_the_whole_model_waits_for_its_experts_once(held, monkeypatch):
    ids, ends = models.tokens(), []
    end = held.engine.end_forward
    monkeypatch.setattr(held.engine, "end_forward", lambda *made: ends.append(held.engine._positions) or end(*made))
    held.model(ids)
    assert ends == [ids.shape[1]]  # the head's work is launched before any wait
    held.model.model(ids)
    assert ends == 2 * [ids.shape[1]]


def test_an_interrupted_forward_leaves_the_hooks_unchanged(held):
    ids = models.tokens()

    def broken(*_):
        raise ZeroDivisionError

    hook = held.model.model.layers[0].register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError):
        held.model(ids)
    hook.remove()
    with inject(held.engine, "down", layer=last_of(held)), pytest.raises(NumericsError):
        held.model.model(ids)


def test_a_pending_nan_is_raised_before_detach(held):
    x = torch.full((1, held.engine.store.hidden_size), torch.nan)
    layer = last_of(held)
    held.engine(layer, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    with pytest.raises(NumericsError, match=f"layer {layer}, stage 'input'"):
        held.detach()
    assert not held.engine.closed and held.model(models.tokens()).logits.isfinite().all()
    assert not any(p.is_meta for p in held.detach().parameters())
