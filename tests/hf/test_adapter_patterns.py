"""peft's options for other modules do not apply to the experts: an adapter is written correctly or not at all."""

import json

import pytest
import torch

from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.experts import LoRA

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")


def plain(layers=2):
    return models.model("mixtral", num_hidden_layers=layers)


def with_attention(**options):
    config = models.peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=16, **options)
    converted = hf.convert(models.peft.get_peft_model(plain(), config), format="fp32", lora={"rank": 4, "alpha": 16})
    models.randomise(converted)
    return converted.eval()


def check_read(ours, folder, layers=2):
    """Saves the adapter; goldsmith reads the same bits again, and stock peft the same model."""
    hf.save_adapter(ours, folder)
    again = hf.load_adapter(hf.convert(plain(layers), format="fp32"), folder).eval()
    assert torch.equal(again(models.tokens()).logits, ours(models.tokens()).logits)
    stock = models.peft.PeftModel.from_pretrained(plain(layers), folder).eval()
    goldens.check_alike(ours, stock)
    return stock


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {".*proj": 32}},
        {"rank_pattern": {".*_proj": 2}},
        {"rank_pattern": {"v_proj": 3, ".*_proj": 2}, "alpha_pattern": {"v_proj": 5, ".*": 7}},
        {"rank_pattern": {"mlp.experts.down_proj": 2, "q_proj": 3}, "use_rslora": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_patterns_of_attention_do_not_reach_the_experts(options, tmp_path):
    ours = with_attention(**options)
    stock = check_read(ours, tmp_path)
    scalings = {
        path: m.scaling for path, m in ours.named_modules() if path.endswith("q_proj") and hasattr(m, "scaling")
    }
    modules = dict(stock.named_modules())
    assert scalings and all(modules[path].scaling == scaling for path, scaling in scalings.items())


@pytest.mark.parametrize(
    "targets",
    [
        [("gate", "up"), ("down",)],
        [("gate", "up", "down"), ("down",)],
        [("gate",), ("up", "down"), ("gate", "up")],
        [("down",), None, ("gate", "up", "down")],
    ],
    ids=str,
)
def test_targets_that_differ_by_layer_are_named_by_layer(targets, tmp_path):
    ours = hf.convert(plain(len(targets)), format="fp32", lora={"rank": 2})
    for i, (layer, names) in enumerate(zip(ours.model.layers, targets, strict=True)):
        experts = layer.mlp.experts
        sizes = experts.spec.num_experts, experts.spec.hidden_size, experts.spec.intermediate_size
        experts.lora = LoRA(*sizes, rank=2 + i, alpha=3 + i, targets=names) if names else None
    models.randomise(ours)
    check_read(ours.eval(), tmp_path, len(targets))
    parameters = json.loads((tmp_path / "adapter_config.json").read_text())["target_parameters"]
    assert not all(name.startswith("mlp.") for name in parameters)


def test_a_stock_peft_adapter_with_targets_by_layer_round_trips(tmp_path):
    targets = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    models.with_peft(plain(), targets=targets).save_pretrained(tmp_path / "stock")
    check_read(hf.load_adapter(hf.convert(plain(), format="fp32"), tmp_path / "stock").eval(), tmp_path / "ours")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"use_dora": True}, "the adapter outside the experts has use_dora, .* nothing was written"),
        ({"lora_bias": True}, "the adapter outside the experts has lora_bias, .* nothing was written"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' .* changed the base weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora' .* changed the base weights"),
    ],
)
def test_options_that_peft_does_not_support_with_experts_are_refused_before_writing(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        hf.save_adapter(with_attention(**options), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_changes_the_base_weights_is_refused(tmp_path):
    hf.save_adapter(with_attention(), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | {"init_lora_weights": "pissa"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="init_lora_weights is 'pissa', which changes the base weights"):
        hf.load_adapter(hf.convert(plain(), format="fp32"), tmp_path)
