"""Models on the meta device are streamed from shards, quantised ones with their own codes; damage is reported."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf import checkpoints, goldens, models
from turns import by_turns

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
INDEX = "model.safetensors.index.json"


def on_meta(folder, dtype=torch.float32):
    config = models.transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return models.transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def saved(folder, family="qwen3_moe", **changes):
    plain = models.model(family, **changes)
    plain.save_pretrained(folder, max_shard_size="20KB")
    return plain


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_plain_checkpoint_is_streamed_to_the_same_model(family, tmp_path):
    plain = saved(tmp_path, family)
    wanted = hf.convert(plain, format="fp32", lora={"rank": 2})
    ours = hf.convert(on_meta(tmp_path), format="fp32", lora={"rank": 2})
    assert {p.device.type for p in ours.parameters()} == {p.device.type for p in ours.buffers()} == {"cpu"}
    assert torch.equal(ours(models.tokens()).logits, wanted(models.tokens()).logits)
    assert ours.state_dict().keys() == wanted.state_dict().keys()
    assert all(p.requires_grad == ("lora" in name) for name, p in ours.named_parameters())


def test_another_dtype_and_format_may_be_chosen(tmp_path):
    plain = saved(tmp_path)
    wanted = hf.convert(plain, format="int4", group_size=8, partitions=2).to(torch.bfloat16)
    ours = hf.convert(on_meta(tmp_path, torch.bfloat16), format="int4", group_size=8, partitions=2)
    base = models.experts_of(ours).base
    assert (base.format, base.group_size, base.partitions) == ("int4", 8, 2)
    assert all(torch.equal(a, b) for a, b in zip(base.unpack(), models.experts_of(wanted).base.unpack()))
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.state_dict().keys() == wanted.state_dict().keys()
    assert all(torch.equal(a, wanted.state_dict()[name]) for name, a in ours.state_dict().items())


def test_tied_embeddings_stay_tied(tmp_path):
    plain = saved(tmp_path, "mixtral", tie_word_embeddings=True)
    ours = hf.convert(on_meta(tmp_path), format="fp32")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert torch.equal(ours(models.tokens()).logits, hf.convert(plain, format="fp32")(models.tokens()).logits)


def test_a_base_model_loads_from_its_own_files_and_from_the_whole_model_s(tmp_path):
    """The names in AutoModel's checkpoints have no prefix "model."."""
    plain = saved(tmp_path)
    plain.model.save_pretrained(tmp_path / "base")
    ours = on_meta(tmp_path).model
    hf.convert(ours, format="fp32", checkpoint=tmp_path / "base")
    wanted = hf.convert(plain, format="fp32").model
    assert torch.equal(ours(models.tokens()).last_hidden_state, wanted(models.tokens()).last_hidden_state)
    part = on_meta(tmp_path).model
    with pytest.warns(UserWarning, match="1 tensors that Qwen3MoeModel has no place for, first lm_head.weight"):
        hf.convert(part, format="fp32")
    assert torch.equal(part(models.tokens()).last_hidden_state, wanted(models.tokens()).last_hidden_state)


OWN = {"k2": "int4", "awq": "int4_asym", "fp8": "fp8_block", "mxfp4": "mxfp4"}
QUANTISED = {"k2": "deepseek_v3", "awq": "qwen3_moe", "fp8": "deepseek_v3", "mxfp4": "gpt_oss"}


@pytest.mark.parametrize("kind, partitions", by_turns([*QUANTISED], [1, 2]))
def test_a_quantised_checkpoint_keeps_its_codes(kind, partitions, tmp_path):
    """Experts are not rounded again; the linear layers around them are decoded exactly."""
    folder, plain = checkpoints.quantised(tmp_path, kind, QUANTISED[kind])
    ours = hf.convert(on_meta(folder), partitions=partitions)
    base, experts = models.experts_of(ours).base, models.experts_of(plain)
    assert (base.format, base.partitions) == (OWN[kind], partitions)
    spec = models.experts_of(ours).spec
    gate_up, down = base.unpack()
    assert torch.equal(gate_up, spec.canonical_gate_up(experts.gate_up_proj)) and torch.equal(
        down, spec.canonical_down(experts.down_proj)
    )
    kept = ours.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items() if name in kept)
    goldens.check_alike(ours, plain)
    assert not hasattr(ours.config, "quantization_config")


def change(folder, which, function):
    """Applies the function to every tensor whose name contains `which`; removes it if the result is None."""
    for path in folder.glob("*.safetensors"):
        tensors = {n: function(t) if which in n else t for n, t in load_file(path).items()}
        save_file({n: t.contiguous() for n, t in tensors.items() if t is not None}, path, {"format": "pt"})
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"] = {
            n: f for n, f in index["weight_map"].items() if n not in tensors or tensors[n] is not None
        }
        (folder / INDEX).write_text(json.dumps(index))


