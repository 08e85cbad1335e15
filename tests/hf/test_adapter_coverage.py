"""An adapter whose config covers more than its file holds: one error names what is missing; the model is unchanged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.adapter import coverage

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LAYER = "base_model.model.model.layers.1"


def plain(layers=2):
    return models.model("mixtral", num_hidden_layers=layers)


def converted(layers=2, **options):
    return hf.convert(plain(layers), format="fp32", **options)


@pytest.fixture(scope="module", params=["ours", "peft's"])
def adapter(request, tmp_path_factory):
    """An adapter on the experts and on attention, of a model of two layers."""
    folder = tmp_path_factory.mktemp("adapter")
    if request.param == "ours":
        wrapped = models.peft.get_peft_model(plain(), models.peft.LoraConfig(target_modules=["q_proj"], r=2))
        hf.convert(wrapped, format="fp32", lora={"rank": 2})
        models.randomise(wrapped)
        hf.save_adapter(wrapped, folder)
    else:
        lora = models.peft.LoraConfig(target_parameters=TARGETS, target_modules=["q_proj"], r=2)
        wrapped = models.peft.get_peft_model(plain(), lora)
        models.randomise(wrapped)
        wrapped.save_pretrained(folder)
    return folder


def copied(adapter, folder, drop=lambda name: False, **changes):
    """The same adapter without some tensors, or with another config."""
    tensors = {name: t for name, t in load_file(adapter / WEIGHTS).items() if not drop(name)}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(json.loads((adapter / CONFIG).read_text()) | changes))
    return folder


def state(model):
    """Every parameter by name (identity, whether it is trained, values), and every module's class."""
    parameters = {name: (id(p), p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    return parameters, {name: type(m) for name, m in model.named_modules()}, hasattr(model, "peft_config")


def refused(model, folder, message):
    before = state(model)
    with pytest.raises(ValueError, match=message):
        hf.load_adapter(model, folder)
    after = state(model)
    assert before[1:] == after[1:] and before[0].keys() == after[0].keys()
    for name, (number, trained, values) in before[0].items():
        assert (number, trained) == after[0][name][:2] and torch.equal(values, after[0][name][2]), name


@pytest.mark.parametrize(
    "drop, message",
    [
        (lambda n: n.startswith(LAYER), r"covers model\.layers\.1\.mlp\.experts, model\.layers\.1\.self_attn\.q_proj"),
        (lambda n: n.startswith(f"{LAYER}.mlp"), r"covers model\.layers\.1\.mlp\.experts, but .* no .*and 1 more"),
        (lambda n: n.startswith(f"{LAYER}.mlp.experts.lora"), rf"no {LAYER}\.mlp\.experts\.lora_A\.weight, .*lora_B"),
        (lambda n: n.startswith(f"{LAYER}.self_attn"), rf"covers model\.layers\.1\.self_attn\.q_proj, .* no {LAYER}"),
        (lambda n: n.startswith(f"{LAYER}.self_attn.q_proj.lora_B"), r"no .*\.1\.self_attn\.q_proj\.lora_B\.weight"),
    ],
    ids=["layer", "experts", "down", "attention", "B of attention"],
)  # fmt: skip
def test_missing_tensors_are_named(drop, message, adapter, tmp_path):
    refused(converted(lora={"rank": 2}), copied(adapter, tmp_path, drop), message)


def test_an_adapter_with_fewer_or_more_layers_is_refused(adapter, tmp_path):
    refused(
        converted(3), adapter, r"covers model\.layers\.2\.mlp\.experts, model\.layers\.2\.self_attn\.q_proj, but the"
    )
    refused(converted(1), adapter, r"layers\.1\.mlp\.experts\..* has no place in this model")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fan_in_fan_out": True}, "fan_in_fan_out is set, which neither peft nor goldsmith supports"),
        ({"modules_to_save": ["lm_head"]}, "covers lm_head, but the file has no base_model.model.lm_head.weight"),
        ({"modules_to_save": ["nosuch"]}, "modules_to_save names 'nosuch', a module that this model does not have"),
        ({"target_parameters": [*TARGETS, "foo"]}, "target_parameters has 'foo', which matches no parameter"),
        ({"target_parameters": TARGETS[:1]}, "for other experts|has no place in this model"),
        ({"target_modules": ["k_proj"]}, "self_attn.q_proj.lora_A.weight has no place in this model"),
        (
            {"target_modules": ["q_proj", "k_proj"]},
            "covers model.layers.0.self_attn.k_proj, model.layers.1.self_attn.k",
        ),
        ({"target_modules": ["nosuch"]}, "Target modules .*nosuch.* not found in the base model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_does_not_match_the_file_is_refused(changes, message, adapter, tmp_path):
    refused(converted(), copied(adapter, tmp_path, **changes), message)


def test_attention_of_another_size_is_refused_before_peft_changes_the_model(adapter, tmp_path):
    name = f"{LAYER}.self_attn.q_proj.lora_A.weight"
    folder = copied(adapter, tmp_path, lambda n: n == name)
    save_file(load_file(folder / WEIGHTS) | {name: torch.zeros(2, 5)}, folder / WEIGHTS, {"format": "pt"})
    refused(converted(), folder, r"q_proj\.lora_A\.weight has the shape \[2, 5\], but \[2, 32\] in this model")


def test_dropout_in_the_config_and_a_wrapped_model_are_accepted(adapter, tmp_path):
    """lora_dropout only matters in training; the wrapped model gets the same numbers."""
    ours = hf.load_adapter(converted(), copied(adapter, tmp_path, lora_dropout=0.1)).eval()
    wrapped = models.peft.get_peft_model(plain(), models.peft.LoraConfig(target_modules=["q_proj"], r=2))
    hf.load_adapter(hf.convert(wrapped, format="fp32", lora={"rank": 2}), adapter).eval()
    assert torch.equal(ours(models.tokens()).logits, wrapped(models.tokens()).logits)
    folder = tmp_path / "less"
    folder.mkdir()
    refused(
        wrapped, copied(adapter, folder, lambda n: n.startswith(f"{LAYER}.self_attn")), "covers model.layers.1.self"
    )


def test_a_shell_is_a_new_tree_around_the_same_tensors():
    model = converted()
    shell = coverage.shell(model)
    assert [n for n, _ in shell.named_modules()] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(shell.parameters(), model.parameters(), strict=True))
    shell.model.layers[0].mlp = torch.nn.Identity()
    shell.lm_head.weight = torch.nn.Parameter(torch.zeros(1))
    assert not isinstance(model.model.layers[0].mlp, torch.nn.Identity) and model.lm_head.weight.numel() > 1
