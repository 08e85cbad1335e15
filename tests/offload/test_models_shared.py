"""What an offloaded model shares with others: memory, configurations, stores, and moves between devices."""

import copy
import functools
import gc
import io
import pickle
import weakref

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch

from goldsmith.offload import attach
from goldsmith.offload.errors import StoreMismatch
from goldsmith.offload.store.expert_store import ExpertStore
from hf import models
from offload.whole_models import assert_same_text, expert_parameters, padded

offload = functools.partial(attach.offload, device="cpu")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))


def test_experts_leave_memory_and_the_store_is_reused():
    plain = models.model("qwen3_moe", mlp_only_layers=[], seed=9)
    dying = [weakref.ref(p) for p in expert_parameters(plain).values()]
    reports = []
    with offload(plain, progress=lambda *progress: reports.append(progress)) as offloaded:
        gc.collect()
        assert not any(ref() for ref in dying) and all(p.is_meta for p in expert_parameters(plain).values())
        assert reports[-1][0] > 0
        again = copy.deepcopy(plain)  # computes through the same engine
        assert torch.equal(again(models.tokens()).logits, offloaded.model(models.tokens()).logits)
    reports.clear()
    with offload(
        models.model("qwen3_moe", mlp_only_layers=[], seed=9), progress=lambda *progress: reports.append(progress)
    ):
        assert not reports
    with pytest.raises(ValueError, match="closed"):
        plain(models.tokens())


def test_two_models_with_one_config_do_not_touch_each_other_nor_a_third():
    first = models.model("qwen3_moe")
    other = models.model("qwen3_moe", seed=1)
    third = type(first)(first.config).eval()
    assert third.config is first.config
    ids = models.tokens()
    with torch.no_grad():
        wanted = [model(ids).logits for model in (first, other, third)]
    with offload(first) as one, offload(other) as two:
        with torch.no_grad():
            assert torch.equal(third(ids).logits, wanted[2])  # its implementation is still its own
        first.set_experts_implementation("eager")  # and changing this one does not affect the offloaded model's
        for item, plain in ((one, models.model("qwen3_moe")), (two, models.model("qwen3_moe", seed=1))):
            assert_same_text(plain, item.model, ids)
            assert item.stats().calls > 0
        assert one.engine is not two.engine and one.engine.store.path != two.engine.store.path


def test_a_store_that_the_user_names_is_opened_or_built_checked_and_left_open(tmp_path):
    path = tmp_path / "mine.experts"
    with offload(models.model("olmoe"), store=path) as offloaded:
        assert offloaded.engine.store.path == path
    assert offloaded.engine.store.closed
    with ExpertStore.open(path) as store:
        with offload(models.model("olmoe"), store=store):
            pass
        assert not store.closed
    other = models.model("olmoe", seed=1)
    with pytest.raises(StoreMismatch, match="layer 0, expert 0"):
        offload(other, store=path)
    assert not any(p.is_meta for p in other.parameters()) and all(p.requires_grad for p in other.parameters())


def test_moving_the_rest_of_a_model_leaves_the_experts_in_place():
    ids = padded()[0]
    with offload(models.model("qwen3_moe")) as offloaded, torch.no_grad():
        before = offloaded.model(ids).logits
        assert torch.equal(offloaded.model.to("cpu").to(torch.float32)(ids).logits, before)  # as a pipeline does
        experts = next(m for name, m in offloaded.model.named_modules() if name.endswith("mlp.experts"))
        assert experts.to("cpu") is experts
        copied = copy.deepcopy(offloaded.model).to("cpu")
        assert torch.equal(copied(ids).logits, before)
        plain = offloaded.detach()
    assert plain.to(torch.float64)(ids).logits.dtype == torch.float64


def test_shared_parameters_are_shared_again_after_detach():
    model = models.model("qwen3_moe", mlp_only_layers=[])
    first, second, *_ = (m for name, m in model.named_modules() if name.endswith("mlp.experts"))
    second.gate_up_proj = first.gate_up_proj
    second.down_proj = torch.nn.Parameter(first.down_proj.detach().clone())
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = offload(model).detach()
    assert second.gate_up_proj is first.gate_up_proj and second.down_proj is not first.down_proj
    assert torch.equal(second.down_proj, first.down_proj) and all(p.requires_grad for p in second.parameters())
    result = dict(plain.named_parameters())
    assert result.keys() == wanted.keys() and all(torch.equal(result[name], wanted[name]) for name in wanted)


def test_pickling_an_offloaded_model_fails_and_says_what_to_do():
    with offload(models.model("qwen3_moe")) as offloaded:
        experts = next(m for name, m in offloaded.model.named_modules() if name.endswith("mlp.experts"))
        for what in (offloaded, offloaded.model, experts):
            for send in (pickle.dumps, lambda what: torch.save(what, io.BytesIO())):
                with pytest.raises(TypeError, match=r"cannot be pickled, .* detach\(\)"):
                    send(what)
        plain = offloaded.detach()
    assert torch.equal(pickle.loads(pickle.dumps(plain))(models.tokens()).logits, plain(models.tokens()).logits)
