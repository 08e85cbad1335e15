"""save_pretrained of a converted model: transformers loads the folder as the same model, LoRA included."""

import pytest
import torch

from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf import saving


def loaded(folder):
    model, info = models.transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model.eval()


def experts(model):
    return {name: p for name, p in model.state_dict().items() if ".experts." in name and "lora" not in name}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_converted_model_is_saved_as_the_plain_one(family, tmp_path):
    plain = models.model(family)
    wanted = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    hf.convert(plain, format="fp32").save_pretrained(tmp_path)
    again = loaded(tmp_path).state_dict()
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("format", ["int4", "int8", "bf16"])
def test_codes_are_saved_as_the_numbers_they_stand_for(format, tmp_path):
    ours = hf.convert(models.model("qwen3_moe"), format=format, group_size=8 if format == "int4" else None)
    ours.save_pretrained(tmp_path)
    gate_up, down = models.experts_of(ours).base.unpack()
    again = models.experts_of(loaded(tmp_path))
    assert torch.equal(again.gate_up_proj, gate_up) and torch.equal(again.down_proj, down)


def test_a_trained_lora_is_applied_by_from_pretrained(tmp_path):
    ours = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 2})
    models.randomise(ours)
    ours.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    again = loaded(tmp_path)
    assert again.peft_config  # transformers has loaded the adapter too
    again.set_experts_implementation("eager")
    stock = models.peft.PeftModel.from_pretrained(models.model("qwen3_moe"), tmp_path).eval()
    ids = models.tokens()
    assert torch.equal(again(ids).logits, stock(ids).logits)
    goldens.check_alike(ours.eval(), merged(stock))


def merged(stock):
    """peft's merge, in float64 so that the sum W + BA is not rounded."""
    plain = stock.double().merge_and_unload()
    plain.set_experts_implementation("eager")
    return plain


def test_an_untrained_lora_leaves_a_plain_folder(tmp_path):
    hf.convert(models.model("qwen3_moe"), lora={"rank": 2}).save_pretrained(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    loaded(tmp_path)


def test_trainer_saves_a_model_that_loads(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    from transformers import Trainer, TrainingArguments

    ours = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 2})
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    Trainer(model=ours, args=arguments).save_model(str(tmp_path / "saved"))
    again = loaded(tmp_path / "saved")
    again.set_experts_implementation("eager")
    goldens.check_alike(ours, again)


def test_a_peft_model_around_a_converted_one_saves_the_lora_of_both(tmp_path):
    both = models.peft.get_peft_model(models.model("qwen3_moe"), models.peft.LoraConfig(target_modules=["q_proj"], r=2))
    hf.convert(both, format="fp32", lora={"rank": 2})
    models.randomise(both)
    both.save_pretrained(tmp_path)
    stock = models.peft.PeftModel.from_pretrained(models.model("qwen3_moe"), tmp_path).eval()
    assert any("experts" in name and "lora_A" in name for name, _ in stock.named_parameters())
    goldens.check_alike(both.eval(), merged(stock))


def test_experts_that_do_not_fit_into_memory_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    ours = hf.convert(models.model("qwen3_moe"), format="int8")
    monkeypatch.setattr(saving, "free_memory", lambda: 1000)
    with pytest.raises(
        MemoryError, match="need 0.0 GiB of memory, but 0.0 GiB are free; use goldsmith.hf.save_adapter"
    ):
        ours.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
