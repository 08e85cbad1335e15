"""What a model will take in memory, stated before anything is read."""

import resource
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

import torch
from rich.console import Console

from benchmarks import tiny_models
from cli.finetune_tools import saved_model
from goldsmith.cli.serve.display import ServeDisplay
from goldsmith.experts import PackedLinear
from goldsmith.hf.offload import loading
from goldsmith.hf.offload.budget import cache_bytes
from goldsmith.hf.offload.memory_needs import MemoryNeeds
from goldsmith.offload import from_pretrained
from goldsmith.offload.memory.host_memory import memory_free, process_memory


@pytest.mark.parametrize("format", ["auto", "fp32", "int8"])
def test_needs_are_those_of_the_loaded_model(format, tmp_path):
    heard = []
    options = {"device": "cpu", "store": tmp_path / "store", "cpu_format": format, "exact": format == "auto"}
    with from_pretrained(saved_model(tmp_path / "model"), on_memory=heard.append, **options) as offloaded:
        (needs,) = heard
        experts = {id(p) for name, p in offloaded.model.named_parameters() if ".experts." in name}
        others = [p for p in offloaded.model.parameters() if id(p) not in experts]
        others += [*offloaded.model.buffers()]
        assert needs.dense == sum(tensor.nbytes for tensor in others)
        store = offloaded.engine.store
        blocks = sum(store.num_experts(layer) * store.expert_nbytes(layer) for layer in store.layers)
        assert needs.store == blocks
        layers = len(offloaded.model.model.layers)
        assert needs.token == layers * 2 * 16 * torch.bfloat16.itemsize  # a key and a value of one head
    assert 0 < needs.program < process_memory().own + 2**30 and 0 < needs.available <= memory_free() + 2**33


@pytest.mark.parametrize("dense_format", ["int4", "fp32"])
def test_needs_of_a_packed_dense_part_are_those_of_its_bytes(dense_format, tmp_path, monkeypatch):
    """Also while it is loaded: one linear layer at a time has its own weight beside the packed ones."""
    heard, unpacked, of, make = [], [], PackedLinear.of, loading.empty_model

    def packed(layer, **options):
        linear = [
            each for name, each in models[0].named_modules() if type(each) is torch.nn.Linear and "gate" not in name
        ]
        unpacked.append(sum(not each.weight.is_meta for each in linear))
        return of(layer, **options)

    models = []
    monkeypatch.setattr(loading, "empty_model", lambda *args: models.append(make(*args)) or models[0])
    monkeypatch.setattr(PackedLinear, "of", packed)
    options = {"device": "cpu", "store": tmp_path / "store", "on_memory": heard.append}
    with from_pretrained(saved_model(tmp_path / "model"), dense_format=dense_format, **options) as offloaded:
        model = offloaded.model
        own = {id(t): t.nbytes for n, t in [*model.named_parameters(), *model.named_buffers()] if ".experts." not in n}
        packed = [module.weight.layout.nbytes for module in model.modules() if isinstance(module, PackedLinear)]
        assert heard[0].dense == sum(own.values()) + sum(packed)
        assert unpacked == [1] * len(packed) and packed


def test_what_is_free_respects_the_limit_of_the_process(monkeypatch):
    size = process_size()
    monkeypatch.setattr("resource.getrlimit", lambda _: (size + 2**28, -1))
    assert 0 < memory_free() < 2**29


def process_size():
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    folder = saved_model(tmp_path / "model")
    monkeypatch.setattr("goldsmith.hf.offload.memory_needs.memory_free", lambda: 1000)
    monkeypatch.setattr(loading, "load_other_weights", None)
    with pytest.raises(ValueError, match=r"everything but the experts .* takes 0.0 GiB, but this machine has 0.0 GiB"):
        from_pretrained(folder, device="cpu", store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_model_whose_layers_differ_in_size_is_counted_layer_by_layer():
    if "gemma4_text" not in tiny_models.model_types():
        pytest.skip("this transformers has no Gemma 4")
    model = tiny_models.tiny_model("gemma4_text")
    layers = model.config.per_layer_config
    assert len({layer.head_dim for layer in layers}) > 1
    numbers = sum(2 * layer.num_key_value_heads * layer.head_dim for layer in layers)
    assert cache_bytes(model, 5) == 5 * numbers * model.dtype.itemsize


def test_the_note_on_a_store_beyond_memory_is_only_for_a_rest_that_fits():
    def notes(dense, store, tokens=1):
        page = StringIO()
        needs = MemoryNeeds(dense=dense, store=store, token=10, prompt=1, program=1, available=1000)
        ServeDisplay(Console(file=page, width=400), as_json=False).needs(needs, tokens, 1)
        return "does not fit in memory as well" in page.getvalue()

    assert [notes(100, 100), notes(100, 950), notes(2000, 10), notes(10, 10, 10**12)] == [False, True, False, False]
