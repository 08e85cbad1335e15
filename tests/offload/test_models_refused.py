"""Models that offload refuses: each refusal names the class and the property, and changes nothing."""

import functools
import importlib
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.integrations.moe import use_experts_implementation

import goldsmith.hf as hf
from goldsmith.hf.offload.budget import check_fits, dense_bytes
from goldsmith.hf.offload.layers import layers_of
from goldsmith.offload import attach
from goldsmith.offload.errors import UnsupportedModel
from hf import checkpoints, models

offload, from_pretrained = (functools.partial(make, device="cpu") for make in (attach.offload, attach.from_pretrained))


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))


def in_place_of_experts(cls):
    """A Mixtral whose experts have this class."""
    model = models.model("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts = cls(model.config)
    return model


class Fused(nn.Module):
    """Experts of the common interface: silu(g) * u, weighted and summed."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.gate_up_proj = nn.Parameter(
            torch.randn(self.num_experts, 2 * config.intermediate_size, config.hidden_size)
        )
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, config.hidden_size, config.intermediate_size))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            row, slot = (top_k_index == e).nonzero(as_tuple=True)
            y = self._apply_gate(hidden_states[row] @ self.gate_up_proj[e].T) @ self.down_proj[e].T
            out.index_add_(0, row, y * top_k_weights[row, slot, None])
        return out


@use_experts_implementation
class OwnExperts(Fused):
    """Custom experts that compute what the flags say."""


@use_experts_implementation
class ScaledExperts(Fused):
    """Custom experts with a factor that no flag declares."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return 2.5 * super().forward(hidden_states, top_k_index, top_k_weights)


@use_experts_implementation(has_gate=False)
class UngatedExperts(Fused):
    pass


@use_experts_implementation
class PreActivated(Fused):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return torch.tanh(gate) * up


def test_another_class_with_the_same_interface_is_accepted_after_a_trial():
    model = in_place_of_experts(OwnExperts)
    ids = models.tokens()
    with torch.no_grad():
        wanted = model(ids).logits
    with offload(model) as offloaded:
        value = offloaded.model(ids).logits
    assert offloaded.stats().calls and torch.equal(value.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize(
    "cls, text",
    [
        (ScaledExperts, "ScaledExperts does not compute a weighted sum of silu"),
        (UngatedExperts, "UngatedExperts cannot be computed here: up_proj is none"),
        (PreActivated, "PreActivated cannot be computed here: _apply_gate is overridden"),
    ],
)
def test_experts_of_another_formula_are_refused_by_class_and_property(cls, text):
    model = in_place_of_experts(cls)
    with pytest.raises(UnsupportedModel, match=text):
        offload(model)
    assert not any(p.is_meta for p in model.parameters()) and all(p.requires_grad for p in model.parameters())


def test_a_model_without_experts_or_with_one_module_for_each_is_refused():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no experts module that transformers dispatches"):
        offload(transformers.LlamaForCausalLM(config))


def test_foreign_changes_to_a_model_are_refused_with_advice():
    converted = hf.convert(models.model("mixtral"))
    with pytest.raises(UnsupportedModel, match="MixtralForCausalLM were packed by goldsmith.hf.convert already"):
        offload(converted)
    hooked = models.model("mixtral")
    hooked.model.layers[0]._hf_hook = object()
    with pytest.raises(UnsupportedModel, match=r"accelerate's hooks on model.layers.0 \(device_map\)"):
        offload(hooked)
    quantised = models.model("mixtral")
    quantised.hf_quantizer = SimpleNamespace()
    with pytest.raises(UnsupportedModel, match="loaded with quantised parameters"):
        offload(quantised)
    wrapped = get_peft_model(models.model("mixtral"), LoraConfig(target_parameters=list(models.EXPERTS), r=2))
    with pytest.raises(UnsupportedModel, match="peft has wrapped the parameters of .*base_layer"):
        offload(wrapped)
    with torch.device("meta"):
        empty = transformers.MixtralForCausalLM(models.config("mixtral"))
    with pytest.raises(ValueError, match="meta device.*from_pretrained"):
        offload(empty)


def test_two_experts_modules_in_a_layer_or_no_number_are_refused():
    model = models.model("mixtral")
    model.model.layers[0].more = models.experts_of(models.model("mixtral"))
    with pytest.raises(UnsupportedModel, match="two experts modules in layer 0"):
        layers_of(model)
    bare = models.experts_of(models.model("mixtral"))
    with pytest.raises(UnsupportedModel, match="ModuleDict: experts contains 0 numbers, expected one"):
        layers_of(nn.ModuleDict({"experts": bare}))


def test_an_invalid_folder_or_a_missing_tensor_is_named(tmp_path):
    for name, text in (
        (tmp_path / "nosuch", "there is no folder"),
        ("nobody/nothing", "no copy of a hub model"),
        (tmp_path, "no config.json"),
    ):
        with pytest.raises(ValueError, match=text):
            from_pretrained(name)
    plain = models.model("mixtral")
    tensors = {name: t for name, t in plain.state_dict().items() if not name.endswith("experts.down_proj")}
    folder = checkpoints.write(tmp_path / "less", plain.config.to_dict(), tensors)
    with pytest.raises(ValueError, match="model.layers.0.mlp.experts"):
        from_pretrained(folder)


def test_without_transformers_one_paragraph_names_the_extra(monkeypatch):
    monkeypatch.setattr(attach, "ADAPTER", "goldsmith.hf.nosuch")
    with pytest.raises(ImportError, match="pip install 'transformers>=5' peft"):
        offload(nn.Linear(1, 1))
    loaded = [name for name in sys.modules if name.startswith("goldsmith.hf")]
    monkeypatch.setattr(attach, "ADAPTER", "goldsmith.hf.offload")
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match="transformers is not installed.*pip install 'transformers>=5' peft"
    ) as caught:
        from_pretrained("anywhere")
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    importlib.import_module("goldsmith.hf.offload")


def test_a_gpu_too_small_for_the_rest_of_the_model_is_refused_before_the_build(monkeypatch, tmp_path):
    model, device = models.model("mixtral"), torch.device("cuda")
    needed = dense_bytes(model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 80 * 2**30))
    monkeypatch.setattr(sys.modules["goldsmith.hf.offload.loading"], "chosen_device", lambda requested: device)
    with pytest.raises(ValueError, match='everything but the experts .* GiB free: give device="cpu"'):
        offload(model, store=tmp_path / "s", device="cuda")
    assert not (tmp_path / "s").exists() and not any(p.is_meta for p in model.parameters())
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert needed == sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) - experts
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed, 80 * 2**30))
    check_fits(model, device)


