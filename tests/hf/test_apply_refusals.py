"""apply and undo refuse, with nothing changed, where a forward would be lost or another model computed."""

import inspect
import textwrap

import pytest
import torch
from torch import nn

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from hf import hyper_models

FAMILIES = pytest.mark.parametrize("family", hyper_models.PRESENT)
needs_deepseek = pytest.mark.skipif("deepseek_v4" not in hyper_models.PRESENT, reason="transformers has no DeepSeek-V4")
pytestmark = needs_deepseek


@pytest.fixture
def plain():
    return hyper_models.model("deepseek_v4")


def refused(model, text):
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(ValueError) as error:
        hf.apply(model)
    assert str(error.value) == "goldsmith.hf.apply: " + text
    assert [type(module) for module in model.modules()] == kinds


def test_a_model_without_hyper_connections():
    text = (
        "MixtralForCausalLM has no hyper-connections that goldsmith knows: those of transformers' deepseek_v4, "
        "glm5_next, hy_v4, qwen4_exp"
    )
    refused(models.model("mixtral"), text)


def test_nothing_to_apply(plain):
    with pytest.raises(ValueError, match="mhc and experts are both False, so there is nothing to apply"):
        hf.apply(plain, mhc=False)


def test_a_model_that_is_applied_already_and_a_second_undo(plain):
    applied = hf.apply(plain)
    refused(plain, "it is already applied to this model (model.layers.0 is computed by goldsmith.mhc)")
    applied.undo()
    with pytest.raises(ValueError, match="this was undone before"):
        applied.undo()
    hf.apply(plain).undo()


def test_a_forward_of_a_module_s_own(plain):
    hooked = plain.model.layers[1].ffn_hc
    hooked.forward = plain.model.layers[0].ffn_hc.forward
    text = (
        "model.layers.1.ffn_hc has a forward of its own (transformers.models.deepseek_v4.modeling_deepseek_v4."
        "DeepseekV4HyperConnection.forward), which would be lost. Apply first, and then what sets it (accelerate's "
        "hooks of device_map, kernelize, a patch)"
    )
    refused(plain, text)


def test_a_class_whose_forward_was_replaced(plain, monkeypatch):
    kind = type(plain.model.layers[0].attn_hc)
    kept = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: kept(self, x))
    with pytest.raises(ValueError, match="the forward of DeepseekV4HyperConnection was replaced by .*test_apply_refus"):
        hf.apply(plain)


def test_a_subclass_with_its_own_forward(plain):
    head = plain.model.hc_head
    head.__class__ = type("MyHead", (type(head),), {"forward": lambda self, x: x.mean(2)})
    with pytest.raises(ValueError, match=r"model.hc_head is a .*MyHead with its own forward, which would be lost"):
        hf.apply(plain)


def test_parametrizations_before_and_after(plain):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    hc = plain.model.layers[0].attn_hc
    register = torch.nn.utils.parametrize.register_parametrization
    register(hc, "fn", Double())
    refused(plain, "model.layers.0.attn_hc has parametrizations, which come with a class of their own. Apply first, "
            "then them")  # fmt: skip
    torch.nn.utils.parametrize.remove_parametrizations(hc, "fn", leave_parametrized=False)
    applied = hf.apply(plain)
    register(hc, "fn", Double())
    ours = plain(hyper_models.ids(), use_cache=False).logits
    with pytest.raises(ValueError, match="model.layers.0.attn_hc is a Parametrized.* made after apply .*Undo before"):
        applied.undo()
    torch.nn.utils.parametrize.remove_parametrizations(hc, "fn", leave_parametrized=False)
    assert not torch.equal(ours, plain(hyper_models.ids(), use_cache=False).logits)
    applied.undo()


def test_another_number_of_streams():
    five = hyper_models.model("deepseek_v4", hc_mult=5)
    refused(five, "model.layers.0.attn_hc has 5 streams, and the kernels take n in 1, 2, 3, 4, 8")


CHANGES = {
    "deepseek_v4": [
        ("DeepseekV4HyperConnection", "post = 2 * torch.sigmoid", "post = torch.sigmoid"),
        ("DeepseekV4HyperHead", "+ self.eps", "+ 2e-2"),
        ("DeepseekV4DecoderLayer", ".transpose(-1, -2)", ""),
        ("DeepseekV4DecoderLayer", "input_ids=input_ids)", "input_ids=None)"),
        ("DeepseekV4DecoderLayer", "dtype = hidden_states.dtype", "dtype = hidden_states.dtype; self.another"),
    ],
    "glm5_next": [
        ("Glm5NextTextDecoderLayer", "prev_topk_indices=prev_topk_indices,", ""),
        ("Glm5NextTextHyperConnection", "+ self.hc_eps", "+ 0.1"),
    ],
    "hy_v4": [
        ("HYV4HyperConnection", "+ self.hc_eps\n", "+ 0.1\n"),
        ("HYV4DecoderLayer", "return hidden_states, topk_indices", "return hidden_states, None"),
    ],
    "qwen4_exp_text": [
        ("Qwen4ExpTextGatedResidual", "injection_weights = 2 *", "injection_weights = 1 *"),
        ("Qwen4ExpTextDecoderLayer", "conv_mask=conv_mask", "conv_mask=None"),
    ],
}


@pytest.mark.parametrize(
    "family, name, old, new",
    [(family, *change) for family in hyper_models.PRESENT for change in CHANGES[family]],
)
def test_formulas_that_another_version_of_transformers_changes(family, name, old, new, monkeypatch):
    changed = hyper_models.model(family, **hyper_models.PLE if family.startswith("qwen") else {})
    kind = next(type(module) for module in changed.modules() if type(module).__name__ == name)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    assert old in source
    names = vars(inspect.getmodule(kind))
    scope = {}
    exec(compile("from __future__ import annotations\n" + source.replace(old, new), "changed", "exec"), names, scope)
    monkeypatch.setattr(kind, "forward", scope["forward"])
    with pytest.raises(ValueError, match=f"is a {name}, which .* in transformers .*; the formulas of 5.17 to 5.23"):
        hf.apply(changed)
