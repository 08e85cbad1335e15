"""Offloaded models with adapters: stock peft's logits and text in every family, by name, and the plain model again."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

from goldsmith import offload
from goldsmith.offload.errors import UnsupportedModel
from hf import goldens, models
from offload.whole_models import assert_same_text, check_alike, greedy

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "adapters-cache"))


def saved(plain, folder, **options):
    theirs = models.with_peft(plain, **options)
    theirs.save_pretrained(folder)
    return theirs


def merged(plain, folder):
    return models.peft.PeftModel.from_pretrained(copy.deepcopy(plain), folder).merge_and_unload().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_text_are_stock_pefts(family, tmp_path):
    plain = models.model(family)
    saved(plain, tmp_path, rank=3, target_modules=["o_proj"])
    theirs, ids = merged(plain, tmp_path), models.tokens(2, 6)
    with offload.offload(
        models.model(family), adapter=tmp_path, device="cpu", gpu_budget="1MiB", lanes="mixed"
    ) as ours:
        check_alike(ours.model, theirs)
        assert_same_text(theirs, ours.model, ids)
        assert not any(parameter.requires_grad for parameter in ours.model.parameters())


def test_adapters_are_chosen_by_name_added_up_and_removed(tmp_path):
    plain, ids = models.model("qwen3_moe"), models.tokens(2, 6)
    saved(plain, tmp_path / "v1.0", rank=3, target_modules=["o_proj"], seed=1)
    saved(plain, tmp_path / "two", rank=2, targets=models.EXPERTS[:1], seed=2)
    theirs = models.peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "v1.0").merge_and_unload()
    both = models.peft.PeftModel.from_pretrained(copy.deepcopy(theirs), tmp_path / "two").merge_and_unload().eval()
    folders = {"v1.0": tmp_path / "v1.0", "two": tmp_path / "two"}
    with offload.offload(models.model("qwen3_moe"), adapter=folders, device="cpu") as ours:
        assert (ours.adapters, ours.active_adapters) == (("v1.0", "two"), ("v1.0",))
        check_alike(ours.model, theirs.eval())
        ours.set_adapter("two")
        check_alike(ours.model, merged(plain, tmp_path / "two"))
        ours.set_adapter(["v1.0", "two"])
        check_alike(ours.model, both)
        ours.set_adapter(None)
        check_alike(ours.model, plain)
        with pytest.raises(ValueError, match="there is no adapter 'three'; known: 'v1.0', 'two'"):
            ours.set_adapter("three")
        assert ours.active_adapters == ()
        ours.set_adapter("v1.0")
        back = ours.detach()
    assert_same_text(plain, back, ids)
    assert not any("lora" in name for name, _ in back.named_parameters())
    assert all(parameter.requires_grad for parameter in back.parameters())


def test_an_adapter_can_be_added_later(tmp_path):
    plain = models.model("gpt_oss")
    saved(plain, tmp_path, rank=3, target_modules=["q_proj"])
    with offload.offload(models.model("gpt_oss"), device="cpu") as ours:
        assert ours.load_adapter({"late": tmp_path}) == ("late",) and ours.active_adapters == ()
        check_alike(ours.model, plain)
        ours.set_adapter("late")
        check_alike(ours.model, merged(plain, tmp_path))
        with pytest.raises(ValueError, match="already an adapter 'late'"):
            ours.load_adapter({"late": tmp_path})


def test_a_router_that_the_adapter_replaces_whole_comes_and_goes(tmp_path):
    plain = models.model("qwen3_moe")
    theirs = models.with_peft(plain, rank=3, modules_to_save=["mlp.gate"])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(-3.0)
    theirs.save_pretrained(tmp_path)
    with offload.offload(models.model("qwen3_moe"), adapter=tmp_path, device="cpu") as ours:
        check_alike(ours.model, merged(plain, tmp_path))
        ours.set_adapter(None)
        check_alike(ours.model, plain)


def test_an_adapter_without_experts_works_too(tmp_path):
    plain = models.model("mixtral")
    saved(plain, tmp_path, targets=(), rank=3, target_modules=["q_proj", "v_proj"])
    with offload.offload(models.model("mixtral"), adapter=tmp_path, device="cpu") as ours:
        check_alike(ours.model, merged(plain, tmp_path))


def test_a_bf16_model_with_an_adapter_is_as_exact_as_pefts(tmp_path):
    plain = models.model("qwen3_moe", dtype=torch.bfloat16)
    saved(plain, tmp_path / "adapter", rank=3, target_modules=["o_proj"])
    plain.save_pretrained(tmp_path / "model")
    ids = models.tokens(2, 6)

    def logits(model):
        with torch.no_grad():
            return model(ids, use_cache=False).logits.double()

    wide = merged(models.model("qwen3_moe", dtype=torch.bfloat16).double(), tmp_path / "adapter")
    with goldens.Wide():
        exact = logits(wide)
    theirs = models.peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "adapter").eval()
    with offload.from_pretrained(tmp_path / "model", adapter=tmp_path / "adapter", device="cpu") as ours:
        assert ours.engine.store.format == "bf16"
        # peft rounds W + BA to bfloat16, the engine does not
        assert (logits(ours.model) - exact).norm() <= 2 * (logits(theirs) - exact).norm()


def test_a_parametrisation_of_offloaded_experts_is_refused_because_the_engine_does_not_see_it():
    with offload.offload(models.model("qwen3_moe"), device="cpu") as ours:
        for name in ("down_proj", "gate_up_proj"):
            module = torch.nn.Identity()
            torch.nn.utils.parametrize.register_parametrization(
                models.experts_of(ours.model), name, module, unsafe=True
            )
        with pytest.raises(ValueError, match="would not see the adapter: give it to offload"):
            ours.model(models.tokens(1, 4))


def test_pefts_own_wrapping_is_refused_before_and_after(tmp_path):
    saved(models.model("qwen3_moe"), tmp_path, rank=3)
    with offload.offload(models.model("qwen3_moe"), device="cpu") as ours:
        with pytest.raises(RuntimeError, match="An adapter goes into load_adapter"):
            models.peft.PeftModel.from_pretrained(ours.model, tmp_path)
    with pytest.raises(UnsupportedModel, match="give the adapter's folder: offload"):
        offload.offload(models.with_peft(models.model("qwen3_moe")), device="cpu")


@pytest.mark.parametrize("adapter, error, text", [
    (3, TypeError, "adapter is an int, expected a folder"),
    ([3], TypeError, "adapter has an int, expected folders"),
    ({"": "x"}, TypeError, "expected a name and a folder"),
    ("/nowhere/adapter", ValueError, "there is no folder '/nowhere/adapter' with an adapter"),
    ("someone/adapter", ValueError, "this machine has no copy of a hub model"),
])  # fmt: skip
def test_arguments_that_name_no_adapter_are_refused(adapter, error, text):
    with pytest.raises(error) as raised:
        offload.offload(models.model("qwen3_moe"), adapter=adapter, device="cpu")
    assert text in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", ["cpu", "copied", "mixed", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_text_are_stock_pefts_on_a_gpu(family, lanes, tmp_path):
    plain = models.model(family)
    saved(plain, tmp_path, rank=3, target_modules=["o_proj"])
    theirs, ids = merged(plain, tmp_path).cuda(), models.tokens(2, 6).cuda()
    options = {"device": "cuda", "gpu_budget": "64MiB", "lanes": lanes}
    with offload.offload(models.model(family), adapter=tmp_path, **options) as ours:
        assert_same_text(theirs, ours.model, ids)
        one, other = greedy(ours.model, ids)[1], greedy(theirs, ids)[1]
        assert float((one[0] - other[0]).norm()) < 1e-3 * float(other[0].norm())