def test_a_cache_folder_that_cannot_be_created_names_the_variable(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="folder for stores cannot be created.*: set GOLDSMITH_CACHE, or give store="):
        offload(models.model("mixtral"))
    with pytest.raises(IsADirectoryError, match="path is a folder, expected a store's file"):
        offload(models.model("mixtral"), store=tmp_path)


def test_arguments_of_the_wrong_kind_are_named(tmp_path):
    model = models.model("mixtral")
    for wrong, kind, text in (
        (lambda: from_pretrained(None), TypeError, "path is a NoneType, expected a model's folder"),
        (lambda: from_pretrained(""), ValueError, "there is no folder ''"),
        (lambda: from_pretrained(tmp_path, store=3), TypeError, "store is an int, expected an ExpertStore, the path"),
        (lambda: offload(model, store=3), TypeError, "store is an int, expected an ExpertStore, the path"),
        (lambda: offload(model, calibration="nosuch"), FileNotFoundError, "calibration= cannot be read .No such file"),
    ):
        with pytest.raises(kind, match=text):
            wrong()
    assert not any(p.is_meta for p in model.parameters())


def test_a_non_model_and_an_already_offloaded_model_are_refused():
    with pytest.raises(TypeError, match="model is a MixtralConfig, expected a model of transformers"):
        offload(models.config("mixtral"))
    model = models.model("mixtral")
    with offload(model):
        with pytest.raises(ValueError, match="experts are already in a store: detach"):
            offload(model)
    for wrong, text in (
        ({"cpu_format": "q4"}, "cpu_format='q4' is unknown; choose one of: 'auto', 'fp32'"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16', expected one of torch.bfloat16, torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            from_pretrained("anywhere", **wrong)
