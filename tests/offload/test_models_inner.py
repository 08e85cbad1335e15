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
def offloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    model = models.model("qwen3_moe", dtype=torch.float32)
    monkeypatch.setattr(sys.modules["goldsmith.hf.offload.attachment"], "Engine", Simulation)
    with torch.no_grad(), attach.offload(model, device="cpu", gpu_budget="24MiB", lanes="mixed") as offloaded:
        yield offloaded


def last_of(offloaded):
    return offloaded.engine.store.layers[-1]


def test_a_nan_of_the_last_layer_is_raised_by_the_base_model_too(offloaded):
    ids = models.tokens()
    clean = offloaded.model.model(ids).last_hidden_state
    for _ in range(2):
        with (
            inject(offloaded.engine, "down", layer=last_of(offloaded), rows=[1]),
            pytest.raises(NumericsError) as raised,
        ):
            offloaded.model.model(input_ids=ids)
        report = raised.value.report
        assert (report.layer, report.positions) == (last_of(offloaded), ((0, 1),))
        assert (
            torch.equal(offloaded.model.model(ids).last_hidden_state, clean)
            and offloaded.model(ids).logits.isfinite().all()
        )


def test_the_whole_model_waits_for_its_experts_once(offloaded, monkeypatch):
    ids, ends = models.tokens(), []
    end = offloaded.engine.end_forward
    monkeypatch.setattr(
        offloaded.engine, "end_forward", lambda *arguments: ends.append(offloaded.engine._positions) or end(*arguments)
    )
    offloaded.model(ids)
    assert ends == [ids.shape[1]]  # the head's work is launched before any wait
    offloaded.model.model(ids)
    assert ends == 2 * [ids.shape[1]]


def test_an_interrupted_forward_leaves_the_hooks_unchanged(offloaded):
    ids = models.tokens()

    def broken(*_):
        raise ZeroDivisionError

    hook = offloaded.model.model.layers[0].register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError):
        offloaded.model(ids)
    hook.remove()
    with inject(offloaded.engine, "down", layer=last_of(offloaded)), pytest.raises(NumericsError):
        offloaded.model.model(ids)


def test_a_pending_nan_is_raised_before_detach(offloaded):
    x = torch.full((1, offloaded.engine.store.hidden_size), torch.nan)
    layer = last_of(offloaded)
    offloaded.engine(layer, x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    with pytest.raises(NumericsError, match=f"layer {layer}, stage 'input'"):
        offloaded.detach()
    assert not offloaded.engine.closed and offloaded.model(models.tokens()).logits.isfinite().all()
    assert not any(p.is_meta for p in offloaded.detach().parameters())
