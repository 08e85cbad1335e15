"""Stock peft and `hf.register`: any number of forwards, with or without gradients, before a backward."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")


def two_forwards(model, first, second):
    return logits(model, first) + logits(model, second)


def a_forward_without_gradients_between(model, first, second):
    value = logits(model, first)
    with torch.no_grad():
        logits(model, second)
    return value


def generate_between(model, first, second):
    value = logits(model, first)
    model.eval()
    model.generate(models.tokens(seed=4), max_new_tokens=2, pad_token_id=0)
    return value


def activation_checkpointing(model, first, second):
    model.train()
    model.enable_input_require_grads()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    return two_forwards(model, first, second)


CALLS = [two_forwards, a_forward_without_gradients_between, generate_between, activation_checkpointing]
TWICE = (two_forwards, activation_checkpointing)


def logits(model, embeds):
    return model(inputs_embeds=embeds, use_cache=False).logits


def by_number(gradients):
    return {f"gradient{i}": gradient for i, gradient in enumerate(gradients)}


def gradients_of(wrapped, call):
    """{number: gradient of sum(cotangent * logits)} with these factors written into the model."""
    parameters = {name: p for name, p in wrapped.named_parameters() if "lora_" in name}

    def candidate(first, second, cotangent, **factors):
        with torch.no_grad():
            for parameter, factor in zip(parameters.values(), factors.values(), strict=True):
                parameter.copy_(factor)
        with torch.enable_grad():
            value = (call(wrapped, first, second) * cotangent).sum()
            return by_number(torch.autograd.grad(value, list(parameters.values())))

    return candidate, parameters


def golden_gradients(plain, parameters, call, *, tied):
    """The same by autograd through transformers' eager model with W + s B A as its weights."""
    wide = goldens.InItsDtype(plain)
    paths = [path for path, _ in plain.named_modules() if path.endswith("mlp.experts")]

    def weights(pairs):
        given = {}
        for path in paths:
            experts = plain.get_submodule(path)
            mine = paths[0] if tied else path
            for parameter in ("gate_up_proj", "down_proj"):
                place = ".base_layer" if parameter == "gate_up_proj" else ""
                a, b = (pairs[f"{mine}{place}.lora_{which}"] for which in "AB")
                count = experts.num_experts
                a, b = a.reshape(count, -1, a.shape[1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1)
                delta = 1.5 * b @ a  # alpha 6 over rank 4
                given[f"{path}.{parameter}"] = plain.get_submodule(mine).get_parameter(parameter).to(a.dtype) + delta
        return given

    def golden(first, second, cotangent, **factors):
        leaves = [factor.detach().requires_grad_() for factor in factors.values()]
        keys = [name.removeprefix("base_model.model.").partition(".default")[0] for name in parameters]
        with torch.enable_grad():
            given = weights(dict(zip(keys, leaves)))

            def run(embeds):
                return wide.outputs(embeds.dtype, given, {"inputs_embeds": embeds, "use_cache": False}).logits

            value = run(first) + run(second) if call in TWICE else run(first)
            return by_number(torch.autograd.grad((value * cotangent).sum(), leaves))

    return golden


@pytest.mark.sweep(4)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_backward_after_other_forwards_has_eager_s_gradients(call, tied):
    plain = models.model("qwen3_moe", mlp_only_layers=[])
    wrapped = models.with_peft(plain)
    if tied:  # the second layer's experts are the first's
        layers = wrapped.get_base_model().model.layers
        layers[1].mlp.experts = layers[0].mlp.experts
    hf.register(wrapped)
    candidate, parameters = gradients_of(wrapped, call)
    golden = golden_gradients(plain, parameters, call, tied=tied)

    def draw(make):
        embeds = {name: make.normal(1, 3, plain.config.hidden_size) for name in ("first", "second")}
        factors = {f"factor{i}": make.normal(*p.shape, std=0.2) for i, p in enumerate(parameters.values())}
        return {**embeds, "cotangent": make.normal(1, 3, plain.config.vocab_size), **factors}

    target = assay.Target(candidate, golden, cases=[Case("gradients", draw, {})], backward=None, name=call.__name__)
    assay.check(target, probes=["values", "ensemble"])


def test_without_register_stock_peft_parametrises_and_several_forwards_still_work():
    plain = models.model("qwen3_moe", implementation="goldsmith")
    wrapped = models.with_peft(plain)
    wrapped.get_base_model().set_experts_implementation("goldsmith")
    first, second = models.tokens(seed=3), models.tokens(seed=4)
    (wrapped(first, labels=first).loss + wrapped(second, labels=second).loss).backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)


def test_the_experts_keep_no_factors_after_a_forward():
    wrapped = models.with_peft(models.model("qwen3_moe"))
    hf.register(wrapped)
    wrapped(models.tokens())
    experts = next(m for n, m in wrapped.named_modules() if n.endswith("mlp.experts.base_layer.base_layer"))
    assert not experts.__dict__["_goldsmith_factors"] and not hasattr(experts, "parametrizations")
