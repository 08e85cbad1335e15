"""The weights of an offloaded model: restored exactly, and never saved or loaded in part."""

import copy
import functools

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch

from goldsmith.offload import StoreMismatch, attach
from hf import models

offload = functools.partial(attach.offload, device="cpu")  # whose numbers equal the plain model's on the CPU


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))


def test_weights_edited_by_hand_are_restored_as_edited(tmp_path):
    """Whatever the cache holds, and even if a store of the weights before the edit is given."""
    first = models.model("olmoe", dtype=torch.bfloat16)
    with offload(copy.deepcopy(first)), offload(copy.deepcopy(first), store=tmp_path / "first"):
        pass
    edited = copy.deepcopy(first)
    with torch.no_grad():
        models.experts_of(edited).down_proj[-1, 1, 1] += 1
    weights = {name: value.clone() for name, value in edited.state_dict().items()}
    with pytest.raises(StoreMismatch, match="different numbers in down"):
        offload(edited, store=tmp_path / "first")
    back = offload(edited).detach().state_dict()
    assert all(torch.equal(value, back[name]) for name, value in weights.items())


def test_a_model_without_its_experts_cannot_be_saved_or_loaded_into(tmp_path):
    plain, other = models.model("mixtral"), models.model("mixtral", seed=1).state_dict()
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    offloaded = offload(plain)
    inner = {name.removeprefix("model."): value for name, value in other.items() if name.startswith("model.")}
    for ask in (
        lambda: offloaded.model.load_state_dict(other),
        lambda: offloaded.model.load_state_dict(other, strict=False),
        lambda: offloaded.model.model.load_state_dict(inner, strict=False),
        lambda: offloaded.model.state_dict(),
        lambda: copy.deepcopy(offloaded.model).state_dict(),
        lambda: offloaded.model.save_pretrained(tmp_path / "saved"),
    ):
        with pytest.raises(RuntimeError, match="experts of this model are in a store.*detach"):
            ask()
    assert not list(tmp_path.glob("saved/*.safetensors"))
    back = offloaded.detach()
    assert all(torch.equal(value, weights[name]) for name, value in back.state_dict().items())
    back.save_pretrained(tmp_path / "saved")
    back.load_state_dict(other)
