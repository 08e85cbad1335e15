"""offload and from_pretrained: a model of every family gives its former results, whichever lane computes an expert."""

import copy
import functools
import json
import math
import warnings

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from goldsmith.hf.offload.budget import automatic, cache_bytes
from goldsmith.offload import attach
from goldsmith.offload.guard.report import NumericsError, NumericsWarning
from hf import checkpoints, models
from offload.whole_models import (
    CALIBRATION,
    FAMILIES,
    assert_same_ids,
    assert_same_text,
    check_alike,
    expert_parameters,
    greedy,
    padded,
    slots,
)
from repo.tree import ROOT

pytestmark = pytest.mark.sweep(2)

# the lanes are bit-identical only on a CPU; the GPU has its own test below
offload, from_pretrained = (functools.partial(make, device="cpu") for make in (attach.offload, attach.from_pretrained))
ONE = torch.tensor([1])
LANES = ("cpu", "copied", "cached", "mixed", "auto")
CALLS = {
    "one row": {},
    "batch with padding on the left": {"padded": True},
    "beam search": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "offloaded cache off": {"use_cache": False},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """The cache folder of this test run."""
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_the_plain_model_in_float64_and_every_lane_gives_the_same_bits(family):
    plain = models.model(family)
    ids, mask = padded()
    with offload(copy.deepcopy(plain), lanes="cpu") as offloaded:
        check_alike(offloaded.model, plain)
        assert_same_text(plain, offloaded.model, ids, attention_mask=mask)
        wanted = greedy(offloaded.model, ids, attention_mask=mask)
        store = offloaded.engine.store.path
    for lanes in LANES[1:]:
        options = {"lanes": lanes, "gpu_budget": slots(plain, 9), "calibration": CALIBRATION}
        with offload(copy.deepcopy(plain), store=store, **options) as offloaded:
            tokens = greedy(offloaded.model, ids, attention_mask=mask)
            assert all(map(torch.equal, wanted, tokens)), lanes
            stats = offloaded.stats()
            used = {"copied": stats.experts_copied, "cached": stats.experts_cached, "cpu": stats.experts_cpu}
            assert lanes == "auto" or (all(used.values()) if lanes == "mixed" else used[lanes] == sum(used.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_model_generates_the_same_from_memory_and_folder_and_detaches_bit_for_bit(family, tmp_path):
    models.model(family, dtype=torch.bfloat16).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    plain.set_experts_implementation("eager")
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    ids = models.tokens()
    with torch.no_grad():
        before = plain(ids).logits
    offloaded = offload(copy.deepcopy(plain))
    read = from_pretrained(tmp_path)
    assert offloaded.engine.store.format == "bf16" and offloaded.engine.store.path == read.engine.store.path
    assert torch.equal(offloaded.model(ids).logits, read.model(ids).logits)
    assert_same_text(plain, offloaded.model, ids)
    assert all(p.is_meta for p in expert_parameters(read.model).values()) and not read.model.training
    for each in (offloaded, read):
        model = each.detach()
        model.set_experts_implementation("eager")
        assert each.engine.closed and model is each.model
        assert model.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("how", CALLS)
def test_generate_works_as_before(how):
    plain = models.model("qwen3_moe", mlp_only_layers=[])
    options = dict(CALLS[how])
    ids, mask = padded() if options.pop("padded", False) else (models.tokens(), None)
    with offload(copy.deepcopy(plain), lanes="mixed", gpu_budget=slots(plain, 9)) as offloaded:
        assert_same_text(plain, offloaded.model, ids, **options, **({} if mask is None else {"attention_mask": mask}))


def test_sampling_inference_mode_and_plain_calls_give_the_same_bits():
    plain = models.model("olmoe")
    ids = models.tokens()
    with offload(copy.deepcopy(plain)) as offloaded:
        texts = []
        for model in (plain, offloaded.model):
            torch.manual_seed(5)
            texts.append(model.generate(ids, max_new_tokens=8, do_sample=True, top_k=0, pad_token_id=0))
        assert torch.equal(*texts)
        logits = offloaded.model(ids).logits  # the experts have no gradient, and no test here needs one
        with torch.inference_mode():
            assert torch.equal(offloaded.model(ids).logits, logits)


@pytest.mark.slow
def test_the_dense_part_compiles_around_the_calls_and_gives_the_same_bits():
    with offload(models.model("mixtral")) as offloaded:
        ids = models.tokens()
        wanted = offloaded.model(ids).logits
        calls = offloaded.stats().calls
        assert torch.equal(torch.compile(offloaded.model, backend="eager")(ids).logits, wanted)
        assert offloaded.stats().calls == 2 * calls


@pytest.mark.parametrize("cache", ["lru", "lfu", "none"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100])
def test_any_budget_gives_the_same_bits(count, cache, tmp_path):
    plain = models.model("qwen3_moe", mlp_only_layers=[])
    ids = models.tokens()
    with offload(copy.deepcopy(plain), store=tmp_path / "s", lanes="cpu") as offloaded:
        wanted = greedy(offloaded.model, ids)
    options = {"gpu_budget": slots(plain, count), "cache": cache, "calibration": CALIBRATION}
    with offload(copy.deepcopy(plain), store=tmp_path / "s", **options) as offloaded:
        assert all(map(torch.equal, wanted, greedy(offloaded.model, ids)))


def test_a_quantised_format_matches_its_own_numbers_and_needs_exact_false():
    plain = models.model("mixtral")
    with pytest.raises(ValueError, match='cpu_format="int8" does not hold .*exact=False.*cpu_format="auto"'):
        offload(plain, cpu_format="int8")
    assert not any(p.is_meta for p in plain.parameters())
    offloaded = offload(copy.deepcopy(plain), cpu_format="int8", exact=False)
    with pytest.raises(ValueError, match="int8, which rounded their weights"):
        offloaded.detach()
    experts = models.experts_of(plain)
    with torch.no_grad():
        for e in range(len(experts.gate_up_proj)):
            numbers = offloaded.engine.store.dequantize(0, e)
            experts.gate_up_proj[e].copy_(numbers["gate_up"])
            experts.down_proj[e].copy_(numbers["down"])
    check_alike(offloaded.model, plain)
    offloaded.close()


@pytest.mark.parametrize("kind", ["k2", "awq", "fp8", "mxfp4"])
def test_a_quantised_checkpoint_keeps_its_codes(kind, tmp_path):
    folder, plain = checkpoints.quantised(tmp_path / kind, kind, "gpt_oss" if kind == "mxfp4" else "qwen3_moe")
    with from_pretrained(folder, dtype=torch.float32) as offloaded:
        assert offloaded.engine.store.exact and offloaded.engine.store.format in (
            "int4",
            "int4_asym",
            "fp8_block",
            "mxfp4",
        )
        check_alike(offloaded.model, plain)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    "stored, requested, format", [("float32", "bfloat16", "bf16"), ("bfloat16", "float32", "bf16")]
)
def test_another_dtype_than_the_files_converts_as_in_transformers(family, stored, requested, format, tmp_path):
    models.model(family, dtype=getattr(torch, stored)).save_pretrained(tmp_path)
    dtype = getattr(torch, requested)
    with from_pretrained(tmp_path, dtype=dtype) as offloaded:
        assert offloaded.model.dtype == dtype and offloaded.engine.store.format == format
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        plain.set_experts_implementation("eager")
        assert_same_text(plain, offloaded.model, models.tokens())
        back = offloaded.detach().state_dict()
        assert all(torch.equal(value, back[name]) for name, value in plain.state_dict().items())


def test_keys_by_expert_in_several_shards_are_the_same_store_as_one_fused_tensor(tmp_path):
    plain = models.model("mixtral", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "fused")
    tensors = {}
    for name, value in plain.state_dict().items():
        path, _, which = name.rpartition(".")
        if ".experts" not in path:
            tensors[name] = value
            continue
        for e in range(len(value)):
            names, parts = (("w1", "w3"), value[e].chunk(2)) if which == "gate_up_proj" else (("w2",), (value[e],))
            for own, part in zip(names, parts):
                tensors[f"{path.replace('.mlp.', '.block_sparse_moe.')}.{e}.{own}.weight"] = part
    folder = checkpoints.write(tmp_path / "apart", json.loads((tmp_path / "fused/config.json").read_text()), tensors, 3)
    with from_pretrained(folder) as apart, from_pretrained(tmp_path / "fused") as fused:
        assert apart.engine.store.path == fused.engine.store.path
        assert torch.equal(apart.model(models.tokens()).logits, fused.model(models.tokens()).logits)


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"gpu_budget": "lots"}, "gpu_budget='lots' is not an amount of memory"),
        ({"device": "nosuch"}, "nosuch"),
        ({"cashe": "lru"}, "unknown keyword 'cashe'; .*Engine.*cache"),
        ({"lanes": "copied"}, "lanes='copied' cannot run"),
        ({"cache": "static"}, "needs profile="),
    ],
)
def test_a_wrong_keyword_leaves_the_model_as_it_was(wrong, text, tmp_path):
    model = models.model("mixtral")
    with torch.no_grad():
        before = model(models.tokens()).logits
    with pytest.raises((ValueError, TypeError), match=text):
        offload(model, store=tmp_path / "s", **wrong)
    if wrong.keys() & {"gpu_budget", "device", "cashe"}:  # reported before the store is built
        assert not (tmp_path / "s").exists()
    with torch.no_grad():
        assert torch.equal(model(models.tokens()).logits, before)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_reserved_for_keys_and_values_is_sufficient(family):
    model = models.model(family)
    kept = model(models.tokens(1, 6), use_cache=True).past_key_values
    nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    reckoned = cache_bytes(model, 6)
    assert nbytes == reckoned or (nbytes < reckoned and "deepseek" in family)  # latent attention may keep only latents
    model.generation_config.max_length = 24
    assert cache_bytes(model) == 4 * reckoned and cache_bytes(model, 6, rows=3) == 3 * reckoned


