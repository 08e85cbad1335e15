"""Loading an adapter replaces the previous one: the model is the same as with the later one alone."""

import itertools
import json

import pytest
import torch

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
EXPERTS = list(models.EXPERTS)
FIRST_LAYER = [f"layers.0.{name}" for name in EXPERTS]
ADAPTERS = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "other numbers": {"target_modules": ["q_proj", "v_proj"]},
    "alpha": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 32},
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "other modules": {"target_modules": ["q_proj", "k_proj"]},
    "experts alone": {"target_modules": []},
    "one layer": {"target_modules": [], "target_parameters": FIRST_LAYER},
    "router": {"target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]},
    "router's LoRA": {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]},
    "router's LoRA alone": {"target_modules": ["gate"]},
    "biases": {"target_modules": ["q_proj", "v_proj"], "bias": "all"},
}


def plain():
    return models.model("qwen3_moe", mlp_only_layers=[], attention_bias=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Folders of stock peft's adapters, by name."""
    folders = {}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        config = {"r": 4, "lora_alpha": 8, "target_parameters": EXPERTS, **options}
        wrapped = models.peft.get_peft_model(plain(), models.peft.LoraConfig(**config))
        models.randomise(wrapped, seed)
        with torch.no_grad():
            for key, parameter in wrapped.named_parameters():
                if parameter.requires_grad and "lora" not in key:
                    parameter.add_(0.5)
        folders[name] = tmp_path_factory.mktemp("adapter")
        wrapped.save_pretrained(folders[name])
    return folders


def loaded(*folders, model=None):
    ours = hf.convert(plain(), format="fp32") if model is None else model
    for folder in folders:
        hf.load_adapter(ours, folder)
    return ours.eval()


def trained(model):
    return {n.removeprefix("base_model.model."): tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}


def check_same(ours, wanted, folder):
    assert torch.equal(ours(models.tokens()).logits, wanted(models.tokens()).logits)
    for model, name in ((ours, "ours"), (wanted, "wanted")):
        hf.save_adapter(model, folder / name)
    weights = [(folder / name / "adapter_model.safetensors").read_bytes() for name in ("ours", "wanted")]
    configs = [json.loads((folder / name / "adapter_config.json").read_text()) for name in ("ours", "wanted")]
    settings = [{key: value for key, value in config.items() if key != "auto_mapping"} for config in configs]
    assert weights[0] == weights[1] and settings[0] == settings[1]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("before, after", list(itertools.permutations(ADAPTERS, 2)))
def test_only_the_later_adapter_counts(before, after, adapters, tmp_path):
    ours, wanted = loaded(adapters[before], adapters[after]), loaded(adapters[after])
    check_same(ours, wanted, tmp_path)
    assert trained(ours) == trained(wanted)


@pytest.mark.parametrize("after", ADAPTERS)
def test_the_first_adapter_replaces_lora_added_by_hand(after, adapters, tmp_path):
    config = models.peft.LoraConfig(target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"], r=3)
    ours = hf.convert(models.peft.get_peft_model(plain(), config), format="fp32", lora={"rank": 2})
    models.randomise(ours, 99)
    loaded(adapters[after], model=ours)
    assert isinstance(ours, models.peft.PeftModel)
    check_same(ours, loaded(adapters[after]), tmp_path)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_loaded_adapter_saved_again_computes_the_same_under_stock_peft(name, adapters, tmp_path):
    ours = loaded(adapters[name])
    hf.save_adapter(ours, tmp_path)
    stock = models.peft.PeftModel.from_pretrained(plain(), tmp_path).eval()
    theirs = models.peft.PeftModel.from_pretrained(plain(), adapters[name]).eval()
    assert torch.equal(stock(models.tokens()).logits, theirs(models.tokens()).logits)


def test_an_adapter_of_the_same_kind_is_written_in_place(adapters):
    ours = loaded(adapters["plain"])
    before = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    loaded(adapters["other numbers"], model=ours)
    after = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert before.keys() == after.keys() and all(p is after[name] for name, p in before.items())


def test_dropout_comes_from_the_later_adapter(adapters):
    by_hand = models.peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=8, lora_dropout=0.5)
    ours = loaded(adapters["plain"], model=hf.convert(models.peft.get_peft_model(plain(), by_hand), format="fp32"))
    assert ours.peft_config["default"].lora_dropout == 0
    assert torch.equal(ours.train()(models.tokens()).logits, loaded(adapters["plain"]).train()(models.tokens()).logits)


def test_float32_factors_are_not_written_into_bfloat16_ones(adapters):
    ours = hf.convert(plain(), format="fp32", lora={"rank": 4, "alpha": 8, "shared_a": True, "dtype": torch.bfloat16})
    loaded(adapters["plain"], model=ours)
    assert torch.equal(ours(models.tokens()).logits, loaded(adapters["plain"])(models.tokens()).logits)


def merged(model):
    model.merge_adapter()


def second(model):
    model.add_adapter("second", models.peft.LoraConfig(target_modules=["k_proj"]))


@pytest.mark.parametrize(
    "config, change, message",
    [
        ({}, merged, r"the model's adapter 'default' is merged: call unmerge_adapter\(\) first; nothing was changed"),
        ({}, second, r"the model has the adapters \['default', 'second'\], and only one can be replaced"),
        (
            {"init_lora_weights": "pissa"},
            lambda model: None,
            "init_lora_weights='pissa' .* changed the base weights",
        ),
    ],
)
def test_an_adapter_that_cannot_be_replaced_is_refused(config, change, message, adapters):
    lora = models.peft.LoraConfig(target_modules=["q_proj"], r=2, **config)
    ours = hf.convert(models.peft.get_peft_model(plain(), lora), format="fp32")
    models.randomise(ours)
    change(ours)
    before = ours(models.tokens()).logits
    with pytest.raises(ValueError, match=message):
        hf.load_adapter(ours, adapters["plain"])
    assert torch.equal(ours(models.tokens()).logits, before)
