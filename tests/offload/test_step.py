"""The native step: a model on the CPU continues its text as before, one native call for each token."""

import copy
import functools

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from transformers import DynamicCache

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.core import native
from goldsmith.offload import attach
from goldsmith.offload.guard.report import NumericsError
from goldsmith.offload.testing import inject
from hf import goldens, models
from offload.test_models_adapters import merged, saved
from offload.whole_models import CALIBRATION, assert_same_text, greedy, padded, slots

pytestmark = pytest.mark.skipif(native.reason() is not None, reason="needs the native library")

offload = functools.partial(attach.offload, device="cpu")
FAMILIES = {"qwen3_moe": {"mlp_only_layers": []}, "olmoe": {}, "mixtral": {}}
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def plain_model(family="qwen3_moe", dtype=torch.float32, **changes):
    return models.model(family, dtype=dtype, **FAMILIES.get(family, {}) | changes)


def continued(model, ids, count=1):
    """The last logits [B, V] after a prompt of all but `count` tokens, and steps of one token each."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-count], past_key_values=cache, use_cache=True)
        for at in range(ids.shape[1] - count, ids.shape[1]):
            logits = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits
    return logits[:, -1]


def steps_of(offloaded):
    return 0 if offloaded.model.forward.why_not else offloaded.model.forward._step._args.seconds[3] > 0


def target(offloaded, plain, ids):
    """The logits after a step, as a function of the embeddings, beside the plain model's in float64."""
    wide = goldens.InItsDtype(plain)

    def ours(table):
        with torch.no_grad():
            offloaded.model.get_input_embeddings().weight.copy_(table)
        return continued(offloaded.model, ids, 2)

    def golden(table):
        inputs = {"input_ids": ids, "use_cache": False}
        return wide.outputs(table.dtype, {EMBEDDING: table}, inputs).logits[:, -1]

    shape = plain.get_input_embeddings().weight.shape
    case = Case("embeddings", lambda make: {"table": make.normal(*shape)}, {})
    return assay.Target(ours, golden, cases=[case], name=f"a step of {plain.config.model_type}", backward=None)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_a_step_are_the_models_in_float64(family, rows):
    plain = plain_model(family, tie_word_embeddings=False)
    with offload(copy.deepcopy(plain)) as offloaded:
        assay.check(target(offloaded, plain, models.tokens(rows)), probes=["values", "ensemble"])
        assert steps_of(offloaded), offloaded.model.forward.why_not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_with_padding_gets_the_plain_text_and_the_steps_are_counted(family, dtype):
    plain = plain_model(family, dtype)
    ids, mask = padded()
    with offload(copy.deepcopy(plain)) as offloaded:
        assert_same_text(plain, offloaded.model, ids, steps=20, attention_mask=mask)
        assert steps_of(offloaded)
        stats, layers = offloaded.stats(), len(offloaded.engine.store.layers)
        assert (stats.calls, stats.tokens) == (20 * layers, (ids.numel() + 19 * len(ids)) * layers)
        used = sum(map(sum, offloaded.profile()["counts"].values()))
        assert stats.experts_cpu == used and 0 < stats.t_cpu <= stats.t_wall
        offloaded.reset_stats()
        assert offloaded.stats().calls == 0


def test_the_text_grows_beyond_the_first_buffer_and_one_part_of_the_attention():
    plain = plain_model(max_position_embeddings=2048)
    ids = models.tokens(2, 500)
    with offload(copy.deepcopy(plain)) as offloaded:
        assert_same_text(plain, offloaded.model, ids, steps=16)
        target_ids = models.tokens(1, 1030)
        assay.check(target(offloaded, plain, target_ids), probes=["values", "ensemble"])
        assert steps_of(offloaded)


def test_the_head_gets_dense_rows_for_which_torch_copies_no_weight():
    """bfloat16 rows with the strides of a whole prompt: a copy of the head's weight for each prompt."""
    model = plain_model(dtype=torch.bfloat16)
    with offload(model) as offloaded, torch.no_grad():
        given = []
        model.lm_head.register_forward_pre_hook(lambda head, inputs: given.append(inputs[0].stride()))
        model(torch.arange(14).view(2, 7), logits_to_keep=1)
        model(torch.arange(7)[None], logits_to_keep=1)
    width = model.config.hidden_size
    assert given == [(width, width, 1)] * 2 and not offloaded.model.forward.why_not.startswith("a hook")


