"""experts.Experts: the module owns the LoRA; the base is not copied, moved or converted."""

import copy
import re

import pytest
import torch

from goldsmith import experts

E, H, I, T, K = 3, 16, 8, 5, 2


@pytest.fixture
def base():
    torch.manual_seed(0)
    return experts.pack(torch.randn(E, 2 * I, H), torch.randn(E, H, I), format="int8", group_size=8)


def routes():
    return torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)


def test_the_module_computes_the_same_as_moe(base):
    lora, (x, ids, w) = experts.LoRA(E, H, I), routes()
    torch.nn.init.normal_(lora.up_b)
    layer = experts.Experts(base, lora, activation="swiglu_oai", alpha=1.5, limit=2.0)
    wanted = experts.moe(x, ids, w, base, lora=lora, activation="swiglu_oai", alpha=1.5, limit=2.0)
    assert torch.equal(layer(x, ids, w), wanted)


def test_the_state_dict_has_only_the_lora(base):
    layer = experts.Experts(base, experts.LoRA(E, H, I, targets=("down",)))
    assert set(layer.state_dict()) == {"lora.down_a", "lora.down_b"}
    assert sum(p.numel() for p in layer.parameters()) == layer.lora.num_parameters()
    assert not experts.Experts(base).state_dict()


@pytest.mark.parametrize("plain", [False, True])
def test_the_base_is_neither_copied_nor_converted(base, plain):
    original = base.unpack() if plain else base
    layer = experts.Experts(original, experts.LoRA(E, H, I))
    other = copy.deepcopy(layer).to(torch.bfloat16)
    assert other.base is original and other.lora.gate_a.dtype == torch.bfloat16
    assert layer.lora.gate_a.dtype == torch.float32
    x, ids, w = routes()
    assert other(x.bfloat16(), ids, w).dtype == torch.bfloat16


def test_eval_and_requires_grad_of_a_parent_module_reach_the_lora(base):
    model = torch.nn.Sequential(experts.Experts(base, experts.LoRA(E, H, I, dropout=0.5)))
    model.eval()
    assert not model[0].lora.training
    model.requires_grad_(False)
    assert not model[0](*routes()).requires_grad


def test_a_lora_of_other_sizes_is_refused(base):
    with pytest.raises(
        ValueError, match="lora has num_experts=3, hidden_size=16, intermediate_size=9, but the base has"
    ):
        experts.Experts(base, experts.LoRA(E, H, I + 1))
    with pytest.raises(TypeError, match="experts.Experts: lora is a dict, expected an experts.LoRA or None"):
        experts.Experts(base, {"gate": None})


def test_a_compiled_training_step_has_the_same_bits(base):
    torch._dynamo.reset()
    lora, (x, ids, w) = experts.LoRA(E, H, I), routes()
    torch.nn.init.normal_(lora.down_b)
    layer = experts.Experts(base, lora)
    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        y = run(leaf, ids, w)
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *lora.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_works_under_compilation(base):
    torch._dynamo.reset()
    layer, (x, ids, w) = experts.Experts(base, experts.LoRA(E, H, I, dropout=0.5)), routes()
    torch.nn.init.normal_(layer.lora.down_b)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(x, ids, w), compiled(x, ids, w))
    layer.eval()
    assert torch.equal(compiled(x, ids, w), layer(x, ids, w))


@pytest.mark.parametrize("options, text", [
    ({"activation": "nope"}, "activation='nope' is unknown; choose one of: 'silu'"),
    ({"limit": -3}, "limit=-3.0, expected a number of at least 0.0"),
    ({"alpha": float("inf")}, "alpha=inf, expected a finite number"),
    ({"backend": "zzz"}, "backend='zzz' is unknown; choose one of: 'auto'"),
])  # fmt: skip
def test_the_constructor_refuses_invalid_options(base, options, text):
    with pytest.raises(ValueError, match=re.escape(f"experts.Experts: {text}")):
        experts.Experts(base, **options)
