"""The native step is used only while nobody has changed the model: the next token sees every change."""

import copy
import functools
import types

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import DynamicCache

from goldsmith import assay
from hf import models
from offload.test_models_adapters import saved
from offload.test_step import offload, plain_model, steps_of, target

IDS = models.tokens(2, 9)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def twice(module, arguments, output):
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def hooked(path):
    return lambda model, _: model.get_submodule(path).register_forward_hook(twice)


def doubled_base(model, _):
    def forward(self, *arguments, **options):
        output = type(self).forward(self, *arguments, **options)
        output.last_hidden_state = output.last_hidden_state * 2 + 1
        return output

    model.model.forward = types.MethodType(forward, model.model)


def subclassed(model, _):
    attention = model.model.layers[0].self_attn
    kind = type(attention)

    class Doubled(kind):
        def forward(self, *arguments, **options):
            return twice(self, arguments, super().forward(*arguments, **options))

    attention.__class__ = Doubled


def patched_class(model, monkeypatch):
    kind = type(model.model.layers[0].self_attn)
    own = kind.forward
    monkeypatch.setattr(
        kind, "forward", functools.wraps(own)(lambda *args, **options: twice(0, 0, own(*args, **options)))
    )


def patched_function(model, monkeypatch):
    monkeypatch.setitem(
        type(model.model.layers[0].self_attn).forward.__globals__, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k)
    )


def other_norm(model, _):
    for layer in model.model.layers:
        layer.input_layernorm = torch.nn.LayerNorm(model.config.hidden_size).requires_grad_(False).eval()


def with_peft(*targets):
    def change(model, _):
        torch.manual_seed(5)
        config = LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False)
        inject_adapter_in_model(config, model).requires_grad_(False).eval()

    return change


def global_hook(model, monkeypatch):
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 2 if isinstance(module, torch.nn.Linear) else output
    )
    monkeypatch.setattr(model, "remove_global_hook", handle, raising=False)


TOUCHED = {
    "hook on the base": lambda model, _: model.model.register_forward_hook(
        lambda base, _, output: output.__setitem__("last_hidden_state", output.last_hidden_state * 2 + 1)
    ),
    "hook on experts": hooked("model.layers.0.mlp.experts"),
    "hook on the head": hooked("lm_head"),
    "forward of the base": doubled_base,
    "sub-class": subclassed,
    "patched class": patched_class,
    "patched function": patched_function,
    "another norm": other_norm,
    "peft on embeddings": with_peft("embed_tokens"),
    "peft on attention": with_peft("q_proj", "v_proj"),
    "global hook": global_hook,
}


def started(offloaded, steps=2):
    """A cache after a prompt of 5 tokens and some steps."""
    cache = DynamicCache(config=offloaded.model.config)
    with torch.no_grad():
        offloaded.model(IDS[:, :5], past_key_values=cache)
        for at in range(5, 5 + steps):
            offloaded.model(input_ids=IDS[:, at : at + 1], past_key_values=cache)
    return cache


@pytest.mark.parametrize("what", TOUCHED)
def test_a_change_of_the_model_is_computed_from_the_next_token_on(what, monkeypatch):
    with offload(plain_model()) as offloaded, torch.no_grad():
        model, cache = offloaded.model, started(offloaded)
        assert steps_of(offloaded)
        before = model(input_ids=IDS[:, 7:8], past_key_values=copy.deepcopy(cache)).logits
        TOUCHED[what](model, monkeypatch)
        try:
            own = model(IDS[:, 7:8], past_key_values=copy.deepcopy(cache)).logits  # a positional argument: no step
            assert torch.equal(model(input_ids=IDS[:, 7:8], past_key_values=cache).logits, own)
            assert not torch.equal(own, before) and offloaded.model.forward.why_not
        finally:
            if what == "global hook":
                model.remove_global_hook.remove()


def numbers(model):
    model.model.norm.variance_epsilon = 0.5
    for layer in model.model.layers:
        layer.mlp.gate.top_k, layer.mlp.gate.norm_topk_prob, layer.self_attn.scaling = 1, True, 3.0
        for norm in (
            layer.input_layernorm,
            layer.post_attention_layernorm,
            layer.self_attn.q_norm,
            layer.self_attn.k_norm,
        ):
            norm.variance_epsilon = 0.5


def weights(model):
    model.lm_head.weight.data = torch.randn_like(model.lm_head.weight)
    model.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(
        torch.randn_like(model.model.layers[0].self_attn.q_proj.weight), requires_grad=False
    )
    model.model.rotary_emb.inv_freq.mul_(0.3)