def test_every_lane_and_a_recorded_trace_give_the_same_bits(tmp_path):
    plain, ids = plain_model(), models.tokens()
    with offload(copy.deepcopy(plain)) as offloaded:
        wanted = continued(offloaded.model, ids, 3)
        assert offloaded.engine.direct is not None
        with offloaded.trace(tmp_path / "t.json"):
            assert torch.equal(continued(offloaded.model, ids, 3), wanted)
    with offload(copy.deepcopy(plain), lanes="mixed", gpu_budget=slots(plain, 9), calibration=CALIBRATION) as offloaded:
        assert torch.equal(continued(offloaded.model, ids, 3), wanted)
        assert steps_of(offloaded) and offloaded.engine.direct is None


def test_a_tokens_result_depends_on_no_other_sequence_and_on_no_thread_count():
    plain, ids = plain_model(), models.tokens(4)
    bits = []
    for threads in (1, 2):
        with offload(copy.deepcopy(plain), threads=threads) as offloaded:
            bits.append(continued(offloaded.model, ids))
    assert torch.equal(*bits)
    with offload(copy.deepcopy(plain)) as offloaded:
        cache = DynamicCache(config=plain.config)
        with torch.no_grad():
            offloaded.model(ids[:, :-1], past_key_values=cache)
            cache.batch_select_indices(torch.tensor([2]))
            alone = offloaded.model(input_ids=ids[2:3, -1:], past_key_values=cache).logits[:, -1]
        assert torch.equal(alone, bits[0][2:3])


def test_a_cache_that_the_caller_changes_is_read_again():
    plain, ids = plain_model(), models.tokens(2, 9)
    with offload(copy.deepcopy(plain)) as offloaded, torch.no_grad():
        model, cache = offloaded.model, DynamicCache(config=plain.config)
        wanted = continued(model, ids[:, [0, 1, 2, 3, 4, 8]])
        model(ids[:, :5], past_key_values=cache)
        for at in range(5, 8):
            model(input_ids=ids[:, at : at + 1], past_key_values=cache)
        kept = copy.deepcopy(cache)
        cache.crop(-3)
        assert torch.equal(model(input_ids=ids[:, 8:], past_key_values=cache).logits[:, -1], wanted)
        assert kept.get_seq_length() == 8 and cache.get_seq_length() == 6
        assert torch.equal(model(input_ids=ids[:, 8:], past_key_values=kept).logits[:, -1], continued(model, ids, 4))


def test_a_copied_model_steps_with_its_own_weights():
    plain, ids = plain_model(), models.tokens()
    with offload(copy.deepcopy(plain)) as offloaded:
        before, other = continued(offloaded.model, ids), copy.deepcopy(offloaded.model)
        with torch.no_grad():
            other.lm_head.weight.mul_(2)
        assert torch.equal(continued(other, ids), 2 * before) and torch.equal(continued(offloaded.model, ids), before)


def hooked(model):
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)


def windowed(model):
    model.config.sliding_window = 4


REASONS = {"has a hook": hooked, "a sliding window": windowed}


@pytest.mark.parametrize("reason", REASONS)
def test_a_model_that_the_step_does_not_know_runs_its_own_forward(reason):
    plain = plain_model()
    REASONS[reason](plain)
    with offload(copy.deepcopy(plain)) as offloaded:
        assert_same_text(plain, offloaded.model, models.tokens())
        assert reason in offloaded.model.forward.why_not and not steps_of(offloaded)


def test_detaching_gives_the_models_own_forward_back():
    plain, ids = plain_model(), models.tokens()
    offloaded = offload(copy.deepcopy(plain))
    greedy(offloaded.model, ids)
    model = offloaded.detach()
    assert "forward" not in model.__dict__
    assert all(map(torch.equal, greedy(model, ids), greedy(plain, ids)))


# -- the guard


@pytest.mark.parametrize("where, layer, stage", [("o_proj", 1, "input"), ("gate", 1, "input"), ("norm", None, "after")])
def test_a_nan_in_a_step_is_reported_with_its_origin(where, layer, stage):
    plain, ids = plain_model(), models.tokens()
    with offload(copy.deepcopy(plain)) as offloaded, torch.no_grad():
        model, cache = offloaded.model, DynamicCache(config=plain.config)
        model(ids[:, :-1], past_key_values=cache)
        block = model.model.layers[1]
        {"o_proj": block.self_attn.o_proj, "gate": block.post_attention_layernorm, "norm": model.model.norm}[
            where
        ].weight.fill_(torch.nan)
        with pytest.raises(NumericsError) as raised:
            model(input_ids=ids[:, -1:], past_key_values=cache)
        report = raised.value.report
        assert (report.layer, report.stage, report.kind) == (layer, stage, "nan")
        assert report.num_rows == len(ids) and (report.first or layer is None)


