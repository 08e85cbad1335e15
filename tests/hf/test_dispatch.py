"""The experts implementation "goldsmith": choosing it, reading peft's factors, expert parallelism, bad input."""

import copy
import pickle
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf import dispatch, peft_factors


@pytest.fixture
def calls(monkeypatch):
    """Every call of `experts.moe` from the dispatcher: its keywords."""
    seen = []

    def moe(*tensors, **options):
        seen.append((tensors, options))
        return kept(*tensors, **options)

    kept = dispatch.moe
    monkeypatch.setattr(dispatch, "moe", moe)
    return seen


# -- choosing it ------------------------------------------------------------------------------


def test_transformers_own_ways_to_choose_it_work(calls, tmp_path):
    plain = models.model("mixtral")
    wanted = plain(models.tokens()).logits
    plain.save_pretrained(tmp_path)
    plain.set_experts_implementation("goldsmith")
    loaded = type(plain).from_pretrained(tmp_path, experts_implementation="goldsmith")
    for model in (plain, loaded):
        goldens.check_alike(model, models.model("mixtral"))
        calls.clear()
        model(models.tokens())
        assert len(calls) == 1
    plain.set_experts_implementation("eager")
    assert torch.equal(plain(models.tokens()).logits, wanted) and len(calls) == 1


def test_a_model_without_experts_is_refused_by_register():
    dense = models.transformers.LlamaForCausalLM(
        models.transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=1, num_key_value_heads=1)
    )  # fmt: skip
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts module .* would silently do nothing"):
        hf.register(dense)


def test_a_setter_that_silently_does_nothing_is_detected(monkeypatch):
    """transformers looks for the decorator in the source file of the model's class, which a notebook does not have."""
    plain = models.model("mixtral")
    nowhere = types.ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, "a_notebook", nowhere)
    unasked = {"__module__": "a_notebook", "_can_set_experts_implementation_cached_value": None}
    plain.__class__ = type("MyMixtral", (type(plain),), unasked)
    plain.set_experts_implementation("goldsmith")
    assert models.experts_of(plain).config._experts_implementation == "eager"  # the trap
    message = (
        r"did nothing for model.layers.0.mlp.experts \(MixtralExperts\).* is still 'eager'.*MyMixtral \(a_notebook\)"
    )
    with pytest.raises(ValueError, match=message):
        hf.register(plain)


def test_unsupported_experts_are_refused_before_the_implementation_changes():
    plain = models.model("mixtral")
    models.experts_of(plain).act_fn = nn.Mish()
    with pytest.raises(ValueError, match="MixtralExperts.*act_fn is Mish"):
        hf.register(plain)
    assert plain.config._experts_implementation == "eager"


# -- under peft ------------------------------------------------------------------------------------


@pytest.fixture
def evaluated(monkeypatch):
    """Counts how often peft's parametrisation computes W + BA."""
    proxy = models.peft.tuners.lora.layer._LoraFactorsProxy
    count, kept = [0], proxy.forward

    def forward(self, weight):
        count[0] += 1
        return kept(self, weight)

    monkeypatch.setattr(proxy, "forward", forward)
    return count


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_stock_peft_s_factors_are_used_and_no_merged_weight_is_made(family, evaluated, calls):
    wrapped = models.with_peft(models.model(family))
    hf.register(wrapped)
    wrapped(models.tokens()).logits.sum().backward()
    assert evaluated == [0]
    assert set(calls[0][1]["lora"]) == {"gate", "up", "down"}
    assert calls[0][1]["lora"]["gate"][0] is calls[0][1]["lora"]["up"][0]
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)
    experts = models.experts_of(models.model(family))
    assert not hasattr(next(m for m in wrapped.modules() if type(m) is type(experts)), "parametrizations")


def test_without_register_torch_evaluates_each_parametrisation_once(evaluated, calls):
    """If the implementation was chosen before peft wrapped the model, torch evaluates each parameter once."""
    wrapped = models.with_peft(models.model("mixtral", implementation="goldsmith"))
    wrapped(models.tokens())
    assert evaluated == [2] and set(calls[0][1]["lora"]) == {"gate", "up", "down"}


@pytest.mark.parametrize("name, keys", [("gate_up_proj", {"gate", "up"}), ("down_proj", {"down"})])
def test_a_single_parameter_may_be_adapted(name, keys, calls):
    wrapped = models.with_peft(models.model("olmoe"), targets=[f"mlp.experts.{name}"])
    peft = copy.deepcopy(wrapped)
    hf.register(wrapped)
    goldens.check_alike(wrapped, peft)
    assert set(calls[0][1]["lora"]) == keys


