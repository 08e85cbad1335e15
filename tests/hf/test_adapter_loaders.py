"""How vLLM and SGLang read adapters on experts: their loaders' rules for names and layout, applied to our files.

The rules are restated from the sources, read in November 2026: vLLM's `lora/model_manager.py`
(`_stack_moe_lora_weights`, `_create_merged_loras_inplace`) and `lora/lora_model.py`; SGLang's `srt/lora/lora.py`
(`normalize_gate_up_proj`) and `mem_pool.py`. Both take one rank and one scaling from r and lora_alpha, and ignore
peft's patterns.

The factors are whole numbers and the scalings powers of two, so that every product is exact and numbers are compared
bit for bit.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.adapter.fitting import fitted
from goldsmith.hf.adapter.per_expert import export
from goldsmith.hf.adapter_check.mistakes import variants
from goldsmith.hf.experts_spec import experts_modules, spec_of

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ROOT = "base_model.model."


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def model(request):
    return models.model(request.param)


def specs_of(model):
    return {path: spec_of(module) for path, module in experts_modules(model)}


def saved(model, folder, **options):
    """An adapter by stock peft: rank 3 and alpha 6 unless told otherwise."""
    theirs = whole_numbers(models.with_peft(model, **({"rank": 3, "alpha": 6} | options)))
    theirs.save_pretrained(folder)
    return folder


def whole_numbers(model):
    """The model with whole numbers in all factors."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.copy_((parameter * 10).round())
    return model


def read(folder):
    return load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())


def scaling_of(config):
    """One scaling for all modules, in vLLM (peft_helper) and in SGLang (LoRAAdapter)."""
    return config["lora_alpha"] / config["r"]


def wanted_of(model, folder):
    """{path: {"gate", "up", "down": s B A [E, out, in]}} of the trained model."""
    layers = {n: (path, spec) for n, (path, spec) in enumerate(specs_of(model).items())}
    fit = fitted(model, specs_of(model), folder, "test")
    plain = variants_of_nothing(fit, layers)
    return {layers[n][0]: deltas(lora) for n, lora in plain.items()}


def variants_of_nothing(fit, layers):
    from goldsmith.experts._factors import LayerLora
    from goldsmith.hf.adapter.reading import split_factors

    adapters = {}
    for n, (path, spec) in layers.items():
        factors, scaling, _ = split_factors(spec, fit.experts[path], fit.ranks.get(path))
        adapters[n] = LayerLora(factors, scaling)
    return adapters


def deltas(lora):
    return {target: lora.scaling[target] * b @ a for target, (a, b) in lora.factors.items()}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


# -- vLLM --------------------------------------------------------------------------------------------------------------


def vllm_stacked(folder, path, experts, interleaved):
    """vLLM's models with stacked experts (gpt-oss): `base_layer` is gate_up_proj, and both parameters must be there."""
    tensors, config = read(folder)
    pairs = {}
    for name, stem in (("gate_up", f"{path}.base_layer"), ("down", path)):
        a, b = (tensors[f"{ROOT}{stem}.lora_{which}.weight"] for which in "AB")
        a = a.reshape(experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
        pairs[name] = scaling_of(config) * b @ a
    gate_up = pairs["gate_up"]
    half = gate_up.shape[1] // 2
    gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else (gate_up[:, :half], gate_up[:, half:])
    return {"gate": gate, "up": up, "down": pairs["down"]}


def vllm_per_expert(folder, path, experts):
    """vLLM's other models: one pair per expert and projection, under experts.<e>.<projection>."""
    tensors, config = read(folder)
    stacks = {}
    for target, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        pairs = [[tensors[f"{ROOT}{path}.{e}.{name}.lora_{which}.weight"] for which in "AB"] for e in range(experts)]
        assert {a.shape[0] for a, _ in pairs} == {config["r"]}, "pack_moe stacks pairs of one rank"
        stacks[target] = torch.stack([scaling_of(config) * b @ a for a, b in pairs])
    return stacks


def test_vllm_reads_our_stacked_layout_as_the_trained_model(model, tmp_path):
    saved(model, tmp_path)
    for path, wanted in wanted_of(model, tmp_path).items():
        spec = specs_of(model)[path]
        assert same(vllm_stacked(tmp_path, path, spec.num_experts, spec.interleaved), wanted)


def test_vllm_reads_an_adapter_that_goldsmith_saved(tmp_path):
    """Separate factors of gate and up, joined into one pair; one scaling."""
    ours = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 4, "alpha": 8})
    models.randomise(ours)
    hf.save_adapter(whole_numbers(ours), tmp_path)
    (path,) = wanted_of(models.model("qwen3_moe"), tmp_path)
    config = read(tmp_path)[1]
    assert config["rank_pattern"] or config["alpha_pattern"], "the joined pair has twice the rank"
    exported = tmp_path / "exported"
    plain = models.model("qwen3_moe")
    export(plain, specs_of(plain), tmp_path, exported)
    wanted = wanted_of(plain, tmp_path)[path]
    assert same(vllm_per_expert(exported, path, specs_of(plain)[path].num_experts), wanted)


