"""Every tensor outside the experts has the dtype and value that transformers' own `from_pretrained` gives it.

transformers keeps some weights in float32 in a half-precision model: DeepSeek-V3's e_score_correction_bias is large
and nearly equal for all experts, so rounding it changes which experts are chosen.
"""

import pytest
import torch

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.training.model.loading import load as to_be_trained
from goldsmith.hf.training.options import Options
from goldsmith.offload.attach import from_pretrained

KEPT = ["deepseek_v3", *models.KEPT]
MANY = {"deepseek_v3": {"n_routed_experts": 64, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 6}}


@pytest.fixture(scope="module", params=[*models.FAMILIES, *models.KEPT])
def saved(request, tmp_path_factory):
    """A family and its folder; all values outside the experts need float32."""
    family, folder = request.param, tmp_path_factory.mktemp("model")
    if not hasattr(models.transformers, models.ALL[family][1]):
        pytest.skip(f"this transformers has no {family}")
    plain = models.model(family, **MANY.get(family, {}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*plain.named_parameters(), *plain.named_buffers()]:
            if "e_score_correction_bias" in name:
                tensor.copy_(4.5 + 0.02 * torch.randn(tensor.shape, generator=generator))
            elif "norm" in name:
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif ".experts." in name:
                tensor.copy_(tensor.bfloat16())
    plain.save_pretrained(folder)
    return family, folder


def streamed(folder, dtype):
    config = models.transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        empty = models.transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return hf.convert(empty, checkpoint=folder).eval()


def theirs(folder, dtype):
    offloaded = models.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    offloaded.set_experts_implementation("eager")
    return offloaded.eval()


def tensors(model):
    """All tensors except the experts' and adapters', by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t for name, t in named if ".experts." not in name and "lora" not in name}


def check_tensors(ours, wanted):
    ours, wanted = tensors(ours), tensors(wanted)
    assert ours.keys() == wanted.keys()
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in wanted.items()}
    assert [n for n, t in ours.items() if not torch.equal(t, wanted[n])] == []
    return wanted


def routes(model):
    """The chosen experts of every token, sorted."""
    items = []

    def keep(module, args, kwargs):
        ids = args[1] if len(args) > 1 else kwargs["top_k_index"]
        items.append(ids.sort(-1).values)

    with models.experts_of(model).register_forward_pre_hook(keep, with_kwargs=True), torch.no_grad():
        model(models.tokens(4, 16))
    return items[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_a_streamed_model_has_the_tensors_and_the_routes_of_from_pretrained(saved, dtype):
    family, folder = saved
    ours, wanted = streamed(folder, dtype), theirs(folder, dtype)
    named = check_tensors(ours, wanted)
    if family in KEPT:
        assert any(t.dtype == torch.float32 for n, t in named.items() if "e_score_correction_bias" in n)
    assert torch.equal(routes(ours), routes(wanted))


def test_finetune_s_and_generate_s_models_have_them_too(saved, tmp_path):
    _, folder = saved
    wanted = theirs(folder, torch.bfloat16)
    trained = to_be_trained(Options(model=str(folder), data="", output="tuned", dtype="bf16", threads=1)).model.eval()
    check_tensors(trained, wanted)
    assert torch.equal(routes(trained), routes(wanted))
    with from_pretrained(folder, store=tmp_path / "store", dtype=torch.bfloat16, device="cpu") as offloaded:
        check_tensors(offloaded.model, wanted)
        assert torch.equal(routes(offloaded.model), routes(wanted))
