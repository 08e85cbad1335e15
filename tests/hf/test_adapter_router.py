"""A router in an adapter: whole, as finetune trains it, including untrained tensors; or with LoRA by peft."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.training.model.loading import load, save_adapter
from goldsmith.hf.training.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("family", [*models.FAMILIES, *models.KEPT])
def test_stock_peft_reads_a_trained_router_of_every_family(family, tmp_path):
    plain = models.model(family)
    with torch.no_grad():
        for name, buffer in [*plain.named_buffers(), *plain.named_parameters()]:
            if "e_score_correction_bias" in name:
                buffer.copy_(torch.linspace(-1, 1, buffer.numel()).view_as(buffer))
    plain.save_pretrained(tmp_path / "model")
    options = {
        "model": str(tmp_path / "model"),
        "data": "",
        "output": "tuned",
        "format": "fp32",
        "rank": 3,
        "threads": 1,
    }
    loaded = load(Options(**options, train_router=True, lora_modules=("o_proj",)))
    models.randomise(loaded.model)
    routers = [parameter for name, parameter in loaded.parameters.items() if "lora" not in name]
    assert routers
    with torch.no_grad():
        for parameter in routers:
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    save_adapter(loaded, tmp_path / "adapter")
    ours = loaded.model.eval()
    stock = models.peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert any(type(module).__name__ == "ModulesToSaveWrapper" for module in stock.modules())
    ids = models.tokens()
    wanted = ours(ids).logits
    again = hf.convert(models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), format="fp32")
    assert torch.equal(hf.load_adapter(again, tmp_path / "adapter").eval()(ids).logits, wanted)
    hf.save_adapter(again, tmp_path / "again")
    first, second = (load_file(tmp_path / folder / WEIGHTS) for folder in ("adapter", "again"))
    assert first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())
    goldens.check_alike(ours, stock)


def adapted(model, options):
    """peft's LoRA by these options and ours on the experts, of another rank."""
    wrapped = models.peft.get_peft_model(model, models.peft.LoraConfig(r=2, lora_alpha=6, **options))
    hf.convert(wrapped, format="fp32", lora={"rank": 3})
    models.randomise(wrapped)
    return wrapped.eval()


@pytest.mark.parametrize(
    "family, options",
    [
        *((family, {"target_modules": ["gate"]}) for family in ("qwen3_moe", "mixtral", "deepseek_v3", "ernie4_5_moe")),
        ("qwen3_moe", {"target_modules": ["q_proj", "gate"]}),
        ("deepseek_v3", {"target_modules": ["o_proj", "gate"]}),
        ("mixtral", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["mlp.router.weight"]}),
        # peft leaves the name of experts' parameters in the config, which those of a converted model are not
        ("deepseek_v3", {"target_modules": ["o_proj", "gate"], "target_parameters": ["gate_up_proj", "down_proj"]}),
    ],
    ids=str,
)
def test_peft_s_lora_on_a_router_is_saved_in_the_adapter(family, options, tmp_path):
    plain = models.model(family)
    if "gate_up_proj" in options.get("target_parameters", ()):
        ours = hf.convert(models.model(family), format="fp32", lora={"rank": 3})
        models.peft.inject_adapter_in_model(models.peft.LoraConfig(r=2, lora_alpha=6, **options), ours)
        models.randomise(ours)
    else:
        ours = adapted(models.model(family), options)
    router = [name for name, _ in ours.named_parameters() if "mlp" in name and "lora_" in name]
    assert len(router) == 2
    hf.save_adapter(ours, tmp_path / "adapter")
    ids = models.tokens()
    wanted = ours(ids).logits
    with torch.no_grad():
        weight = ours.get_parameter(router[1]).clone()
        ours.get_parameter(router[1]).zero_()
        assert not torch.equal(ours(ids).logits, wanted), "the router's LoRA has no effect"
        ours.get_parameter(router[1]).copy_(weight)
    stock = models.peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    goldens.check_alike(ours, stock)
    again = hf.load_adapter(hf.convert(models.model(family), format="fp32"), tmp_path / "adapter").eval()
    assert torch.equal(again(ids).logits, wanted)
    hf.save_adapter(again, tmp_path / "again")
    for name in (WEIGHTS, CONFIG):
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("adapter", "again"))
        if name == CONFIG:  # a model of transformers' own has no class of peft's to name
            first, second = ({**json.loads(text), "auto_mapping": None} for text in (first, second))
        assert first == second


def test_missing_tensors_of_a_router_are_named(tmp_path):
    hf.save_adapter(adapted(models.model("qwen3_moe"), {"target_modules": ["gate"]}), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({name: t for name, t in tensors.items() if "mlp.gate" not in name}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=r"covers model\.layers\.1\.mlp\.gate, but the file has no .*gate\.lora_A"):
        hf.load_adapter(hf.convert(models.model("qwen3_moe"), format="fp32"), tmp_path)
