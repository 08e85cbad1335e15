"""convert: which weights leave the model, which stay, which are trained, and what is refused."""

import copy

import pytest
import torch

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")


def converted(family="qwen3_moe", **options):
    return hf.convert(models.model(family), **{"format": "fp32", "lora": {"rank": 2}, **options})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_leave_the_parameters_and_everything_else_stays_bit_for_bit(family):
    plain, ours = models.model(family), converted(family)
    before, after = plain.state_dict(), ours.state_dict()
    gone = {name for name in before if ".mlp.experts." in name}
    assert gone and set(after) - set(before) == {name for name in after if ".experts.lora." in name}
    assert set(before) - set(after) == gone
    assert all(torch.equal(before[name], after[name]) for name in before if name not in gone)
    assert not any("proj" in name for name, _ in models.experts_of(ours).named_parameters())


def test_everything_but_the_lora_is_frozen_if_there_is_one():
    assert all(p.requires_grad == ("lora" in name) for name, p in converted().named_parameters())
    assert all(p.requires_grad for p in converted(lora=None).parameters())


def test_old_weights_are_freed_even_while_the_old_module_is_referenced():
    plain = models.model("mixtral")
    old = models.experts_of(plain)
    hf.convert(plain)
    assert not list(old.parameters())


def test_bfloat16_is_the_default_and_the_model_may_be_cast():
    ours = hf.convert(models.model("mixtral"), lora={"rank": 2})
    base = models.experts_of(ours).base
    assert base.format == "bf16"
    ours.to(torch.bfloat16)
    assert models.experts_of(ours).base is base
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    never_wider = hf.convert(models.model("mixtral", dtype=torch.bfloat16))
    assert torch.equal(ours(models.tokens()).logits, never_wider(models.tokens()).logits)


def test_a_copy_shares_the_packed_base_and_has_its_own_lora():
    ours = converted()
    other = copy.deepcopy(ours)
    assert models.experts_of(other).base is models.experts_of(ours).base
    assert models.experts_of(other).lora.gate_a is not models.experts_of(ours).lora.gate_a
    assert torch.equal(other(models.tokens()).logits, ours(models.tokens()).logits)


def test_gradient_checkpointing_and_generation_work():
    ours = converted()
    models.randomise(ours)
    ours.enable_input_require_grads()
    ours.train()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours.zero_grad()
        ours(models.tokens(), use_cache=False).logits.square().mean().backward()
        grads.append([p.grad.clone() for p in models.experts_of(ours).parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    ours.eval()
    out = ours.generate(models.tokens(1, 3), max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 7)


def test_dropout_applies_only_in_training():
    ours = converted(lora={"rank": 2, "dropout": 0.5})
    models.randomise(ours)
    ids = models.tokens()
    assert torch.equal(ours(ids).logits, ours(ids).logits)
    ours.train()
    assert not torch.equal(ours(ids).logits, ours(ids).logits)


def test_progress_is_reported_for_each_module():
    seen = []
    converted(progress=lambda *progress: seen.append(progress))
    assert seen == [(1, 1, "model.layers.1.mlp.experts")]


# -- the report ----------------------------------------------------------------------------------------


def test_the_report_counts_what_an_optimizer_would_hold():
    ours = converted(lora={"rank": 3, "shared_a": True, "targets": ("gate", "up", "down")})
    ours.model.layers[1].mlp.gate.weight.requires_grad_(True)
    report = hf.trainable_report(ours)
    trained = [p for p in ours.parameters() if p.requires_grad]
    assert report["trained_parameters"] == {
        "total": sum(p.numel() for p in trained),
        "expert_lora": 5 * 3 * (32 + 24 + 24 + 24 + 32),
        "attention_lora": 0,
        "router": 5 * 32,
        "other": 0,
    }
    assert report["expert_lora"] == {"gate": 5 * 3 * 56, "up": 5 * 3 * 24, "down": 5 * 3 * 56}
    size = report["bytes"]
    assert size["experts"] == models.experts_of(ours).base.nbytes
    assert size["trained"] == 4 * report["trained_parameters"]["total"]
    assert size["trained"] + size["frozen"] == sum(p.numel() * 4 for p in ours.parameters())


def test_the_report_of_a_plain_model_counts_everything_as_trained():
    plain = models.model("mixtral")
    trained = hf.trainable_report(plain)["trained_parameters"]
    assert trained["total"] == sum(p.numel() for p in plain.parameters()) and trained["expert_lora"] == 0


# -- refused -------------------------------------------------------------------------------------------


def test_converting_twice_is_refused():
    with pytest.raises(ValueError, match="the experts of this Qwen3MoeForCausalLM are already converted"):
        hf.convert(converted())


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="Linear has no experts module that transformers dispatches"):
        hf.convert(torch.nn.Linear(2, 2))


def test_wrapped_parameters_are_refused_with_advice():
    with pytest.raises(ValueError, match="peft has wrapped .*experts.*load_adapter.*experts_implementation"):
        hf.convert(models.with_peft(models.model("mixtral")))


def test_experts_on_a_gpu_are_refused_with_advice():
    from torch._subclasses.fake_tensor import FakeTensorMode

    plain = models.model("mixtral")
    with FakeTensorMode():
        models.experts_of(plain).down_proj = torch.nn.Parameter(torch.empty(4, 32, 24, device="cuda"))
    with pytest.raises(ValueError, match="the experts are on cuda.*model.cpu.*experts_implementation"):
        hf.convert(plain)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "int3"}, "format.*int3"),
        ({"lora": {"rnak": 3}}, "rnak"),
        ({"lora": {"targets": ("gates",)}}, "gates"),
        ({"format": "int4", "group_size": 7}, "group_size"),
        ({"checkpoint": "somewhere"}, "checkpoint is for a model on the meta device"),
    ],
    ids=str,
)
def test_a_wrong_argument_changes_nothing(options, message):
    plain = models.model("mixtral")
    wanted = plain.state_dict().keys()
    with pytest.raises((ValueError, TypeError), match=message):
        hf.convert(plain, **options)
    assert plain.state_dict().keys() == wanted and all(p.requires_grad for p in plain.parameters())
