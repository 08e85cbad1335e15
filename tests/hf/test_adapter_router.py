"""A router that finetune trains stands whole in the adapter, as stock peft wants it, with what nobody trains in it."""

import pytest
import torch
from safetensors.torch import load_file

from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.training.model import load, save_adapter
from goldsmith.hf.training.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
WEIGHTS = "adapter_model.safetensors"


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