def test_a_batch_and_its_length_leave_less_of_the_gpu_to_experts(monkeypatch):
    model = models.model("mixtral")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 80 * 2**30))
    room = {
        (rows, tokens): automatic(model, torch.device("cuda"), rows, tokens) for rows in (1, 8) for tokens in (6, 60)
    }
    one = cache_bytes(model, 6)
    assert room[1, 6] == 10 * 2**30 - 4 * 2**30 - one  # 5 % of 80 GiB
    assert [room[1, 6] - room[key] for key in ((8, 6), (1, 60), (8, 60))] == [7 * one, 9 * one, 79 * one]
    for wrong in ({"batch": 0}, {"max_length": 0}):
        with pytest.raises(ValueError, match="expected a whole number of at least 1"):
            offload(model, **wrong)


def test_progress_covers_experts_and_all_other_weights(tmp_path):
    models.model("mixtral").save_pretrained(tmp_path / "m")
    reports = []
    from_pretrained(tmp_path / "m", store=tmp_path / "s", progress=lambda *message: reports.append(message)).close()
    dense = [message for message in reports if message[2] == "reading all but the experts"]
    assert len(dense) > 3 and dense[-1][0] == dense[-1][1] > dense[0][0] and reports[: len(dense)] == dense
    assert {message[2] for message in reports} > {"reading all but the experts"}


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_a_model_generates_the_same_through_every_lane_and_detaches(family, dtype, lanes):
    plain = models.model(family, dtype=dtype)
    ids, mask = (tensor.cuda() for tensor in padded())
    options = {"lanes": lanes, "gpu_budget": "64MiB", "calibration": CALIBRATION, "device": "cuda"}
    with attach.offload(copy.deepcopy(plain), **options) as offloaded:
        assert offloaded.model.device.type == "cuda"
        received = greedy(offloaded.model, ids, attention_mask=mask)[0]
        assert torch.equal(
            received, greedy(offloaded.model, ids, attention_mask=mask)[0]
        )  # the same calls, the same bits
        back = offloaded.detach()
    assert all(torch.equal(value, back.state_dict()[name]) for name, value in plain.state_dict().items())
    assert_same_ids(plain.cuda(), received, ids, steps=6, attention_mask=mask)


