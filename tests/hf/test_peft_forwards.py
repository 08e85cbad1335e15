"""Stock peft and `hf.register`: any number of forwards, with or without gradients, before a backward."""

import copy

import pytest
import torch

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")


def two_forwards(model, first, second):
    (model(first, labels=first).loss + model(second, labels=second).loss).backward()


def a_forward_without_gradients_between(model, first, second):
    loss = model(first, labels=first).loss
    with torch.no_grad():
        model(second)
    loss.backward()


def generate_between(model, first, second):
    loss = model(first, labels=first).loss
    model.eval()
    model.generate(second, max_new_tokens=2, pad_token_id=0)
    loss.backward()


def activation_checkpointing(model, first, second):
    model.train()
    model.enable_input_require_grads()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    two_forwards(model, first, second)


CALLS = [two_forwards, a_forward_without_gradients_between, generate_between, activation_checkpointing]


def gradients(plain, call, implementation, *, tied=False):
    wrapped = models.with_peft(plain)
    if tied:  # the second layer's experts are the first's
        layers = wrapped.get_base_model().model.layers
        layers[1].mlp.experts = layers[0].mlp.experts
    if implementation == "goldsmith":
        hf.register(wrapped)
    else:
        wrapped.get_base_model().set_experts_implementation(implementation)
    first, second = models.tokens(seed=3), models.tokens(seed=4)
    call(wrapped, first, second)
    return {name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_backward_after_other_forwards_has_eager_s_gradients(call, tied):
    plain = models.model("qwen3_moe", mlp_only_layers=[])
    ours = gradients(copy.deepcopy(plain), call, "goldsmith", tied=tied)
    wide = gradients(copy.deepcopy(plain).double(), call, "eager", tied=tied)
    assert ours.keys() == wide.keys() and ours
    for name, gradient in wide.items():
        # a stale or missing forward changes a gradient by its own size: this tells them apart, and judges no rounding
        assert (ours[name] - gradient).norm() < 1e-4 * gradient.norm(), name


def test_without_register_stock_peft_parametrises_and_several_forwards_still_work():
    plain = models.model("qwen3_moe", implementation="goldsmith")
    wrapped = models.with_peft(plain)
    wrapped.get_base_model().set_experts_implementation("goldsmith")
    two_forwards(wrapped, models.tokens(seed=3), models.tokens(seed=4))
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)


def test_the_experts_keep_no_factors_after_a_forward():
    wrapped = models.with_peft(models.model("qwen3_moe"))
    hf.register(wrapped)
    wrapped(models.tokens())
    experts = next(m for n, m in wrapped.named_modules() if n.endswith("mlp.experts.base_layer.base_layer"))
    assert not experts.__dict__["_goldsmith_factors"] and not hasattr(experts, "parametrizations")