def settings(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**config.get("quantization_config", {}), **changes}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: change(f, "experts.3.up_proj", lambda t: None), "expert 3 has no up_proj weight .plain weights"),
        (lambda f: change(f, "layers.0.mlp.down_proj", lambda t: None), "1 tensor .* first model.layers.0.mlp.down"),
        (lambda f: change(f, "layers.0.mlp.down_proj", lambda t: t[:3]), r"weight is \[3, 40\], but .*config"),
        (lambda f: change(f, "experts.2.gate_proj", lambda t: t * float("nan")), "gate.*expert 2|expert 2.*gate"),
        (lambda f: sorted(f.glob("*.safetensors"))[2].unlink(), "1 shard of its index is missing, first model-00003"),
        (lambda f: (f / INDEX).write_text("{}"), "not an index"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], "no file with weights under a name"),
        (lambda f: settings(f, quant_method="hqq"), "quantised with 'hqq'; supported are compressed-tensors, gptq"),
        (lambda f: settings(f, quant_method="fp8"), "its config says 'fp8', but no tensor has that format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_damaged_or_unsupported_checkpoint_is_named(spoil, message, tmp_path):
    saved(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf.convert(on_meta(tmp_path), format="fp32")


def test_a_truncated_shard_is_named(tmp_path):
    saved(tmp_path)
    shard = max(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"{shard.name}.* cannot be read"):
        hf.convert(on_meta(tmp_path), format="fp32")


@pytest.mark.parametrize(
    "kind, family, spoil, message",
    [
        ("k2", "deepseek_v3", lambda f: change(f, "experts.1.up_proj.weight_scale", lambda t: None),
         "expert 1 has no up weight_scale .compressed-tensors"),
        ("k2", "deepseek_v3", lambda f: settings(f, config_groups={"g": {"weights": {"num_bits": 8}}}),
         r"gate of expert 0: weight_shape says \[32, 32\], but weight_packed \[32, 4\] has other sizes"),
        ("awq", "qwen3_moe", lambda f: change(f, "experts.0.down_proj.qzeros", lambda t: None),
         "expert 0 has no down qzeros"),
        ("awq", "qwen3_moe", lambda f: settings(f, quant_method="compressed-tensors", format="pack-quantized"),
         "compressed-tensors without config_groups"),
        ("mxfp4", "gpt_oss", lambda f: change(f, "down_proj_scales", lambda t: None),
         "is not known among experts of mxfp4"),
    ],
)  # fmt: skip
def test_incomplete_codes_are_refused_by_name(kind, family, spoil, message, tmp_path):
    checkpoints.quantised(tmp_path, kind, family)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        hf.convert(on_meta(tmp_path))


@pytest.mark.parametrize(
    "kind, family, options, message",
    [
        ("k2", "deepseek_v3", {"format": "bf16"}, "format is .bf16., but .* holds int4 codes"),
        ("k2", "deepseek_v3", {"group_size": 32}, "group_size is 32, but the codes of .* have 16: leave it out"),
        ("fp8", "deepseek_v3", {"group_size": 32}, "blocks of 128 x 128: leave it out"),
        ("mxfp4", "gpt_oss", {"group_size": 16}, "mxfp4 fixes it at 32"),
    ],
)  # fmt: skip
def test_codes_are_never_requantised(kind, family, options, message, tmp_path):
    checkpoints.quantised(tmp_path, kind, family)
    with pytest.raises(ValueError, match=message):
        hf.convert(on_meta(tmp_path), **options)


def test_the_checkpoint_folder_must_be_known(tmp_path):
    saved(tmp_path)
    nowhere = on_meta(tmp_path)
    nowhere.config._name_or_path = ""
    with pytest.raises(ValueError, match="on the meta device, and '' is not a checkpoint folder: pass checkpoint="):
        hf.convert(nowhere)


def test_tensors_that_the_model_does_not_have_are_named(tmp_path):
    saved(tmp_path)
    save_file({"model.extra": torch.ones(2)}, tmp_path / "extra.safetensors")
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.extra"] = "extra.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.warns(UserWarning, match="1 tensors that Qwen3MoeForCausalLM has no place for, first model.extra"):
        hf.convert(on_meta(tmp_path), format="fp32")


def test_experts_are_read_one_at_a_time(tmp_path, monkeypatch):
    """While experts are packed, only one expert's three matrices are in memory besides the base."""
    from goldsmith.hf.checkpoint import reader

    saved(tmp_path)
    alive, most, kept = set(), [0], reader.ModelCheckpoint.read

    def read(self, name):
        import weakref

        tensor = kept(self, name)
        if ".experts." in name:
            alive.add(name)
            weakref.finalize(tensor, alive.discard, name)
            most[0] = max(most[0], len(alive))
        return tensor

    monkeypatch.setattr(reader.ModelCheckpoint, "read", read)
    hf.convert(on_meta(tmp_path), format="fp32")
    assert 0 < most[0] <= 6  # the next expert is read before the last one is freed
