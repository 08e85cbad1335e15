"""Adapters with a pair of factors per expert: those that peft wrote with transformers 4, and those that we export."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf import models
from offload.whole_models import check_alike

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.adapter.fitting import fitted
from goldsmith.hf.adapter.per_expert import export
from goldsmith.hf.experts_spec import experts_modules, spec_of
from goldsmith.offload import from_pretrained

NAMES = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
WEIGHTS, ROOT = "adapter_model.safetensors", "base_model.model."
RANK, ALPHA = 3, 6


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def specs_of(model):
    return {path: spec_of(module) for path, module in experts_modules(model)}


def old_adapter(family, folder, drop=0):
    """(the plain model, the merged one): an adapter in `folder` as peft wrote it for separate experts and attention."""
    plain, merged = models.model(family), models.model(family)
    tensors, gate, up, down = {}, *NAMES[family]
    block = "block_sparse_moe" if family == "mixtral" else "mlp"
    with torch.no_grad():
        for path, module in experts_modules(merged):
            where = path.replace(".mlp.", f".{block}.")
            inner = module.down_proj.shape[-1]
            for e in range(module.down_proj.shape[0] - drop):
                for name, (weight, rows) in {
                    gate: (module.gate_up_proj, slice(0, inner)),
                    up: (module.gate_up_proj, slice(inner, None)),
                    down: (module.down_proj, slice(None)),
                }.items():
                    part = weight[e, rows]
                    a, b = (draw(*s, seed=len(tensors)) for s in ((RANK, part.shape[1]), (part.shape[0], RANK)))
                    part += ALPHA / RANK * b @ a
                    stem = f"{ROOT}{where}.{e}.{name}"
                    tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        for path, module in merged.named_modules():
            if path.endswith("q_proj"):
                a, b = (draw(*s, seed=7) for s in ((RANK, module.in_features), (module.out_features, RANK)))
                module.weight += ALPHA / RANK * b @ a
                tensors |= {f"{ROOT}{path}.lora_A.weight": a, f"{ROOT}{path}.lora_B.weight": b}
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", gate, up, down]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))
    return plain, merged


@pytest.mark.parametrize("family", NAMES)
def test_an_adapter_of_transformers_4_is_read_everywhere(family, tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    plain, merged = old_adapter(family, tmp_path / "adapter")
    plain.save_pretrained(tmp_path / "base")
    converted = hf.convert(models.model(family), format="fp32")
    hf.load_adapter(converted, tmp_path / "adapter")
    check_alike(converted.eval(), merged)
    with from_pretrained(tmp_path / "base", adapter=tmp_path / "adapter", device="cpu", threads=1) as offloaded:
        check_alike(offloaded.model, merged)
    hf.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    check_alike(models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval(), merged)


def test_an_exported_adapter_is_read_as_the_one_it_came_from(tmp_path):
    """The numbers are whole and the scaling is 2, so that every product is exact."""
    plain = models.model("qwen3_moe")
    wrapped = models.with_peft(plain, rank=3, alpha=6)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora" in name:
                parameter.copy_((parameter * 10).round())
    wrapped.save_pretrained(tmp_path / "peft")
    export(plain, specs_of(plain), tmp_path / "peft", tmp_path / "exported")
    one, other = (fitted(plain, specs_of(plain), tmp_path / name, "test") for name in ("peft", "exported"))
    for path, spec in specs_of(plain).items():
        for name in (spec.first, "down_proj"):
            first, second = one.experts[path][name], other.experts[path][name]
            assert torch.equal(first.scaling * first.b @ first.a, second.scaling * second.b @ second.a)


@pytest.mark.parametrize(
    "family, drop, message",
    [
        ("qwen3_moe", 1, "are for other experts"),
        ("gpt_oss", 0, "pairs for single experts cannot be joined for this model: peft does not know how to join"),
    ],
)
def test_pairs_that_cannot_be_joined_are_refused_in_one_sentence(family, drop, message, tmp_path):
    if family == "gpt_oss":
        plain = models.model(family)
        models.with_peft(plain).save_pretrained(tmp_path / "peft")
        export(plain, specs_of(plain), tmp_path / "peft", tmp_path / "adapter")
    else:
        plain, _ = old_adapter(family, tmp_path / "adapter", drop)
    with pytest.raises(ValueError, match=message):
        fitted(plain, specs_of(plain), tmp_path / "adapter", "test")


def test_names_of_another_model_are_named(tmp_path):
    plain, _ = old_adapter("qwen3_moe", tmp_path / "adapter")
    save_file({f"{ROOT}model.zorgs.lora_A.weight": torch.zeros(3, 4)}, tmp_path / "adapter" / WEIGHTS)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config |= {"target_modules": [], "target_parameters": list(models.EXPERTS)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{WEIGHTS}: {ROOT}model.zorgs.lora_A.weight has no place in this model"):
        fitted(plain, specs_of(plain), tmp_path / "adapter", "test")