def test_vllm_transposes_B_in_models_that_do_not_declare_stacked_experts(model, tmp_path):
    """Its fallback cuts B's columns into experts, where peft's rank is the outer index; our check knows this."""
    saved(model, tmp_path)
    layers = {n: (path, spec) for n, (path, spec) in enumerate(specs_of(model).items())}
    fit = fitted(model, specs_of(model), tmp_path, "test")
    wrong, _ = variants(fit, layers)["b_transposed"]
    tensors, config = read(tmp_path)
    for n, (path, spec) in layers.items():
        a, b = (tensors[f"{ROOT}{path}.lora_{which}.weight"] for which in "AB")
        chunks = zip(b.chunk(spec.num_experts, -1), a.chunk(spec.num_experts, 0))
        theirs = torch.stack([scaling_of(config) * part_b @ part_a for part_b, part_a in chunks])
        assert torch.equal(deltas(wrong[n])["down"], theirs)
        assert not torch.equal(theirs, wanted_of(model, tmp_path)[path]["down"])


def test_vllm_needs_both_parameters_of_stacked_experts(model, tmp_path):
    """It asserts that gate_up_proj and down_proj have LoRA: with one of them peft writes no `base_layer`."""
    saved(model, tmp_path, targets=models.EXPERTS[:1])
    assert not any(".base_layer." in name for name in read(tmp_path)[0])


# -- SGLang ------------------------------------------------------------------------------------------------------------


def sglang_per_expert(folder, path, experts):
    """Gate and up of an expert are stacked, in A and in B; a name must contain a projection that the config targets."""
    tensors, config = read(folder)
    stacks = {"gate": [], "up": [], "down": []}
    for e in range(experts):
        pairs = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            assert name in config["target_modules"]
            pairs[name] = [tensors[f"{ROOT}{path}.{e}.{name}.lora_{which}.weight"] for which in "AB"]
        a = torch.cat((pairs["gate_proj"][0], pairs["up_proj"][0]), -2)
        b = torch.cat((pairs["gate_proj"][1], pairs["up_proj"][1]), -2)
        r, half = config["r"], b.shape[0] // 2
        stacks["gate"].append(scaling_of(config) * b[:half] @ a[:r])
        stacks["up"].append(scaling_of(config) * b[half:] @ a[r:])
        stacks["down"].append(scaling_of(config) * pairs["down_proj"][1] @ pairs["down_proj"][0])
    return {target: torch.stack(parts) for target, parts in stacks.items()}


def test_sglang_and_vllm_read_the_exported_layout_as_the_trained_model(model, tmp_path):
    down = "mlp.experts.down_proj"
    saved(model, tmp_path / "peft", rank_pattern={down: 5}, alpha_pattern={down: 20})
    export(model, specs_of(model), tmp_path / "peft", tmp_path / "exported")
    for path, wanted in wanted_of(model, tmp_path / "peft").items():
        experts = specs_of(model)[path].num_experts
        assert same(sglang_per_expert(tmp_path / "exported", path, experts), wanted)
        assert same(vllm_per_expert(tmp_path / "exported", path, experts), wanted)


def test_sglang_finds_no_projection_in_the_names_that_peft_writes(model, tmp_path):
    saved(model, tmp_path)
    tensors, config = read(tmp_path)
    names = ("gate_up_proj", "down_proj", "gate_proj", "up_proj")
    assert all(not any(name in key for name in names) for key in tensors if ".experts." in key)
    assert not config["target_modules"]


def test_the_exported_layout_keeps_the_attention_part_and_has_one_scaling(tmp_path):
    model = models.model("qwen3_moe")
    options = {"target_modules": ["o_proj"], "alpha_pattern": {"o_proj": 9}}
    saved(model, tmp_path / "peft", **options)
    export(model, specs_of(model), tmp_path / "peft", tmp_path / "exported")
    (before, config), (after, flat) = read(tmp_path / "peft"), read(tmp_path / "exported")
    stem = f"{ROOT}model.layers.0.self_attn.o_proj.lora_"
    one = 9 / config["r"] * before[f"{stem}B.weight"] @ before[f"{stem}A.weight"]
    assert torch.equal(scaling_of(flat) * after[f"{stem}B.weight"] @ after[f"{stem}A.weight"], one)
    assert not flat["alpha_pattern"] and flat["target_parameters"] is None
    assert {"o_proj", "gate_proj", "up_proj", "down_proj"} == set(flat["target_modules"])
    assert all(re.search(r"\.experts\.\d+\.\w+_proj\.lora_[AB]\.weight$|o_proj", name) for name in after)


def test_parts_that_those_loaders_do_not_read_are_refused(tmp_path):
    model = models.model("qwen3_moe")
    saved(model, tmp_path / "whole", modules_to_save=["mlp.gate"])
    with pytest.raises(ValueError, match="modules_to_save"):
        export(model, specs_of(model), tmp_path / "whole", tmp_path / "exported")
    saved(model, tmp_path / "plain")
    with pytest.raises(ValueError, match="the adapter's own folder"):
        export(model, specs_of(model), tmp_path / "plain", tmp_path / "plain")
    assert not (tmp_path / "exported").exists()