@pytest.mark.parametrize("change", [numbers, weights])
def test_the_step_computes_with_what_the_modules_have_now(change):
    plain = plain_model(tie_word_embeddings=False)
    changed = copy.deepcopy(plain)
    torch.manual_seed(3)
    change(changed)
    with offload(copy.deepcopy(plain)) as offloaded, offload(copy.deepcopy(changed)) as other, torch.no_grad():
        cache = started(offloaded)
        torch.manual_seed(3)
        change(offloaded.model)
        wanted = other.model(input_ids=IDS[:, 7:8], past_key_values=copy.deepcopy(cache)).logits
        assert torch.equal(offloaded.model(input_ids=IDS[:, 7:8], past_key_values=cache).logits, wanted)
        assay.check(target(offloaded, changed, IDS), probes=["values", "ensemble"])
        assert steps_of(offloaded) and steps_of(other)


def test_a_config_has_numbers_that_no_module_reads():
    plain = plain_model("mixtral", norm_topk_prob=False)
    with offload(copy.deepcopy(plain)) as offloaded:
        assay.check(target(offloaded, plain, IDS), probes=["values", "ensemble"])
        assert steps_of(offloaded)


def test_the_step_stays_the_same_object_while_nothing_changes():
    with offload(plain_model()) as offloaded:
        started(offloaded)
        step = offloaded.model.forward._step
        started(offloaded, 3)
        assert offloaded.model.forward._step is step


def test_an_adapter_that_arrives_changes_and_leaves_in_mid_conversation_is_computed(tmp_path):
    plain = plain_model()
    saved(copy.deepcopy(plain), tmp_path, target_modules=["q_proj", "o_proj"])
    with offload(copy.deepcopy(plain)) as offloaded, offload(plain, adapter=tmp_path) as other, torch.no_grad():
        model, cache = offloaded.model, started(offloaded)

        def logits(model=model):
            return model(input_ids=IDS[:, 7:8], past_key_values=copy.deepcopy(cache)).logits

        before = logits()
        (name,) = offloaded.load_adapter(tmp_path)
        offloaded.set_adapter(name)
        with_it = logits()
        assert torch.equal(with_it, logits(other.model)) and not torch.equal(with_it, before)
        assert steps_of(offloaded) and steps_of(other)
        layer = model.model.layers[1].self_attn.q_proj
        layer.scaling["goldsmith_0"] *= 2
        changed = logits()
        assert not torch.equal(changed, with_it)
        layer.scaling["goldsmith_0"] /= 2
        layer.lora_B["goldsmith_0"].weight.mul_(2)
        assert torch.equal(logits(), changed) and steps_of(offloaded)
        offloaded.set_adapter(None)
        assert torch.equal(logits(), before) and steps_of(offloaded)


def test_a_mask_with_as_many_zeros_elsewhere_is_another_mask():
    with offload(plain_model()) as offloaded, torch.no_grad():
        model, cache, mask = offloaded.model, DynamicCache(config=offloaded.model.config), torch.ones(2, 7).long()
        mask[0, :2] = 0
        model(IDS[:, :5], past_key_values=cache, attention_mask=mask[:, :5])
        model(
            input_ids=IDS[:, 5:6],
            past_key_values=cache,
            attention_mask=mask[:, :6],
            position_ids=torch.tensor([[3], [5]]),
        )
        options = {"attention_mask": mask.roll(2, 1), "position_ids": torch.tensor([[4], [6]])}
        own = model(IDS[:, 6:7], past_key_values=copy.deepcopy(cache), **options).logits
        assert torch.equal(model(input_ids=IDS[:, 6:7], past_key_values=cache, **options).logits, own)


def test_copied_layers_are_a_conversation_of_their_own():
    with offload(plain_model()) as offloaded, torch.no_grad():
        cache = started(offloaded)
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        wanted = offloaded.model(input_ids=IDS[:, 8:], past_key_values=copy.deepcopy(cache)).logits
        offloaded.model(input_ids=IDS[:, 7:8], past_key_values=cache)
        assert torch.equal(offloaded.model(input_ids=IDS[:, 8:], past_key_values=other).logits, wanted)


def test_a_forward_and_a_peft_layer_of_the_users_stay(tmp_path):
    plain = plain_model()
    saved(copy.deepcopy(plain), tmp_path)
    with_peft("q_proj")(plain, None)
    own = plain.forward
    plain.forward = lambda *arguments, **options: own(*arguments, **options)
    patched, layer = plain.forward, plain.model.layers[0].self_attn.q_proj
    offloaded = offload(plain)
    assert offloaded.model.forward is patched and not layer.disable_adapters
    with pytest.raises(ValueError, match="q_proj has the adapter 'default' of peft already"):
        offloaded.load_adapter(tmp_path)
    assert offloaded.detach().forward is patched and not layer.disable_adapters
