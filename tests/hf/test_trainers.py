"""Trainers with converted models: what they save, resume, switch off and copy is the whole adapter."""

import copy

import pytest
import torch

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
from transformers import Trainer, TrainingArguments


def with_attention(format="fp32"):
    """LoRA of peft on attention and ours on the experts, drawn at random."""
    config = models.peft.LoraConfig(target_modules=["q_proj"], r=2)
    both = models.peft.get_peft_model(models.model("qwen3_moe"), config)
    hf.convert(both, format=format, lora={"rank": 2})
    models.randomise(both)
    return both


def alone():
    model = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 2})
    models.randomise(model)
    return model


def trained(model, folder, *, steps=4, resume=None, **options):
    rows = [{"input_ids": row, "labels": row} for row in models.tokens(rows=8).tolist()]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=steps, save_steps=2, report_to=[], use_cpu=True,
        learning_rate=0.01, disable_tqdm=True, **options,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path):
    whole = trained(with_attention(), tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    assert {p.name for p in checkpoint.glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = with_attention()
    models.randomise(again, seed=9)
    resumed = trained(again, tmp_path / "again", resume=str(checkpoint))
    assert resumed.keys() == whole.keys() and any("experts.lora" in name for name in whole)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_a_checkpoint_of_plain_weights_is_not_resumed_without_its_lora(tmp_path):
    trained(alone(), tmp_path, steps=2)
    with pytest.raises(RuntimeError, match=r"mlp.experts\.\S+ is a plain weight.*give the model to peft"):
        trained(alone(), tmp_path, resume=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("wrapped", [True, False], ids=["peft", "transformers"])
def test_a_disabled_adapter_leaves_the_base_alone(wrapped):
    model, plain, ids = (with_attention if wrapped else alone)(), models.model("qwen3_moe"), models.tokens()
    base = hf.convert(plain, format="fp32").eval()(ids).logits
    model.eval()
    before = model(ids).logits
    if wrapped:
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, base)
    else:
        model.disable_adapters()
        assert torch.equal(model(ids).logits, base)
        model.enable_adapters()
    assert torch.equal(model(ids).logits, before) and not torch.equal(before, base)


def test_a_second_adapter_is_refused_and_a_copy_shares_the_packed_experts():
    model = with_attention("int8")
    with pytest.raises(ValueError, match="add_adapter: adapter_name='ref', but converted experts have one LoRA"):
        model.add_adapter("ref", model.peft_config["default"])
    with pytest.raises(ValueError, match="load_adapter: adapter_name='other'"):
        model.load_adapter("nowhere", "other")
    reference = copy.deepcopy(model.get_base_model())
    ids = models.tokens()
    assert torch.equal(reference(ids).logits, model(ids).logits)
    assert models.experts_of(reference).base is models.experts_of(model).base
    models.randomise(model, seed=9)  # the copy is a reference: it does not follow
    assert not torch.equal(reference(ids).logits, model(ids).logits)


def test_an_adapter_that_is_loaded_for_inference_is_frozen(tmp_path):
    model = with_attention()
    model.save_pretrained(tmp_path)
    again = with_attention()
    models.randomise(again, seed=9)
    again.load_adapter(str(tmp_path), "default")
    assert not any(p.requires_grad for p in again.parameters())
    assert torch.equal(again.eval()(models.tokens()).logits, model.eval()(models.tokens()).logits)


# -- TRL ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip("trl", reason="needs trl: pip install trl")


def tokenizer():
    from benchmarks.coverage import tokenizer

    return tokenizer()


def rows(*columns):
    from datasets import Dataset

    words = ["abc def", "ghi jkl", "mno pqr", "stu vwx"]
    return Dataset.from_list([{c: words[(i + k) % 4] for k, c in enumerate(columns)} for i in range(4)])


def options(folder, **changes):
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 2, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "bf16": False, "logging_steps": 1, "learning_rate": 0.01,
        "disable_tqdm": True, **changes,
    }  # fmt: skip


def losses(trainer, key="loss"):
    trainer.train()
    return [row[key] for row in trainer.state.log_history if key in row]


def dpo(trl, folder, model, precompute=False, **arguments):
    config = trl.DPOConfig(**options(folder), precompute_ref_log_probs=precompute)
    data = rows("prompt", "chosen", "rejected")
    return trl.DPOTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer(), **arguments)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", ["precomputed", "copy", "peft"])
def test_dpo_compares_with_the_model_as_it_was_at_the_start(trl, way, tmp_path):
    """Not with the plain model of its folder: at the first step policy and reference are the same."""
    if way == "peft":  # stock peft, whose second adapter TRL makes and freezes
        model = models.with_peft(models.model("qwen3_moe"))
        hf.register(model)
        trainer = dpo(trl, tmp_path, model)
    else:
        model = with_attention("int8") if way == "copy" else alone()
        copied = {"ref_model": copy.deepcopy(model.get_base_model())} if way == "copy" else {}
        trainer = dpo(trl, tmp_path, model, way == "precomputed", **copied)
    margins = losses(trainer, "rewards/margins")
    assert margins[0] == 0.0 and margins[1] != 0.0


def test_the_first_margin_is_not_zero_if_the_reference_is_another_model(trl, tmp_path):
    """So a margin of zero shows that the reference is the policy as it was: here it is the model before rounding."""
    plain = models.peft.get_peft_model(
        models.model("qwen3_moe"), models.peft.LoraConfig(target_modules=["q_proj"], r=2)
    )
    trainer = dpo(trl, tmp_path, with_attention("int8"), ref_model=plain.get_base_model())
    assert losses(trainer, "rewards/margins")[0] != 0.0


def test_dpo_without_a_reference_is_refused(trl, tmp_path):
    """TRL would add an adapter as the reference, and our LoRA would stay on in it."""
    with pytest.raises(ValueError, match=r"adapter_name='ref'.*give ref_model=copy.deepcopy\(model.get_base_model"):
        dpo(trl, tmp_path, with_attention("int8"))


def test_sft_trains_the_lora_of_experts_and_attention(trl, tmp_path):
    model = with_attention()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = trl.SFTConfig(**options(tmp_path))
    trainer = trl.SFTTrainer(
        model=model, args=config, train_dataset=rows("prompt", "completion"), processing_class=tokenizer()
    )
    assert len(losses(trainer)) == 2
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    assert any("experts.lora" in name and p.requires_grad for name, p in model.named_parameters())
