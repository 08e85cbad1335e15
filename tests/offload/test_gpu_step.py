"""The recorded step on a GPU: a CUDA graph of the whole model, for which the CPU computes some experts."""

import copy
import functools

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.hf.offload import graph_forward
from goldsmith.offload import attach
from goldsmith.offload.memory.budget import SPARE
from hf import goldens, models
from offload.test_graph_step import ALL, SOME, recorded
from offload.test_models_adapters import merged, saved
from offload.test_step import EMBEDDING, FAMILIES, continued, plain_model
from offload.whole_models import CALIBRATION, assert_same_ids, greedy

pytestmark = pytest.mark.gpu

offload = functools.partial(attach.offload, device="cuda", calibration=CALIBRATION)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def budget(plain, count):
    """Bytes for `count` slots of this model's store, beside which a quarter is workspace."""
    if not count:
        return 0
    with offload(copy.deepcopy(plain), gpu_budget=0) as offloaded:
        slot = offloaded.engine.spending.slot_bytes
    return -(-(SPARE + count * slot) * 4 // 3)


def target(offloaded, plain, ids):
    wide = goldens.InItsDtype(plain)

    def ours(table):
        with torch.no_grad():
            offloaded.model.get_input_embeddings().weight.copy_(table)
        return continued(offloaded.model, ids.cuda(), 2).cpu()

    def golden(table):
        return wide.outputs(table.dtype, {EMBEDDING: table}, {"input_ids": ids, "use_cache": False}).logits[:, -1]

    shape = plain.get_input_embeddings().weight.shape
    case = Case("embeddings", lambda make: {"table": make.normal(*shape)}, {})
    return assay.Target(ours, golden, cases=[case], name=f"a step of {plain.config.model_type}", backward=None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [ALL, SOME, 0], ids=["all on the device", "some", "none"])
def test_the_logits_of_a_recorded_step_are_the_models_in_float64(family, count):
    plain = plain_model(family, tie_word_embeddings=False)
    some = SOME * plain.config.num_hidden_layers // 2 if count is SOME else count
    with offload(copy.deepcopy(plain), gpu_budget=budget(plain, some)) as offloaded:
        assay.check(target(offloaded, plain, models.tokens(2)), probes=["values", "ensemble"])
        assert recorded(offloaded, count)


@pytest.mark.parametrize("count", [ALL, SOME, 0])
def test_a_recorded_step_adds_the_adapters_that_are_active(count, tmp_path, monkeypatch):
    monkeypatch.setattr(graph_forward, "WAITING", 0)
    plain = plain_model(tie_word_embeddings=False)
    saved(plain, tmp_path / "a", rank=3, target_modules=["q_proj", "o_proj"], seed=1)
    saved(plain, tmp_path / "b", rank=2, targets=models.EXPERTS[:1], seed=2)
    more = 4 << 20 if count else 0  # for the factors
    options = {"adapter": [tmp_path / "a", tmp_path / "b"], "gpu_budget": budget(plain, count) + more}
    with offload(copy.deepcopy(plain), **options) as offloaded:
        for names in ("a", "b", None):
            offloaded.set_adapter(names)
            theirs = plain if names is None else merged(plain, tmp_path / names)
            assay.check(target(offloaded, theirs, models.tokens(2)), probes=["values"])
            assert offloaded.model.forward._step.recording is not None, offloaded.model.forward.why_not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [ALL, SOME, 0])
def test_a_text_in_16_bits_is_the_plain_models(count, dtype):
    plain, ids = plain_model(dtype=dtype), models.tokens()
    with offload(copy.deepcopy(plain), gpu_budget=budget(plain, count)) as offloaded:
        text = greedy(offloaded.model, ids.cuda(), 20)[0].cpu()
        assert_same_ids(plain, text, ids, steps=20)
        assert recorded(offloaded, count)


@pytest.mark.parametrize("count", [ALL, SOME, 0])
def test_the_same_text_has_the_same_bits(count):
    plain, ids, bits = plain_model(dtype=torch.bfloat16), models.tokens(2, 9).cuda(), []
    for _ in range(2):
        with offload(copy.deepcopy(plain), gpu_budget=budget(plain, count)) as offloaded:
            bits += [continued(offloaded.model, ids, 4) for _ in range(3)]
    assert all(map(torch.equal, bits[:3], bits[3:]))