@pytest.mark.gpu
def test_a_model_already_on_the_gpu_is_offloaded_and_detached(tmp_path):
    plain = models.model("gpt_oss", dtype=torch.bfloat16).cuda()
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    with attach.offload(plain, store=tmp_path / "s", device="cuda", gpu_budget=0) as offloaded:
        assert all(p.is_meta for p in expert_parameters(plain).values())
        assert offloaded.model.generate(models.tokens().cuda(), max_new_tokens=3, pad_token_id=0).is_cuda
        back = offloaded.detach().state_dict()
    assert all(value.is_cuda and torch.equal(value, weights[name]) for name, value in back.items())


def test_the_small_checkpoint_generates_the_same_through_every_lane():
    folder = ROOT / "examples" / "shakespeare-moe"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    plain.set_experts_implementation("eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("**MACBETH**  \nIs this a dagger which I see", return_tensors="pt").input_ids
    texts = []
    for lanes in ("cpu", "mixed"):
        with from_pretrained(folder, lanes=lanes, gpu_budget="2MiB") as offloaded:
            texts.append(greedy(offloaded.model, ids, 24)[0])
            if lanes == "cpu":
                assert_same_text(plain, offloaded.model, ids, steps=24)
    assert torch.equal(*texts)


@pytest.mark.gpu
@pytest.mark.parametrize("lanes", LANES)
def test_on_a_gpu_the_small_checkpoint_generates_the_same_through_every_lane(lanes):
    folder = ROOT / "examples" / "shakespeare-moe"
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().cuda()
    plain.set_experts_implementation("eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("**MACBETH**  \nIs this a dagger which I see", return_tensors="pt").input_ids.cuda()
    options = {"lanes": lanes, "gpu_budget": "16MiB", "calibration": CALIBRATION, "device": "cuda"}
    with attach.from_pretrained(folder, **options) as offloaded:
        value = greedy(offloaded.model, ids, 24)[0]
    assert_same_ids(plain, value, ids, steps=24)


@pytest.mark.parametrize("where, value", [("model.norm.weight", math.nan), ("lm_head.weight", math.inf)])
def test_a_nan_after_the_last_experts_is_reported_too(where, value):
    ids, broken = padded()[0], models.model("qwen3_moe")
    broken.get_parameter(where).data.fill_(value)
    with offload(copy.deepcopy(broken)) as offloaded, torch.no_grad():
        for call in (offloaded.model, offloaded.model.generate):
            with pytest.raises(NumericsError, match="after the last layer of experts") as raised:
                call(ids)
            report = raised.value.report
            assert (report.layer, report.cause, report.experts, report.num_rows) == (None, "after", (), len(ids))
    with offload(broken, guard="warn") as offloaded, torch.no_grad():
        with pytest.warns(NumericsWarning, match="after the last layer of experts"):
            offloaded.model(ids)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            offloaded.model(ids)  # it has been reported


def test_a_head_may_mask_words_with_minus_infinity():
    with offload(models.model("qwen3_moe")) as offloaded, torch.no_grad():
        offloaded.model.lm_head.register_forward_hook(
            lambda module, options, scores: scores.index_fill(-1, ONE, -torch.inf)
        )
        assert offloaded.model(padded()[0]).logits.isneginf().any()
