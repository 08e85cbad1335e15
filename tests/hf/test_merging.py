"""merge: stock peft's merge bit for bit, streamed, in every format; what survives rounding; and what is refused."""

import json
import os

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from benchmarks import tiny_models
from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.experts_spec import experts_modules, spec_of
from goldsmith.hf.merging import codes, shards
from goldsmith.hf.merging.merged_model import merge
from goldsmith.hf.merging.shards import ShardWriter

pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"]
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}


def base_and_adapter(root, family="qwen3_moe", *, dtype=torch.bfloat16, lora=None, **options):
    plain = models.model(family, dtype=dtype, **options)
    plain.save_pretrained(root / "base")
    theirs = models.with_peft(
        plain, **({"rank": 3, "alpha": 5, "target_modules": ["o_proj"]} if lora is None else lora)
    )
    theirs.save_pretrained(root / "adapter")
    return root / "base", root / "adapter"


def loaded(folder, dtype=torch.bfloat16):
    return models.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def by_peft(base, adapter, dtype=torch.bfloat16):
    return models.peft.PeftModel.from_pretrained(loaded(base, dtype), adapter).merge_and_unload().state_dict()


def differences(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_has_the_bits_of_pefts_merge(family, dtype, tmp_path):
    base, adapter = base_and_adapter(tmp_path, family, dtype=dtype)
    report = merge(base, adapter, tmp_path / "out")
    assert not differences(loaded(tmp_path / "out", dtype).state_dict(), by_peft(base, adapter, dtype))
    assert report.survival.share == pytest.approx(1, abs=0.01) and not report.survival.lost
    assert load_file(base / "model.safetensors").keys() == load_file(tmp_path / "out" / "model.safetensors").keys()


def test_an_adapter_of_ours_on_several_ranks_and_a_router_is_merged_as_peft_merges_it(tmp_path):
    plain = models.model("qwen3_moe", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "base")
    options = {"rank": 3, "targets": [*models.EXPERTS, "mlp.gate.weight"], "rank_pattern": {"mlp.experts.down_proj": 5}}
    models.with_peft(plain, **options).save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    wanted = by_peft(tmp_path / "base", tmp_path / "adapter")
    assert not differences(loaded(tmp_path / "out").state_dict(), wanted)


@pytest.mark.parametrize("model_type", ["nemotron_h", "llama4_text", "ernie4_5_vl_moe"])
def test_experts_without_a_gate_transposed_or_two_modules_of_one_converter_are_merged(model_type, tmp_path):
    """nemotron_h, Llama 4, and ERNIE, whose files number the experts of text and vision in one row."""
    plain = tiny_models.tiny_model(model_type)
    plain.save_pretrained(tmp_path / "base")
    specs = {path: spec_of(module) for path, module in experts_modules(plain)}
    targets = [f"{path}.{name}" for path, spec in specs.items() for name in (spec.first, "down_proj")]
    theirs = models.with_peft(plain, targets=targets, rank=3)
    theirs.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    ours = type(plain).from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert not differences(ours.state_dict(), theirs.merge_and_unload().state_dict())


def test_a_weight_that_is_tied_to_another_is_refused(tmp_path):
    plain = models.model("qwen3_moe", tie_word_embeddings=True)
    plain.save_pretrained(tmp_path / "base")
    theirs = models.with_peft(plain, rank=3, target_modules=["lm_head"])
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ValueError, match="covers lm_head.weight, which .* it is tied to another weight"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_modules_that_the_adapter_replaces_whole_are_written_whole(tmp_path):
    plain = models.model("qwen3_moe", dtype=torch.bfloat16)
    plain.save_pretrained(tmp_path / "base")
    theirs = models.with_peft(plain, rank=3, modules_to_save=["mlp.gate"])
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(-3.0)
    theirs.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert not differences(loaded(tmp_path / "out").state_dict(), by_peft(tmp_path / "base", tmp_path / "adapter"))


def test_a_layer_at_a_time_is_in_memory_and_the_shards_have_an_index(tmp_path, monkeypatch):
    base, adapter = base_and_adapter(tmp_path, num_hidden_layers=3, mlp_only_layers=[])
    shard_sizes, add = [], ShardWriter.add
    monkeypatch.setattr(shards, "SHARD", 1)

    def counted(writer, tensors):
        add(writer, tensors)
        shard_sizes.append({name.split(".")[2] for name in writer._shard if ".layers." in name})

    monkeypatch.setattr(ShardWriter, "add", counted)
    merge(base, adapter, tmp_path / "out")
    assert max(map(len, shard_sizes)) == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 4
    assert not differences(loaded(tmp_path / "out").state_dict(), by_peft(base, adapter))
    assert (tmp_path / "out" / "generation_config.json").is_file()


@pytest.mark.parametrize("format", ["int4", "fp8_block"])
def test_experts_as_codes_are_the_quantised_merge_and_can_be_merged_again(format, tmp_path, monkeypatch):
    from goldsmith.offload import from_pretrained

    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    base, adapter = base_and_adapter(tmp_path, lora={"rank": 3, "alpha": 5}, **WIDE)
    report = merge(base, adapter, tmp_path / "coded", format=format)
    assert 0.9 < report.survival.along < 1.1
    merge(base, adapter, tmp_path / "plain", format="fp32")
    ids, dtype = models.tokens(), torch.float32
    with from_pretrained(tmp_path / "coded", device="cpu", dtype=dtype) as one:
        assert one.engine.store.format == format
        coded = one.model(ids).logits
    with from_pretrained(tmp_path / "plain", device="cpu", cpu_format=format, exact=False, dtype=dtype) as two:
        assert torch.equal(coded, two.model(ids).logits)
    again = merge(tmp_path / "coded", adapter, tmp_path / "again")
    assert again.format == format and not again.survival.lost
    merge(tmp_path / "coded", adapter, tmp_path / "floats", format="bf16")
    config = json.loads((tmp_path / "floats" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert loaded(tmp_path / "floats").dtype == torch.bfloat16


def test_an_adapter_smaller_than_the_steps_of_a_format_is_reported_as_lost(tmp_path):
    base, adapter = base_and_adapter(tmp_path, lora={"rank": 3, "alpha": 5}, **WIDE)
    merge(base, adapter, tmp_path / "coded", format="int4")
    weights = load_file(adapter / "adapter_model.safetensors")
    small = {name: tensor * 1e-3 if "lora_B" in name else tensor for name, tensor in weights.items()}
    shards.save_file(small, adapter / "adapter_model.safetensors")
    lost = merge(tmp_path / "coded", adapter, tmp_path / "lost").survival
    assert lost.lost and lost.along < 0.5 and lost.worst[1] <= lost.along + 0.1
    kept = merge(tmp_path / "coded", adapter, tmp_path / "kept", format="fp32").survival
    assert not kept.lost and kept.share == pytest.approx(1, abs=1e-4)


def test_survival_is_the_ratio_of_norms_and_the_share_along_the_adapter():
    survival = codes.Survival()
    survival.add("layer", torch.tensor([3.0, 4.0]), torch.zeros(2), torch.tensor([3.0, 0.0]))
    assert (survival.share, survival.along) == (pytest.approx(0.6), pytest.approx(9 / 25))
    assert survival.noise == pytest.approx(12 / 25)
    survival.add("other", torch.tensor([5.0, 0.0]), torch.ones(2), torch.tensor([6.0, 1.0]))
    assert survival.worst == ("layer", pytest.approx(9 / 25))
    assert codes.Survival().share == 1 and not codes.Survival().lost


@pytest.mark.parametrize("change, text", [
    ({"format": "int3"}, "format='int3', expected one of auto, bf16"),
    ({"model": "adapter"}, "no config.json"),
    ({"adapter": "base"}, "has no adapter_config.json"),
    ({"output": "base"}, "exists and is not an empty folder"),
    ({"adapter": "other"}, "other experts"),
], ids=["format", "model", "adapter", "output", "sizes"])  # fmt: skip
def test_an_adapter_that_cannot_be_merged_is_refused_and_nothing_is_written(tmp_path, change, text):
    base_and_adapter(tmp_path)
    models.with_peft(models.model("qwen3_moe", **WIDE), rank=3).save_pretrained(tmp_path / "other")
    arguments = {"model": "base", "adapter": "adapter", "output": "out"} | change
    names = sorted(path.name for path in tmp_path.iterdir())
    places = [tmp_path / arguments[name] for name in ("model", "adapter", "output")]
    with pytest.raises(ValueError, match=text):
        merge(*places, format=change.get("format", "auto"))
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("part", ["experts.0.up_proj.weight", "self_attn.o_proj.weight"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_weight_in_a_dtype_without_sums_is_merged_in_another_format_only(part, stored, tmp_path):
    base, adapter = base_and_adapter(tmp_path)
    weights = load_file(base / "model.safetensors")
    name = min(name for name in weights if name.endswith(part))
    save_file(weights | {name: weights[name].to(stored)}, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"has the dtype {str(stored)[6:]}, in which no sum can be written: give form"):
        merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge(base, adapter, tmp_path / "out", format="bf16")
    assert not differences(loaded(tmp_path / "out").state_dict(), by_peft(base, adapter))


def test_an_error_on_the_way_leaves_no_folder(tmp_path, monkeypatch):
    base, adapter = base_and_adapter(tmp_path)
    monkeypatch.setattr(shards, "SHARD", 1)
    calls = []

    def fails(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(tensors, path, metadata)

    real = shards.save_file
    monkeypatch.setattr(shards, "save_file", fails)
    with pytest.raises(OSError, match="could not be written: No space left on device") as raised:
        merge(base, adapter, tmp_path / "out")
    assert raised.value.filename == str(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_the_files_have_the_mode_that_the_umask_gives(tmp_path):
    """safetensors itself gives them mode 600, and another user's server could not read them."""
    base, adapter = base_and_adapter(tmp_path)
    before = os.umask(0o027)
    try:
        merge(base, adapter, tmp_path / "out")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {"0o640"}


def test_the_keys_and_shapes_of_a_hub_checkpoint_stay(tmp_path):
    """Each expert's projections apart, as most checkpoints on the hub hold them."""
    base, adapter = base_and_adapter(tmp_path)
    merge(base, adapter, tmp_path / "out")
    with (
        safe_open(base / "model.safetensors", "pt") as one,
        safe_open(tmp_path / "out" / "model.safetensors", "pt") as two,
    ):
        assert any(".experts.0.gate_proj.weight" in name for name in one.keys())
        shapes = [{name: file.get_slice(name).get_shape() for name in file.keys()} for file in (one, two)]
    assert shapes[0] == shapes[1]
