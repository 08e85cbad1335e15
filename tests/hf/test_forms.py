"""What an experts module computes is read from it, and tried; what is not known is refused by class and flag."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import models

forms = pytest.importorskip("goldsmith.hf.forms", reason="goldsmith.hf needs transformers and peft")

SETTINGS = {
    "hidden_act": "silu",
    "alpha": 1.5,
    "swiglu_alpha": 1.5,
    "limit": 2.5,
    "swiglu_limit": 2.5,
    "_experts_implementation": "eager",
}


class Settings(types.SimpleNamespace):
    """A config that has every size, all of them small."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return 4


FOLDERS = {
    "GptOssExperts": "gpt_oss",
    "OpenAIPrivacyFilterExperts": "openai_privacy_filter",
    "MiniMaxM3VLExperts": "minimax_m3_vl",
    "DeepseekV4Experts": "deepseek_v4",
    "HYV4Experts": "hy_v4",
    "Glm5NextTextExperts": "glm5_next",
    "BeamExperts": "beam",
}


@pytest.mark.parametrize("name", forms.GATES)
def test_a_class_with_its_own_gate_is_read_as_what_it_computes(name):
    place = f"transformers.models.{FOLDERS[name]}.modeling_{FOLDERS[name]}"
    module = getattr(pytest.importorskip(place, reason=f"this transformers has no {name}"), name)(Settings(**SETTINGS))
    form = forms.form_of(module)

    def theirs(g, u):
        return module._apply_gate(torch.stack((g, u), -1).flatten(1) if form.interleaved else torch.cat((g, u), -1))

    def ours(g, u):
        return forms.activate(g, u, form)

    draw = lambda make: {"g": make.normal(9, 4, std=3.0), "u": make.normal(9, 4, std=3.0)}  # noqa: E731
    assay.check(assay.Target(theirs, ours, cases=[Case("gate", draw, {})]), probes=["values", "ensemble", "statistics"])
    assert form.num_experts == form.intermediate_size == form.hidden_size == 4


@pytest.mark.parametrize("act, activation", [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_fast", "gelu_tanh"), ("swish", "silu"), ("relu2", "relu2")])  # fmt: skip
def test_the_default_gate_takes_the_configs_activation(act, activation):
    form = forms.form_of(models.experts_of(models.model("mixtral", hidden_act=act)))
    assert (form.activation, form.limit, form.transposed, form.interleaved, form.biased) == (
        activation, None, False, False, False,
    )  # fmt: skip


def test_gpt_oss_is_transposed_interleaved_and_biased():
    form = forms.form_of(models.experts_of(models.model("gpt_oss")))
    assert (form.activation, form.alpha, form.limit) == ("swiglu_oai", 1.702, 7.0)
    assert (form.num_experts, form.hidden_size, form.intermediate_size) == (4, 32, 24)
    assert form.transposed and form.interleaved and form.biased


def experts(**flags):
    module = models.experts_of(models.model("mixtral"))
    for name, value in flags.items():
        setattr(module, name, value)
    return module


class StrangeExperts(type(models.experts_of(models.model("mixtral")))):
    """A gate of somebody's own."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * up


def strange():
    module = experts()
    module.__class__ = StrangeExperts
    return module


@pytest.mark.parametrize(
    "module, said",
    [
        (lambda: experts(has_gate=False), "MixtralExperts.*has_gate=False"),
        (lambda: experts(has_post_expert_norm=True), "MixtralExperts.*has_post_expert_norm=True"),
        (lambda: experts(act_fn=nn.Mish()), "MixtralExperts.*act_fn is Mish; known are SiLU"),
        (strange, "StrangeExperts.*_apply_gate is overridden by .*test_forms.StrangeExperts, which is not known"),
        (
            lambda: experts(gate_up_proj=nn.Parameter(torch.ones(3))),
            r"gate_up_proj is Parameter \[3\], wanted one tensor",
        ),
        (lambda: experts(gate_up_proj=None), "gate_up_proj is none"),
        (lambda: experts(gate_up_proj=nn.Parameter(torch.ones(4, 4, 4, dtype=torch.uint8), False)), "torch.uint8"),
    ],
)
def test_what_is_not_known_is_refused_with_class_and_flag(module, said):
    with pytest.raises(ValueError, match=said):
        forms.form_of(module())


def test_a_known_class_whose_gate_has_changed_is_refused(monkeypatch):
    """As a later version of transformers could have it: the name is known, the formula is another."""
    module = models.experts_of(models.model("gpt_oss"))
    changed = lambda self, both: both[..., ::2].sigmoid() * both[..., 1::2]  # noqa: E731
    monkeypatch.setattr(type(module), "_apply_gate", changed)
    with pytest.raises(ValueError, match="GptOssExperts.*its _apply_gate is not swiglu_oai"):
        forms.form_of(module)


def test_a_changed_activation_is_found_too():
    class SiLU(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    with pytest.raises(ValueError, match="its _apply_gate is not silu"):
        forms.form_of(experts(act_fn=SiLU()))


@pytest.mark.parametrize("name, folder", [("Step3p7Experts", "step3p7"), ("Inkling2Experts", "inkling2")])
def test_a_gate_that_experts_moe_does_not_have_is_refused(name, folder):
    """Step clamps behind the activation, Inkling caps with a tanh: near enough to the default to be taken for it."""
    place = f"transformers.models.{folder}.modeling_{folder}"
    module = getattr(pytest.importorskip(place, reason=f"this transformers has no {name}"), name)(Settings(**SETTINGS))
    with pytest.raises(ValueError, match=f"{name} cannot be computed here: _apply_gate is overridden by .*{name}"):
        forms.form_of(module)


@pytest.mark.parametrize("missing", ["transformers", "peft"])
def test_without_the_extra_the_import_says_what_to_install(missing, monkeypatch):
    import goldsmith.hf

    monkeypatch.setitem(sys.modules, missing, None)
    spec = importlib.util.spec_from_file_location("goldsmith.hf_again", goldsmith.hf.__file__)
    with pytest.raises(ImportError, match=rf"{missing} is not installed: pip install goldsmith\[hf\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