def test_several_adapters_are_correct_and_warn_once(monkeypatch, calls):
    monkeypatch.setattr(peft_factors, "_warned", set())
    wrapped = models.with_peft(models.model("mixtral"))
    config = models.peft.LoraConfig(target_parameters=list(models.EXPERTS), r=2)
    wrapped.add_adapter("second", config)
    models.randomise(wrapped)
    wrapped.base_model.set_adapter(["default", "second"])
    peft = copy.deepcopy(wrapped)
    hf.register(wrapped)
    with pytest.warns(
        UserWarning, match="gate_up_proj of MixtralExperts is parametrised by _LoraParameterProxy.*slow"
    ) as warned:
        goldens.check_alike(wrapped, peft)
    assert len([w for w in warned if "goldsmith" in str(w.message)]) == 2  # one for each parameter
    assert calls[0][1]["lora"] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(models.tokens())
    wrapped.base_model.set_adapter("second")
    wrapped(models.tokens())
    assert calls[-1][1]["lora"]["gate"][0].shape[1] == 2


def test_a_foreign_parametrisation_is_evaluated(monkeypatch, calls):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    monkeypatch.setattr(peft_factors, "_warned", set())
    plain = models.model("mixtral")
    torch.nn.utils.parametrize.register_parametrization(models.experts_of(plain), "down_proj", Double())
    eager = copy.deepcopy(plain)
    plain.set_experts_implementation("goldsmith")
    with pytest.warns(UserWarning, match="down_proj of MixtralExperts is parametrised by Double"):
        goldens.check_alike(plain, eager)


def test_disabled_and_merged_adapters_are_left_to_peft():
    wrapped = models.with_peft(models.model("mixtral"))
    peft = copy.deepcopy(wrapped)
    hf.register(wrapped)
    with wrapped.disable_adapter():
        goldens.check_alike(wrapped, models.model("mixtral"))
    goldens.check_alike(wrapped.merge_and_unload(), peft)


def test_a_registered_peft_model_can_be_copied_and_pickled():
    wrapped = models.with_peft(models.model("mixtral"))
    hf.register(wrapped)
    wanted = wrapped(models.tokens()).logits
    for copied in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert torch.equal(copied(models.tokens()).logits, wanted)


# -- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["registered", "converted"])
def test_sentinels_of_expert_parallelism_contribute_nothing(how):
    plain = models.model("mixtral")
    experts = models.experts_of(plain)
    experts._is_expert_parallel = True
    ids = torch.tensor([[0, 4], [5, 2], [4, 4]])
    alone = copy.deepcopy(experts)

    def golden(x, weights):
        alone.to(x.dtype)
        return type(alone).forward.__wrapped__(alone, x, ids.where(ids < 4, 0), weights.where(ids < 4, 0.0))

    if how == "registered":
        hf.register(plain)
    else:
        hf.convert(plain, format="fp32")
    target = assay.Target(
        lambda x, weights: models.experts_of(plain)(x, ids, weights),
        golden,
        cases=[Case("sentinels", lambda make: {"x": make.normal(3, 32), "weights": make.uniform(3, 2)}, {})],
        dtypes=(torch.float32,),
    )
    assay.check(target, probes=["values", "ensemble"])


@pytest.mark.parametrize("how", ["registered", "converted"])
def test_without_expert_parallelism_an_id_out_of_range_is_an_error(how):
    plain = models.model("mixtral")
    models.experts_of(plain)._is_expert_parallel = False
    hf.register(plain) if how == "registered" else hf.convert(plain, format="fp32")
    with pytest.raises(ValueError, match="topk_ids.*4"):
        models.experts_of(plain)(torch.randn(2, 32), torch.tensor([[0, 1], [4, 2]]), torch.rand(2, 2))


def test_routing_weights_of_another_dtype_are_accepted():
    plain = models.model("mixtral", dtype=torch.bfloat16)
    hf.register(plain)
    x, ids, weights = torch.randn(3, 32).bfloat16(), torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    wanted = models.experts_of(plain)(x, ids, weights.bfloat16())
    assert torch.equal(models.experts_of(plain)(x, ids, weights.bfloat16().double()), wanted)


@pytest.mark.parametrize("how", ["registered", "converted", "set_by_transformers_and_never_called"])
def test_an_experts_module_compiles_to_one_graph(how):
    plain = models.model("gpt_oss")
    if how == "converted":
        hf.convert(plain, format="fp32", lora={"rank": 2})
    elif how == "registered":
        hf.register(plain)
    else:
        plain.set_experts_implementation("goldsmith")
    experts = models.experts_of(plain)
    x, ids, weights = torch.randn(5, 32, requires_grad=True), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    torch._dynamo.reset()
    y = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, ids, weights)
    (dx,) = torch.autograd.grad(y.sum(), x)
    eager = experts(x, ids, weights)
    assert torch.equal(y, eager) and torch.equal(dx, torch.autograd.grad(eager.sum(), x)[0])
