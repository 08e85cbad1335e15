"""apply: models with hyper-connections compute the same with our operators, wherever such a model runs."""

import copy
import pickle

import pytest
import torch
from torch import nn

from goldsmith import assay
from goldsmith.offload import offload
from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from hf import hyper_models

FAMILIES = pytest.mark.parametrize("family", hyper_models.PRESENT)
pytestmark = pytest.mark.usefixtures("as_on_a_cpu")


@pytest.fixture
def as_on_a_cpu(monkeypatch):
    """Operators choose their backend as for users: without a GPU the reference, not Triton's interpreter."""
    monkeypatch.setattr("goldsmith.core.device.triton_interpreted", lambda: False)
    monkeypatch.setattr("goldsmith.Op._chosen", {})


def pair(family, experts=False, **changes):
    """A model, an applied copy of it, and what was applied."""
    plain = hyper_models.model(family, **changes)
    ours = copy.deepcopy(plain)
    return plain, ours, hf.apply(ours, experts=experts)


def bits(made, inputs=None):
    with torch.no_grad():
        return made(hyper_models.ids() if inputs is None else inputs, use_cache=False).logits


@pytest.mark.sweep(2)
@FAMILIES
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_logits_and_all_gradients_agree(family, dtype, device):
    plain = hyper_models.model(family, **hyper_models.PROVABLE.get(family, {}))
    plain = hyper_models.in_bfloat16(plain) if dtype == torch.bfloat16 else plain
    ours = copy.deepcopy(plain)
    hf.apply(ours)
    assay.check(hyper_models.target(ours, plain, family, device), probes=["values", "ensemble"])


@FAMILIES
def test_everything_is_replaced_and_undo_puts_everything_back(family):
    plain, ours, applied = pair(family, experts=True)
    changed = {type(m).__name__ for m in ours.modules() if type(m).__module__.startswith("goldsmith.hf")}
    with_streams = {type(m).__name__ for m in plain.modules() if hasattr(m, "hc_mult") or hasattr(m, "hc_count")}
    layer = type(plain.get_decoder().layers[0]).__name__
    assert changed - {"Qwen4ExpTextPLELayer"} == with_streams - {"Qwen4ExpTextPLELayer"} | {layer}
    assert repr(ours) == repr(plain) and not torch.equal(bits(ours), bits(plain))
    text = str(applied)
    assert text.startswith(f"{type(plain).__name__}: ") and all(name in text for name in changed)
    assert "experts.moe" in text and ours.get_decoder().config._experts_implementation == "goldsmith"
    assert applied.undo() is ours and "(undone)" in str(applied)
    assert [type(m) for m in ours.modules()] == [type(m) for m in plain.modules()]
    assert ours.get_experts_implementation() == plain.get_experts_implementation()
    assert torch.equal(bits(ours), bits(plain))


@FAMILIES
def test_an_optimizer_and_a_checkpoint_do_not_notice(family, tmp_path):
    plain = hyper_models.model(family)
    before = {name: tensor.data_ptr() for name, tensor in plain.state_dict().items()}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    hf.apply(plain)
    assert {name: tensor.data_ptr() for name, tensor in plain.state_dict().items()} == before
    values = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    _, gradients = hyper_models.step(plain, hyper_models.ids())
    optimizer.step()
    named = dict(plain.named_parameters())
    moved = {name: torch.add(values[name], gradient, alpha=-0.1) for name, gradient in gradients.items()}
    assert all(torch.equal(named[name], value) for name, value in moved.items())
    plain.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, experts_implementation="eager").eval()
    hf.apply(loaded)
    assert torch.equal(bits(loaded), bits(plain))


@FAMILIES
def test_a_checkpointed_step_equals_a_plain_one_and_runs_each_layer_twice(family):
    ours = pair(family)[1].train()
    loss, gradients = hyper_models.step(ours, hyper_models.ids())
    ours.gradient_checkpointing_enable()
    runs = []
    for layer in ours.get_decoder().layers:
        layer.mlp.register_forward_hook(lambda *_: runs.append(1))
    again, recomputed = hyper_models.step(ours, hyper_models.ids())
    assert len(runs) == 2 * len(ours.get_decoder().layers)
    assert torch.equal(loss, again) and gradients.keys() == recomputed.keys()
    assert all(torch.equal(gradient, recomputed[name]) for name, gradient in gradients.items())


@FAMILIES
def test_generated_text_is_the_plain_models_with_a_cache_and_without(family):
    plain, ours, _ = pair(family, **hyper_models.PLE if family.startswith("qwen") else {})
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(hyper_models.ids(), **options)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(hyper_models.ids(), use_cache=use_cache, **options), wanted)


