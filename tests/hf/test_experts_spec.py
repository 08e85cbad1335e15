"""The spec of an experts module is read from its flags and verified; unknown ones are refused with class and flag."""

import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import models

experts_spec = pytest.importorskip("goldsmith.hf.experts_spec", reason="goldsmith.hf needs transformers and peft")

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


@pytest.mark.parametrize("name", experts_spec.GATES)
def test_the_spec_of_a_class_with_its_own_gate_equals_what_it_computes(name):
    place = f"transformers.models.{FOLDERS[name]}.modeling_{FOLDERS[name]}"
    module = getattr(pytest.importorskip(place, reason=f"this transformers has no {name}"), name)(Settings(**SETTINGS))
    spec = experts_spec.spec_of(module)

    def theirs(g, u):
        return module._apply_gate(torch.stack((g, u), -1).flatten(1) if spec.interleaved else torch.cat((g, u), -1))

    def ours(g, u):
        return experts_spec.activate(g, u, spec)

    draw = lambda make: {"g": make.normal(9, 4, std=3.0), "u": make.normal(9, 4, std=3.0)}  # noqa: E731
    assay.check(assay.Target(theirs, ours, cases=[Case("gate", draw, {})]), probes=["values", "ensemble", "statistics"])
    assert spec.num_experts == spec.intermediate_size == spec.hidden_size == 4


@pytest.mark.parametrize("act, activation", [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
    ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_fast", "gelu_tanh"), ("swish", "silu"), ("relu2", "relu2")])  # fmt: skip
def test_the_default_gate_uses_the_config_s_activation(act, activation):
    spec = experts_spec.spec_of(models.experts_of(models.model("mixtral", hidden_act=act)))
    assert (spec.activation, spec.limit, spec.transposed, spec.interleaved, spec.biased) == (
        activation, None, False, False, False,
    )  # fmt: skip


def test_gpt_oss_is_transposed_interleaved_and_biased():
    spec = experts_spec.spec_of(models.experts_of(models.model("gpt_oss")))
    assert (spec.activation, spec.alpha, spec.limit) == ("swiglu_oai", 1.702, 7.0)
    assert (spec.num_experts, spec.hidden_size, spec.intermediate_size) == (4, 32, 24)
    assert spec.transposed and spec.interleaved and spec.biased


def experts(**flags):
    module = models.experts_of(models.model("mixtral"))
    for name, value in flags.items():
        setattr(module, name, value)
    return module


class StrangeExperts(type(models.experts_of(models.model("mixtral")))):
    """A user-defined gate."""

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate * up


def strange():
    module = experts()
    module.__class__ = StrangeExperts
    return module


@pytest.mark.parametrize(
    "module, message",
    [
        (lambda: experts(has_gate=False), "MixtralExperts.*up_proj is none"),
        (lambda: experts(has_post_expert_norm=True), "MixtralExperts.*has_post_expert_norm=True"),
        (lambda: experts(act_fn=nn.Mish()), "MixtralExperts.*act_fn is Mish; known are SiLU"),
        (
            strange,
            "StrangeExperts.*_apply_gate is overridden by .*StrangeExperts, which goldsmith does not know",
        ),
        (
            lambda: experts(gate_up_proj=nn.Parameter(torch.ones(3))),
            r"gate_up_proj is Parameter \[3\], expected one tensor",
        ),
        (lambda: experts(gate_up_proj=None), "gate_up_proj is none"),
        (lambda: experts(gate_up_proj=nn.Parameter(torch.ones(4, 4, 4, dtype=torch.uint8), False)), "torch.uint8"),
    ],
)
def test_unknown_experts_are_refused_with_class_and_flag(module, message):
    with pytest.raises(ValueError, match=message):
        experts_spec.spec_of(module())


def test_a_known_class_whose_gate_has_changed_is_refused(monkeypatch):
    """As in a later version of transformers: the name is known, but the formula has changed."""
    module = models.experts_of(models.model("gpt_oss"))
    changed = lambda self, both: both[..., ::2].sigmoid() * both[..., 1::2]  # noqa: E731
    monkeypatch.setattr(type(module), "_apply_gate", changed)
    with pytest.raises(ValueError, match="GptOssExperts.*its _apply_gate is not swiglu_oai"):
        experts_spec.spec_of(module)


def test_a_changed_activation_is_refused_too():
    class SiLU(nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    with pytest.raises(ValueError, match="its _apply_gate is not silu"):
        experts_spec.spec_of(experts(act_fn=SiLU()))


@pytest.mark.parametrize(
    "name, folder, options, reason",
    [
        ("Step3p7Experts", "step3p7", {"swiglu_limit": 7.0}, "it clamps after the activation, at 7.0"),
        ("Inkling2Experts", "inkling2", {}, "_apply_gate is overridden by .*Inkling2Experts"),
    ],
)
def test_a_gate_that_experts_moe_lacks_is_refused(name, folder, options, reason):
    """Step clamps after the activation, Inkling caps with a tanh: both are close to the default gate."""
    place = f"transformers.models.{folder}.modeling_{folder}"
    experts_class = getattr(pytest.importorskip(place, reason=f"this transformers has no {name}"), name)
    with pytest.raises(ValueError, match=f"{name} cannot be computed here: {reason}"):
        experts_spec.spec_of(experts_class(Settings(**SETTINGS), **options))


@pytest.mark.parametrize("missing", ["transformers", "peft"])
def test_without_the_extra_the_import_error_names_what_to_install(missing, monkeypatch):
    import goldsmith.hf

    monkeypatch.setitem(sys.modules, missing, None)
    spec = importlib.util.spec_from_file_location("goldsmith.hf_again", goldsmith.hf.__file__)
    with pytest.raises(ImportError, match=f"{missing} is not installed: pip install 'transformers>=5' peft"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
