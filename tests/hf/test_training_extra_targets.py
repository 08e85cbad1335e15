"""finetune outside the experts, named layers and routers: everything named is trained and saved."""

import pytest
import torch

from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.training.errors import TrainingError
from goldsmith.hf.training.model.loading import check, load, save_adapter
from goldsmith.hf.training.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
SHARED = ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts")


def options(folder, **more):
    defaults = {"data": "", "output": "tuned", "format": "fp32", "rank": 3, "threads": 1}
    return Options(**(defaults | {"model": str(folder)} | more))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of the plain models, by family."""
    created = {}

    def folder(family):
        if family not in created:
            created[family] = tmp_path_factory.mktemp(family)
            models.model(family).save_pretrained(created[family])
        return created[family]

    return folder


def adapted(model):
    return {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


@pytest.mark.parametrize(
    "family, names, wanted",
    [
        ("qwen3_moe", ["gate"], ["model.layers.1.mlp.gate"]),
        ("qwen3_moe", ["down_proj"], ["model.layers.0.mlp.down_proj"]),
        (
            "qwen3_moe",
            ["q_proj", "mlp.gate"],
            ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate"],
        ),
        ("mixtral", ["gate"], ["model.layers.0.mlp.gate"]),
        ("gpt_oss", ["router"], ["model.layers.0.mlp.router"]),
        ("deepseek_v3", ["gate_proj"], [f"{path}.gate_proj" for path in SHARED]),
        ("deepseek_v3", ["shared_experts.up_proj"], [f"{SHARED[1]}.up_proj"]),
        (
            "deepseek_v3",
            ["o_proj", "gate", "gate_proj", "up_proj", "down_proj"],
            [f"{path}.{name}" for path in SHARED for name in ("gate_proj", "up_proj", "down_proj")]
            + ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.gate"],
        ),
    ],
    ids=str,
)
def test_every_named_layer_gets_lora_and_the_adapter_has_all_of_it(family, names, wanted, saved, tmp_path):
    loaded = load(options(saved(family), lora_modules=tuple(names)))
    assert adapted(loaded.model) == set(wanted)
    assert all(loaded.model.get_parameter(name).dtype == torch.float32 for name in loaded.parameters)
    report = hf.trainable_report(loaded.model)["trained_parameters"]
    router = [p for name, p in loaded.parameters.items() if ".gate.lora_" in name or ".router.lora_" in name]
    assert report["router"] == sum(p.numel() for p in router) and not report["other"]
    models.randomise(loaded.model)
    save_adapter(loaded, tmp_path)
    ours, ids = loaded.model.eval(), models.tokens()
    again = hf.convert(models.model(family), format="fp32")
    assert torch.equal(hf.load_adapter(again, tmp_path).eval()(ids).logits, ours(ids).logits)
    stock = models.peft.PeftModel.from_pretrained(models.model(family), tmp_path).eval()
    theirs = {path.removeprefix("base_model.model.") for path in adapted(stock)}
    assert {path for path in theirs if ".experts" not in path} == set(wanted)
    goldens.check_alike(ours, stock)


@pytest.mark.parametrize(
    "family, more, message",
    [
        ("qwen3_moe", {"lora_modules": ("q_proj", "qproj")}, "--lora-modules qproj: no layer of this model has that"),
        ("mixtral", {"lora_modules": ("gate_proj",)}, "--lora-modules gate_proj: no layer .* through --targets"),
        (
            "qwen3_moe",
            {"lora_modules": ("embed_tokens",)},
            "embed_tokens: model.embed_tokens is of class Embedding, not a linear",
        ),
        ("qwen3_moe", {"lora_modules": ("norm",)}, "norm: model.norm is of class Qwen3MoeRMSNorm, not a linear"),
        ("qwen3_moe", {"lora_modules": ("experts",)}, "experts: model.layers.1.mlp.experts belongs to the experts"),
        ("qwen3_moe", {"lora_modules": ("q_proj", "gate"), "dropout": 0.1}, "gate: peft adapts these as parameters"),
        ("qwen3_moe", {"lora_modules": ("gate",), "train_router": True}, "--lora-modules gate puts LoRA on them"),
        ("deepseek_v3", {"lora_modules": ("o_proj", "mlp.gate"), "train_router": True}, "modules mlp.gate puts LoRA"),
    ],
    ids=str,
)
def test_untrainable_names_are_refused_without_reading_weights(family, more, message, saved, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((saved(family) / name).read_bytes())
    with pytest.raises(TrainingError, match=message):
        check(options(tmp_path, **more))
    with pytest.raises(TrainingError, match=message):
        load(options(saved(family), **more))


def test_train_router_refuses_a_model_without_a_router(saved, monkeypatch):
    check(options(saved("mixtral"), train_router=True))
    monkeypatch.setattr("goldsmith.hf.routers.NAMES", ("chooser",))
    with pytest.raises(TrainingError, match="--train-router finds no router in this model: a module gate or router"):
        check(options(saved("mixtral"), train_router=True))


@pytest.mark.parametrize("family", ["ernie4_5_moe", "deepseek_v3", "gpt_oss"])
def test_a_trained_router_trains_only_the_parameters_that_the_model_trains(family, saved):
    loaded = load(options(saved(family), train_router=True))
    trained = {name for name in loaded.parameters if ".experts." not in name}
    wanted = {name for name, _ in models.model(family).named_parameters() if ".gate." in name or ".router." in name}
    assert trained == {name for name in wanted if "e_score_correction_bias" not in name} and trained


def test_a_router_s_weights_are_recognised_inside_peft_s_layer():
    config = models.peft.LoraConfig(target_modules=["gate"], r=2)
    ours = hf.convert(models.peft.get_peft_model(models.model("qwen3_moe"), config), format="fp32", lora={"rank": 2})
    path = "base_model.model.model.layers.1.mlp.gate"
    assert list(hf.routers.routers(ours)) == [path]
    assert list(hf.routers.router_weights(ours)) == [f"{path}.base_layer.weight"]
    trained = hf.trainable_report(ours)["trained_parameters"]
    assert trained["router"] == 2 * (32 + 5) and not trained["attention_lora"]