def test_an_injected_fault_is_found_in_a_step():
    plain, ids = plain_model(), models.tokens()
    with offload(copy.deepcopy(plain)) as offloaded, torch.no_grad():
        cache = DynamicCache(config=plain.config)
        offloaded.model(ids[:, :-1], past_key_values=cache)
        with inject(offloaded.engine, "down", layer=1, rows=[1]), pytest.raises(NumericsError) as raised:
            offloaded.model(input_ids=ids[:, -1:], past_key_values=cache)
        assert (raised.value.report.layer, raised.value.report.stage) == (1, "down")


def test_a_step_after_close_is_an_error():
    plain, ids = plain_model(), models.tokens()
    with offload(copy.deepcopy(plain)) as offloaded, torch.no_grad():
        cache = DynamicCache(config=plain.config)
        offloaded.model(ids[:, :-2], past_key_values=cache)
        offloaded.model(input_ids=ids[:, -2:-1], past_key_values=cache)
    with pytest.raises(ValueError, match="was closed"):
        offloaded.model(input_ids=ids[:, -1:], past_key_values=cache)


# -- adapters


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_logits_of_a_step_with_adapters_are_pefts_in_float64(family, tmp_path):
    """Two at once, with different ranks, one of them with dropout, which is for training only."""
    plain = plain_model(family, tie_word_embeddings=False)
    saved(plain, tmp_path / "a", rank=3, target_modules=["q_proj", "v_proj", "o_proj"], seed=1)
    saved(plain, tmp_path / "b", rank=2, targets=(), target_modules=["v_proj", "k_proj"], lora_dropout=0.5, seed=2)
    both = merged(merged(plain, tmp_path / "a"), tmp_path / "b")
    with offload(copy.deepcopy(plain), adapter=[tmp_path / "a", tmp_path / "b"]) as offloaded:
        for names, theirs in (("a", merged(plain, tmp_path / "a")), (("a", "b"), both), (None, plain)):
            offloaded.set_adapter(names)
            assay.check(target(offloaded, theirs, models.tokens(2)), probes=["values"])
            assert steps_of(offloaded), offloaded.model.forward.why_not


# -- formats of the dense part, and integer products


@pytest.mark.parametrize("dense_format", ["bf16", "int8", "int4", "int4_asym"])
def test_a_packed_dense_part_computes_with_its_own_numbers(dense_format):
    """128, the group size of int4_asym, does not divide these sizes, so the largest one that does is taken."""
    plain, ids = plain_model(tie_word_embeddings=False), models.tokens()
    with offload(copy.deepcopy(plain), dense_format=dense_format) as offloaded:
        packed = dict(offloaded.model.named_modules())
        with torch.no_grad():
            for name, module in plain.named_modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.copy_(packed[name].weight.unpack())
        assay.check(target(offloaded, plain, ids), probes=["values", "ensemble"])
        assert steps_of(offloaded), offloaded.model.forward.why_not
        with pytest.raises(ValueError, match=f"dense part is packed in {dense_format}.*load the model again"):
            offloaded.detach()
        with pytest.raises(ValueError, match="leaves no layers for an adapter"):
            offloaded.load_adapter("nowhere")


def test_integer_products_are_for_stores_of_integer_codes_and_the_text_goes_on():
    plain, ids = plain_model(), models.tokens()
    with pytest.raises(ValueError, match="compute='int8' is for experts in int8, int4 or int4_asym, not in fp32: give"):
        offload(copy.deepcopy(plain), compute="int8")
    with pytest.raises(ValueError, match="compute='int8' is for experts in int8, int4 or int4_asym, not in bf16: give"):
        offload(plain, compute="int8", cpu_format="bf16")  # before it is read
    results = []
    for compute in ("exact", "auto", "int8"):
        with offload(copy.deepcopy(plain), cpu_format="int8", exact=False, compute=compute) as offloaded:
            results.append(continued(offloaded.model, ids))
            assert steps_of(offloaded)
    assert torch.equal(*results[:2]) and not torch.equal(*results[1:])
