"""The recorded step of a model on a simulated GPU: kernels in Triton's interpreter, launches in a thread."""

import copy

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from transformers import DynamicCache

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.core import native
from goldsmith.hf.offload import generation, graph_forward
from goldsmith.offload import attach
from goldsmith.offload.adapters import EngineAdapters
from goldsmith.offload.decoding._triton import attend
from goldsmith.offload.decoding._triton_dense import choose
from goldsmith.offload.decoding.graph import GraphStep
from goldsmith.offload.guard.report import NumericsError
from goldsmith.offload.memory.machine import SimulatedMachine
from hf import models
from offload.test_device import Simulation
from offload.test_models_adapters import merged, saved
from offload.test_step import FAMILIES, continued, plain_model, target
from offload.whole_models import CALIBRATION, assert_same_text, padded, slots
from turns import by_turns

pytestmark = pytest.mark.skipif(native.reason() is not None, reason="needs the native library")

CUDA = torch.device("cuda")  # whose memory adapters take
ALL, SOME = 60, 7  # slots: for every expert, and for some of them


@pytest.fixture(autouse=True)
def _simulated(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("goldsmith.hf.offload.attachment.Engine", Simulation)


class Numbers:
    """A tokenizer of numbers."""

    eos_token_id = pad_token_id = None

    def decode(self, ids, **options):
        return "".join(f" {i}" for i in ids)


def offload(plain, count, **options):
    budget = ((4 << 20) + slots(plain, count)) * 4 // 3  # a quarter is workspace
    options = {"calibration": CALIBRATION, "device": "cpu", "gpu_budget": budget} | options
    return attach.offload(copy.deepcopy(plain), **options)


def recorded(offloaded, count):
    """Whether the last steps were recorded, with all experts on the device or without."""
    step = offloaded.model.forward._step
    assert step is not None and step.recording is not None, offloaded.model.forward.why_not
    return (step.experts.serving is None) is (count is ALL)


@pytest.mark.parametrize("count, family", by_turns([ALL, SOME, 0], FAMILIES))
def test_the_logits_of_a_recorded_step_are_the_models_in_float64(family, count):
    plain = plain_model(family, tie_word_embeddings=False)
    layers = plain.config.num_hidden_layers
    options = {} if count else {"lanes": "cpu"}
    with offload(plain, ALL if count is ALL else SOME * layers // 2, **options) as offloaded:
        assay.check(target(offloaded, plain, models.tokens(2)), probes=["values", "ensemble"])
        assert recorded(offloaded, count)


@pytest.mark.parametrize("count", [ALL, SOME], ids=["all on the device", "some"])
def test_a_recorded_step_adds_the_adapters_that_are_active(count, tmp_path, monkeypatch):
    """LoRA of the experts on both sides and of the attention; another one, and none, in the same engine."""
    monkeypatch.setattr(
        "goldsmith.offload.engine.EngineAdapters", lambda store, given, _: EngineAdapters(store, given, CUDA)
    )
    plain = plain_model(tie_word_embeddings=False, num_hidden_layers=1)
    saved(plain, tmp_path / "a", rank=3, target_modules=["q_proj", "o_proj"], seed=1)
    saved(plain, tmp_path / "b", rank=2, targets=models.EXPERTS[:1], seed=2)
    adapters = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(graph_forward, "WAITING", 0)
    with offload(plain, ALL if count is ALL else SOME // 2, adapter=adapters) as offloaded:
        for names in ("a", "b", None):
            offloaded.set_adapter(names)
            theirs = plain if names is None else merged(plain, tmp_path / names)
            assay.check(target(offloaded, theirs, models.tokens(2)), probes=["values"])
            assert recorded(offloaded, count)
        monkeypatch.setattr(graph_forward, "WAITING", 1)
        offloaded.set_adapter("a")
        reasons = [continued(offloaded.model, models.tokens()) is None or offloaded.model.forward.why_not for _ in "12"]
        assert reasons == ["its adapters changed a moment ago", ""]


def test_a_model_that_is_not_described_is_recorded_with_its_own_modules():
    plain = plain_model(mlp_only_layers=[0], tie_word_embeddings=False)
    with offload(plain, ALL) as offloaded:
        assay.check(target(offloaded, plain, models.tokens(2)), probes=["values", "ensemble"])
        assert recorded(offloaded, ALL)


@pytest.mark.parametrize(
    "family, reason", [("deepseek_v3", "changes keys after they are cached"), ("gpt_oss", "its attention has s_aux")]
)
def test_attention_that_a_recording_cannot_compute_runs_as_the_model_has_it(family, reason):
    plain = plain_model(family)
    with offload(plain, ALL) as offloaded:
        assert_same_text(plain, offloaded.model, models.tokens(2))
        assert reason in offloaded.model.forward.why_not


@pytest.mark.parametrize("count", [ALL, SOME])
def test_a_batch_with_padding_gets_the_plain_text_and_the_steps_are_counted(count):
    plain = plain_model()
    ids, mask = padded()
    with offload(plain, count) as offloaded:
        assert_same_text(plain, offloaded.model, ids, steps=5, attention_mask=mask)
        assert recorded(offloaded, count)
        stats, layers = offloaded.stats(), len(offloaded.engine.store.layers)
        assert (stats.calls, stats.tokens) == (5 * layers, (ids.numel() + 4 * len(ids)) * layers)
        assert stats.experts_cached and (stats.experts_cpu > 0) >= (count is SOME)


def test_text_is_that_of_generate_and_its_largest_logits_come_from_the_recording(monkeypatch):
    plain, ids = plain_model(), models.tokens(2, 5)
    plain.generation_config.eos_token_id = None
    inputs, known = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, []
    best = GraphStep.best
    monkeypatch.setattr(GraphStep, "best", lambda *arguments: known.append(best(*arguments)) or known[-1])

    def texts(temperature):
        result = generation.Generation([])
        generation.generate(
            offloaded.model, Numbers(), ["", ""], generation=result, inputs=inputs, max_new_tokens=6,
            temperature=temperature, top_k=5,
        )  # fmt: skip
        return [output.tokens for output in result.outputs]

    with offload(plain, ALL) as offloaded:
        own = [texts(temperature) for temperature in (0.0, 0.7)]
        assert recorded(offloaded, ALL)
        assert [list(row) for row in zip(*known[1:], strict=True)] == [row[1:] for row in own[0]]
        monkeypatch.setattr(generation, "draw", lambda *_: False)
        assert [texts(temperature) for temperature in (0.0, 0.7)] == own


def test_the_same_text_has_the_same_bits_and_reuses_the_recording():
    plain, ids = plain_model(), models.tokens(2, 9)
    bits = []
    for _ in range(2):
        with offload(plain, SOME) as offloaded:
            for _ in range(2):
                bits.append(continued(offloaded.model, ids, 4))
                step = offloaded.model.forward._step
                recording = step.recording
            assert step.recording is recording
    assert torch.equal(bits[0], bits[2]) and torch.equal(bits[1], bits[3])


@pytest.mark.parametrize("where, layer, stage", [("o_proj", 1, "input"), ("norm", None, "after")])
def test_a_nan_in_a_recorded_step_is_reported_with_its_origin(where, layer, stage):
    plain, ids = plain_model(), models.tokens()
    with offload(plain, SOME) as offloaded, torch.no_grad():
        model, cache = offloaded.model, DynamicCache(config=plain.config)
        model(ids[:, :-1], past_key_values=cache)
        block = model.model.layers[1]
        {"o_proj": block.self_attn.o_proj, "norm": model.model.norm}[where].weight.fill_(torch.nan)
        with pytest.raises(NumericsError) as raised:
            model(input_ids=ids[:, -1:], past_key_values=cache)
        assert (raised.value.report.layer, raised.value.report.stage) == (layer, stage)


def test_a_failure_of_the_cpu_ends_the_step_and_the_next_one_works(monkeypatch):
    plain, ids = plain_model(), models.tokens(1, 8)
    with offload(plain, SOME) as offloaded, torch.no_grad():
        model, cache = offloaded.model, DynamicCache(config=plain.config)
        model(ids[:, :6], past_key_values=cache)
        model(input_ids=ids[:, 6:7], past_key_values=cache)
        step = model.forward._step
        args = step.experts.serving._layers[0].experts.contents
        intermediate, args.slots = args.slots, 99
        with pytest.raises((ValueError, RuntimeError)):
            model(input_ids=ids[:, 7:8], past_key_values=cache)
        args.slots = intermediate
        after = model(input_ids=ids[:, 7:8], past_key_values=cache).logits
        assert torch.isfinite(after).all()


@pytest.mark.parametrize("name", ["launch", "serve", "end"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_interrupt_between_launch_and_answer_leaves_no_device_waiting(name, after, monkeypatch):
    plain, ids = plain_model(num_hidden_layers=1), models.tokens(1, 8)
    with offload(plain, SOME // 2) as offloaded, torch.no_grad():
        model, cache = offloaded.model, DynamicCache(config=plain.config)
        model(ids[:, :6], past_key_values=cache)
        model(input_ids=ids[:, 6:7], past_key_values=cache)
        recording = model.forward._step.recording
        owner = {"launch": recording._work, "serve": recording.experts.serving, "end": recording}[name]
        method = getattr(owner, name)

        def interrupted():
            if after:
                method()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            model(input_ids=ids[:, 7:8], past_key_values=cache)
        logits = model(input_ids=ids[:, 7:8], past_key_values=cache).logits
        assert model.forward._step.recording is recording and not recording.experts.serving.asked
    with offload(plain, SOME // 2) as offloaded:
        assert torch.equal(continued(offloaded.model, ids, 2), logits[:, -1])


def test_more_memory_leaves_the_cpu_less_work_and_changes_no_text():
    plain, ids, work = plain_model(), models.tokens(1, 6), []
    for options in ({"count": SOME, "lanes": "cpu"}, {"count": SOME}, {"count": SOME + 3}, {"count": ALL}):
        with offload(plain, **options) as offloaded:
            assert_same_text(plain, offloaded.model, ids, steps=6)
            work.append(offloaded.stats().experts_cpu)
    assert work == sorted(work, reverse=True) and work[0] > work[-1]


def test_a_recording_that_asks_nothing_uses_no_word_of_the_host(monkeypatch):
    """All experts on the device: a step has no wait, and the host answers nothing."""
    plain, ids = plain_model(), models.tokens(1, 6)

    def refused(*_):
        raise AssertionError("a word was used")

    with offload(plain, ALL) as offloaded, torch.no_grad():
        cache = DynamicCache(config=plain.config)
        offloaded.model(ids[:, :5], past_key_values=cache)
        for name in ("write_word", "wait_for_word"):
            monkeypatch.setattr(SimulatedMachine, name, refused)
        offloaded.model(input_ids=ids[:, 5:], past_key_values=cache)
        assert recorded(offloaded, ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_routers_choice_is_that_of_topk_with_the_lower_expert_at_a_tie(dtype):
    scores = torch.randn(3, 6).to(dtype)
    scores[1] = torch.tensor([1.0, 2.0, 2.0, 0.0, 2.0, 1.0])
    ids, weights = choose(scores, 3, normalised=True, dtype=torch.float32)
    probabilities = scores.float().softmax(-1)
    order = torch.sort(probabilities, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :3])
    wanted = order.values[:, :3].double()
    case = Case("scores", lambda make: {"scores": make.normal(2, 6)}, {})
    exact = assay.Target(
        lambda scores: choose(scores, 3, normalised=True, dtype=torch.float32)[1],
        lambda scores: (top := scores.softmax(-1).topk(3).values) / top.sum(-1, keepdim=True),
        cases=[case], name="the router's weights", backward=None,
    )  # fmt: skip
    assay.check(exact, probes=["values", "ensemble"])
    assert weights.shape == wanted.shape
    ids, weights = choose(scores.fill_(torch.nan), 2, normalised=True, dtype=torch.float32)
    assert torch.isnan(weights).all() and ids.tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("last", [0, 5, 127, 128, 300])
def test_attention_over_the_cache_is_softmax_of_its_positions(last):
    """One head of values is narrower than the keys, and a sequence begins after the first part."""
    heads, group, width, values, capacity = 2, 3, 24, 16, 384
    starts = torch.tensor([0, min(last, 130)])

    def golden(q, k, v):
        k, v = (t[:, :, : last + 1].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("bhd,bhnd->bhn", q, k) * width**-0.5
        scores = scores.masked_fill((torch.arange(last + 1) < starts[:, None])[:, None], -torch.inf)
        return torch.einsum("bhn,bhnd->bhd", scores.softmax(-1), v)

    def draw(make):
        shapes = {"q": (2, heads * group, width), "k": (2, heads, capacity, width), "v": (2, heads, capacity, values)}
        return {name: make.normal(*shape) for name, shape in shapes.items()}

    def ours(q, k, v):
        return attend(q, k, v, torch.tensor([last]), starts, width**-0.5)

    target = assay.Target(ours, golden, cases=[Case("cache", draw, {})], name="attention of a step", backward=None)
    assay.check(target, probes=["values", "ensemble"])


def test_a_copied_model_steps_with_its_own_weights():
    plain, ids = plain_model(), models.tokens(1, 6)
    with offload(plain, ALL) as offloaded:
        continued(offloaded.model, ids)  # its prompt finds an empty cache, so that the CPU computes two of the experts
        before, other = continued(offloaded.model, ids), copy.deepcopy(offloaded.model)
        continued(other, ids)
        with torch.no_grad():
            other.lm_head.weight.mul_(2)
        assert torch.equal(continued(other, ids), 2 * before) and torch.equal(continued(offloaded.model, ids), before)
        assert recorded(offloaded, ALL) and other.forward._step is not offloaded.model.forward._step


def test_a_model_that_was_changed_in_mid_conversation_computes_with_its_own_forward():
    plain, ids, called = plain_model(), models.tokens(), []
    with offload(plain, SOME) as offloaded, torch.no_grad():
        model, cache = offloaded.model, DynamicCache(config=plain.config)
        model(input_ids=ids[:, :-2], past_key_values=cache)
        model(input_ids=ids[:, -2:-1], past_key_values=cache)
        assert recorded(offloaded, SOME)
        model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda *_: called.append(1))
        model(input_ids=ids[:, -1:], past_key_values=cache)
        assert called and "o_proj has a hook" in model.forward.why_not
