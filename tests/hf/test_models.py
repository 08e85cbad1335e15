"""Whole models: logits and gradients of embeddings and LoRA factors, compared with transformers' own."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import goldens, models

pytestmark = pytest.mark.sweep(2)

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.adapter import layout

PROBES = ["values", "ensemble", "statistics", "poison", "alias"]


def under_peft(plain, implementation):
    """logits(embeds, factors) of stock peft's wrapping of the plain model."""
    wrapped = models.with_peft(plain, rank=goldens.RANK, alpha=goldens.ALPHA)
    if implementation == "goldsmith":
        hf.register(wrapped)
    experts = models.experts_of(plain)
    inner = goldens.sizes(experts)[2]
    names = {n.partition("mlp.experts.")[2]: n for n, _ in wrapped.named_parameters() if "lora_" in n}

    def logits(embeds, gate_a, gate_b, up_b, down_a, down_b):
        pairs = {"gate": (gate_a, gate_b), "up": (gate_a, up_b)}
        options = {"interleaved": not experts.is_concatenated, "shared": True}
        half = layout.join(pairs, {"gate": 1.0, "up": 1.0}, inner, **options)
        weights = {}
        for place, pair in (("base_layer.", (half.a, half.b)), ("", (down_a, down_b))):
            for which, tensor in zip("AB", layout.to_peft(*pair)):
                weights[names[f"{place}lora_{which}.default.weight"]] = tensor
        return goldens.logits_of(wrapped, weights, embeds)

    return logits


def converted(family, dtype, *, shared=True, format=None, **options):
    """logits(embeds, factors) of the converted model."""
    made = models.model(family, dtype=dtype)
    lora = {"rank": goldens.RANK, "alpha": goldens.ALPHA, "shared_a": shared, "dtype": dtype}
    hf.convert(made, format=format or ("bf16" if dtype == torch.bfloat16 else "fp32"), lora=lora, **options)
    path = next(name for name, _ in made.named_modules() if name.endswith("mlp.experts"))

    def logits(embeds, **factors):
        return goldens.logits_of(made, {f"{path}.lora.{name}": tensor for name, tensor in factors.items()}, embeds)

    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_converted_and_under_stock_peft_a_model_equals_transformers_and_peft(family, dtype):
    plain = models.model(family, dtype=dtype)
    target = goldens.target(plain, converted=converted(family, dtype), under_peft=under_peft(plain, "goldsmith"))
    assay.check(target, probes=PROBES)


def test_the_golden_accepts_stock_peft_itself():
    plain = models.model("mixtral")
    assay.check(goldens.target(plain, under_peft=under_peft(plain, "eager")), probes=PROBES)


def test_gate_and_up_with_separate_a_matrices():
    plain, made = models.model("gpt_oss"), converted("gpt_oss", torch.float32, shared=False)
    assay.check(goldens.target(plain, shared=False, converted=made), probes=PROBES)


@pytest.mark.parametrize("options", [{"format": "int8"}, {"format": "int4", "group_size": 8, "partitions": 2}], ids=str)
def test_a_quantised_base_equals_the_model_with_dequantised_weights(options):
    """Quantisation is the only difference: the golden uses the dequantised weights."""
    made, plain = hf.convert(models.model("mixtral"), **options), models.model("mixtral")
    gate_up, down = models.experts_of(made).base.unpack()
    experts = models.experts_of(plain)
    assert not torch.equal(experts.down_proj, down)
    with torch.no_grad():
        experts.gate_up_proj.copy_(gate_up)
        experts.down_proj.copy_(down)
    assay.check(goldens.target(plain, converted=converted("mixtral", torch.float32, **options)), probes=PROBES)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_the_model_s_own_weights_get_gradients(family):
    """One experts module; its weights and biases are inputs too."""
    wide = models.experts_of(models.model(family)).double()
    ours = models.experts_of(models.model(family, implementation="goldsmith"))
    shapes = {name: p.shape for name, p in ours.named_parameters()}

    def draw(make):
        ids = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0]])
        inputs = {"x": make.normal(4, 32), "weights": make.uniform(4, 2)}
        return inputs | {name: make.normal(*shape, std=0.2) for name, shape in shapes.items()} | {"ids": ids}

    def run(module):
        return lambda x, ids, weights, **parameters: torch.func.functional_call(module, parameters, (x, ids, weights))

    target = assay.Target(run(ours), run(wide), cases=[Case("weights", draw, {})], name=family)
    assay.check(target, probes=[*PROBES, "second_call"])