class Attention(nn.Linear):
    """A part of a layer that needs no cache and no positions."""

    def __init__(self, results):
        super().__init__(32, 32, bias=False)
        self.results = results

    def forward(self, hidden_states, *args, **kwargs):
        f = super().forward(hidden_states)
        return (f, *[None] * (self.results - 1)) if self.results > 1 else f


@FAMILIES
def test_layers_connections_and_heads_compile_to_one_graph(family):
    ours = pair(family)[1]
    flat = family.startswith("qwen")
    for module in {type(m): m for m in ours.modules() if type(m).__module__.startswith("goldsmith.hf")}.values():
        arguments = {}
        if hasattr(module, "mlp"):
            module.mlp, module.self_attn, module.linear_attn = Attention(1), Attention(2), Attention(1)
            module.block_type, module.ple = "indexed_attention", None
            if family in ("glm5_next", "hy_v4"):
                module.self_attn = Attention(3)
            arguments = {"position_embeddings": None} if flat else {}
        x = torch.randn(2, 3, 4, 32)
        x = (x.flatten(-2) if flat else x).requires_grad_()
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        graph, eager = ([y for y in _tuple(run(x, **arguments)) if y is not None] for run in (compiled, module))
        assert len(graph) == len(eager) and all(torch.equal(a, b) for a, b in zip(graph, eager))
        assert torch.equal(*(torch.autograd.grad(sum(y.sum() for y in ys), x)[0] for ys in (graph, eager)))


ONE_GRAPH = ("deepseek_v4", "glm5_next", "hy_v4")  # Qwen4's breaks in transformers' own parts
SLOW = [(family, backend) for family in hyper_models.PRESENT for backend in ("aot_eager", "inductor")]


@pytest.mark.parametrize(
    "family, backend", [("hy_v4", "eager"), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_whole_model_compiles(family, backend):
    plain, ours, _ = pair(family, **hyper_models.PROVABLE.get(family, {}))
    for made in (plain, ours):
        made.set_experts_implementation("batched_mm")  # the choice of eager experts would break the graph
    wanted = hyper_models.step(ours, hyper_models.ids())
    torch._dynamo.reset()
    ours.compile(backend=backend, fullgraph=family in ONE_GRAPH)
    loss, gradients = hyper_models.step(ours, hyper_models.ids())
    if backend == "inductor" or family not in ONE_GRAPH:  # sums have other orders
        target = hyper_models.gradients_target(gradients, plain, f"{family} compiled")
        assay.check(target, probes=["values", "ensemble"])
    else:
        assert torch.equal(loss, wanted[0]) and gradients.keys() == wanted[1].keys()
        assert all(torch.equal(gradient, wanted[1][name]) for name, gradient in gradients.items())


def _tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@FAMILIES
def test_an_offloaded_model_generates_the_same_text_whichever_of_the_two_comes_first(family, tmp_path):
    plain = hyper_models.model(family)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(hyper_models.ids(), **options)

    def offloaded(model):
        return offload(model, store=tmp_path / "experts.store", device="cpu")

    for order in ((hf.apply, offloaded), (offloaded, hf.apply)):
        ours = copy.deepcopy(plain)
        made = {how: how(ours) for how in order}
        assert torch.equal(ours.generate(hyper_models.ids(), **options), wanted)
        made[offloaded].detach()
        made[hf.apply].undo()
        assert torch.equal(bits(ours), bits(plain))


# -- hooks, adapters, copies --------------------------------------------------------------------------


def test_hooks_of_every_module_run_and_may_change_results():
    plain, ours, _ = pair("deepseek_v4")
    layer, seen = ours.get_decoder().layers[0], []
    for module in (layer, layer.attn_hc, layer.attn_hc.input_norm, layer.ffn_hc, ours.get_decoder().hc_head):
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    bits(ours)
    assert sorted(seen) == sorted(type(m).__name__ for m in (layer, layer.attn_hc, layer.attn_hc.input_norm,
                                                             layer.ffn_hc, ours.get_decoder().hc_head))  # fmt: skip
    for made in (plain, ours):
        made.get_decoder().layers[1].attn_hc.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))
    assay.check(hyper_models.target(ours, plain, "hooked"), probes=["values", "ensemble"])


def test_lora_on_the_linear_layers_of_a_gated_residual_is_computed():
    config = models.peft.LoraConfig(target_modules=["input_mix_weight_up", "block_inject_weight"], r=2)
    plain = models.peft.get_peft_model(hyper_models.model("qwen4_exp_text"), config)
    models.randomise(plain)
    ours = copy.deepcopy(plain)
    hf.apply(ours)
    assay.check(hyper_models.target(ours, plain, "lora"), probes=["values", "ensemble"])


@FAMILIES
def test_an_applied_model_can_be_copied_and_pickled(family):
    ours = pair(family)[1]
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert [type(m) for m in copied.modules()] == [type(m) for m in ours.modules()]
        assert torch.equal(bits(copied), bits(ours))
