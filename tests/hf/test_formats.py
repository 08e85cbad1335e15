"""Quantised checkpoints: codes are kept where a format holds them, otherwise decoded exactly; all else is refused."""

from pathlib import Path

import pytest
import torch

from hf import checkpoints, layouts, models
from hf.test_checkpoint import change, on_meta, settings
from offload.whole_models import check_alike

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

from goldsmith.hf.checkpoint.formats.registry import Schemes
from goldsmith.hf.checkpoint.formats.scheme import CodeFormat
from goldsmith.hf.checkpoint.opening import open_checkpoint
from goldsmith.hf.checkpoint.source import DecodedExperts
from goldsmith.hf.experts_spec import experts_modules, spec_of
from goldsmith.offload import from_pretrained

PACKED, INTEGERS, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
FP4 = {"num_bits": 4, "type": "float"}
LIBRARY = [
    (PACKED, {"num_bits": 4, "strategy": "group", "group_size": 16}, "int4"),
    (PACKED, {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False}, "int4_asym"),
    (PACKED, {"num_bits": 4, "strategy": "channel"}, "int4"),
    (PACKED, {"num_bits": 4, "strategy": "channel", "symmetric": False}, "int4_asym"),
    (PACKED, {"num_bits": 8, "strategy": "channel"}, "int8"),
    (PACKED, {"num_bits": 8, "strategy": "group", "group_size": 16, "symmetric": False}, None),
    (PACKED, {"num_bits": 2, "strategy": "group", "group_size": 16, "symmetric": False}, "int4_asym"),
    (PACKED, {"num_bits": 2, "strategy": "group", "group_size": 16}, "int4"),
    (INTEGERS, {"num_bits": 8, "strategy": "channel"}, "int8"),
    (INTEGERS, {"num_bits": 8, "strategy": "tensor"}, "int8"),
    (INTEGERS, {"num_bits": 8, "strategy": "group", "group_size": 16}, "int8"),
    (INTEGERS, {"num_bits": 8, "strategy": "channel", "symmetric": False}, None),
    (FLOATS, {"num_bits": 8, "type": "float", "strategy": "channel"}, None),
    (FLOATS, {"num_bits": 8, "type": "float", "strategy": "tensor"}, "fp8_block"),
    (FLOATS, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "fp8_block"),
    (FLOATS, {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 32]}, None),
    (
        "nvfp4-pack-quantized",
        FP4 | {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        "int8",
    ),
    (
        "mxfp4-pack-quantized",
        FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        "mxfp4",
    ),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout, arguments, form", LIBRARY, ids=[f"{c[0]}-{k}" for k, c in enumerate(LIBRARY)])
def test_weights_equal_those_of_compressed_tensors(layout, arguments, form, dtype):
    """The library rounds to the dtype of its scales; we decode in float32, so ours rounded once are the same."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    generator = torch.Generator().manual_seed(3)
    parts, theirs = layouts.compressed(128, 256, generator, layout=layout, dtype=dtype, **arguments)
    plain = {name: value for name, value in arguments.items() if name != "scale_dtype"}
    scheme = Schemes(Path("m"), layouts.settings_of(layout, **plain)).of("model.layers.0.mlp.up_proj")
    assert scheme.format == form and set(parts) <= scheme.known
    assert torch.equal(scheme.weights(parts).to(theirs.dtype), theirs)


@pytest.mark.parametrize("kind", layouts.KINDS)
def test_every_layout_is_read_in_convert(kind, tmp_path):
    """Experts keep their codes, or equal the weights in float32; linear layers around them are decoded exactly."""
    if kind in layouts.OF_LIBRARY:
        pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    folder, plain = checkpoints.quantised(tmp_path, kind, "qwen3_moe")
    wanted = layouts.FORMATS[kind]
    if wanted is None:
        with pytest.warns(DecodedExperts, match="no format of goldsmith holds .* decoded to float32 exactly and take"):
            ours = hf.convert(on_meta(folder))
    else:
        ours = hf.convert(on_meta(folder))
    base, experts = models.experts_of(ours).base, models.experts_of(plain)
    assert (base.format, base.group_size) == (wanted or ("fp32", None))
    gate_up, down = base.unpack()
    assert torch.equal(gate_up, experts.gate_up_proj) and torch.equal(down, experts.down_proj)
    kept = ours.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items() if name in kept)


@pytest.mark.parametrize("kind", ["gptq", "ct_fp8"])
def test_a_quantised_model_is_offloaded_and_gives_the_plain_text(kind, tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    folder, plain = checkpoints.quantised(tmp_path / "model", kind, "qwen3_moe")
    if layouts.FORMATS[kind] is None:
        with pytest.warns(DecodedExperts, match="float32"):
            ours = from_pretrained(folder, device="cpu", dtype=torch.float32)
    else:
        ours = from_pretrained(folder, device="cpu", dtype=torch.float32)
    with ours:
        assert ours.engine.store.format == (layouts.FORMATS[kind] or ("fp32",))[0] and ours.engine.store.exact
        check_alike(ours.model, plain)


def test_decoded_experts_may_be_packed_in_any_format_without_a_warning(tmp_path, recwarn):
    folder, plain = checkpoints.quantised(tmp_path, "gptq_order", "qwen3_moe")
    ours = models.experts_of(hf.convert(on_meta(folder), format="int8", group_size=8)).base
    wanted = models.experts_of(hf.convert(plain, format="int8", group_size=8)).base
    assert all(torch.equal(a, b) for a, b in zip(ours.unpack(), wanted.unpack()))
    assert not [warning for warning in recwarn if issubclass(warning.category, DecodedExperts)]


def test_codes_that_no_format_holds_are_refused_and_their_weights_can_be_read(tmp_path):
    folder, plain = checkpoints.quantised(tmp_path, "gptq_order", "qwen3_moe")
    model = on_meta(folder)
    path, module = next(iter(experts_modules(model)))
    layer = open_checkpoint(folder, model).experts(path, spec_of(module))
    with pytest.raises(ValueError, match=rf"{path}: no format holds its codes \(.*\); read its weights"):
        layer.codes("down", 1)
    assert torch.equal(layer.weights("down", 1), models.experts_of(plain).down_proj[1])


def test_groups_of_layers_may_be_stored_in_different_ways(tmp_path):
    """compressed-tensors' groups: experts in int4, everything else in fp8; a store needs one format, and gets it."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    experts = {"targets": [r"re:.*\.experts\..*"], **layouts.settings_of(PACKED, num_bits=4, strategy="channel")}
    config = layouts.settings_of(FLOATS, num_bits=8, type="float", strategy="tensor")
    groups = {"others": config["config_groups"]["group_0"], "experts": experts["config_groups"]["group_0"]}
    groups["experts"]["targets"] = experts["targets"]
    schemes = Schemes(Path("m"), config | {"format": "mixed-precision", "config_groups": groups})
    assert schemes.of("model.layers.1.mlp.experts.3.up_proj").format == "int4"
    assert schemes.of("model.layers.1.self_attn.q_proj").format == "fp8_block"


def test_scales_for_whole_rows_are_repeated_where_gate_and_down_differ():
    scheme = Schemes(Path("m"), layouts.settings_of(PACKED, num_bits=4, strategy="channel")).all[0]
    assert scheme.target(64, 48) == CodeFormat("int4", 16)
    assert scheme.target(64, 4) == "groups of a whole row do not fit 64 and 4"


CT = layouts.settings_of
REFUSED = [
    ({"quant_method": "hqq"}, "quantised with 'hqq'; supported are compressed-tensors, gptq, awq, fp8, modelopt"),
    (layouts.GPTQ | {"bits": 3}, "GPTQ with 3 bits; supported are 2, 4 and 8"),
    (layouts.GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin' of another kernel"),
    (layouts.GPTQ | {"dynamic": {"+:.*up": {"bits": 8}}}, r"other settings for some layers \('\+:.\*up'\)"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "AWQ with bits 4, version 'gemv_fast'"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False; supported are bits 4"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 in e5m2; supported is e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"fp8 in blocks of \[128\]; expected two sizes"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt W4A8_AWQ; supported are NVFP4, FP8 and"),
    (CT("marlin-24", num_bits=4), "format 'marlin-24'; supported are pack-quantized, int-quantized"),
    (CT(PACKED, num_bits=3), "pack-quantized .3 bits, tensor., type 'int' is not supported"),
    (CT(FLOATS, num_bits=4, type="float"), "float-quantized .4 bits, tensor., type 'float' is not supported"),
    (CT(PACKED, num_bits=4) | {"config_groups": {}}, "without config_groups"),
    (CT(PACKED, num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "the sparsity format 'sparse-24-b"),
    (CT(PACKED, num_bits=4) | {"transform_config": {"config_groups": {"u": {}}}}, "its weights are rotated"),
    (CT(PACKED, num_bits=4) | {"config_groups": [1]}, "its quantization_config cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize("config, message", REFUSED, ids=range(len(REFUSED)))
def test_other_quantisations_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=f"^m: .*{message}") as raised:
        Schemes(Path("m"), config)
    assert "\n" not in str(raised.value)


def changed(**changes):
    return lambda parts: {**parts, **{name: change(parts[name]) for name, change in changes.items()}}


ALTERED = [
    ("gptq", changed(qzeros=lambda t: t + 1), "other zero points than 8, but the config says sym"),
    ("gptq", changed(g_idx=lambda t: t.flip(0)), "g_idx has other groups than group_size"),
    ("gptq", changed(scales=lambda t: t[:1]), r"scales is \[1, 32\], but qweight \[8, 32\] needs \[4, 32\]"),
    ("gptq", changed(qweight=lambda t: t.float()), "qweight is torch.float32, expected torch.int32"),
    ("gptq_order", changed(g_idx=lambda t: t + 3), "g_idx holds 6, but there are 4 groups"),
    ("gemv", changed(scales=lambda t: t[:, :3]), r"scales is \[32, 3\], but qzeros \[32, 4\] needs \[32, 32\]"),
    ("fp8_tensor", changed(weight_scale_inv=lambda t: t.expand(3)), r"weight_scale_inv is \[3\], expected one scale"),
    ("fp8_tensor", changed(weight=lambda t: (t.float() * float("nan")).to(t.dtype)), r"weight is nan at \[0, 0\]"),
    ("modelopt_nvfp4", changed(weight_scale_2=lambda t: t * 0), r"weight_scale_2 is \[0.0\], expected one number"),
    ("modelopt_nvfp4", changed(weight_scale=lambda t: t[:, :1]), r"weight_scale is \[32, 1\], but weight \[32, 32\]"),
]  # fmt: skip


@pytest.mark.parametrize("kind, alter, message", ALTERED, ids=range(len(ALTERED)))
def test_altered_codes_are_named(kind, alter, message):
    parts, _ = layouts.KINDS[kind](32, 64, torch.Generator().manual_seed(0))
    scheme = Schemes(Path("m"), layouts.SETTINGS[kind]).all[0]
    with pytest.raises(ValueError, match=message):
        scheme.weights(alter({scheme.aliases.get(name, name): part for name, part in parts.items()}))


def test_zero_points_that_two_readers_read_differently_are_refused():
    parts, _ = layouts.gptq(16, 32, torch.Generator().manual_seed(0), sym=False)
    scheme = Schemes(Path("m"), layouts.GPTQ | {"sym": False}).all[0]
    with pytest.raises(ValueError, match="qzeros holds 15, which format 'gptq' stores for both 0 and 16: save"):
        scheme.weights(parts | {"qzeros": torch.full_like(parts["qzeros"], -1)})


@pytest.mark.parametrize(
    "kind, which, function, message",
    [
        ("gptq", "experts.2.up_proj.scales", lambda t: t * float("nan"), "up of expert 2: a scale is NaN or infinite"),
        ("gptq", "experts.2.up_proj.qzeros", lambda t: None, "expert 2 has no up qzeros .GPTQ .4 bits.; the config"),
        ("gptq", "experts.1.down_proj.qweight", lambda t: t[:1], "down of expert 1: its 8 inputs are not a multiple"),
        ("gptq", "self_attn.q_proj.scales", lambda t: None, "self_attn.q_proj has no scales .GPTQ"),
        ("gptq", "self_attn.q_proj.scales", lambda t: t * float("inf"), "q_proj: a weight is NaN or infinite"),
        ("fp8_tensor", "self_attn.q_proj.weight_scale_inv", lambda t: None, "q_proj.* holds codes .*scales are"),
        ("modelopt_nvfp4", "experts.0.gate_proj.weight_scale_2", lambda t: None, "expert 0 has no gate weight_scale_2"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_nothing_is_converted(kind, which, function, message, tmp_path):
    folder, _ = checkpoints.quantised(tmp_path, kind, "qwen3_moe")
    change(folder, which, function)
    with pytest.raises(ValueError, match=message) as raised:
        hf.convert(on_meta(folder))
    assert "\n" not in str(raised.value)


def test_scales_of_activations_that_change_the_weights_are_refused(tmp_path):
    """ModelOpt's AWQ divides the input by pre_quant_scale: to ignore it would give wrong numbers."""
    folder, _ = checkpoints.quantised(tmp_path, "modelopt_nvfp4", "qwen3_moe")
    checkpoints.add(folder, "model.layers.0.self_attn.q_proj.pre_quant_scale", torch.ones(32))
    with pytest.raises(ValueError, match="self_attn.q_proj has pre_quant_scale, which is not known .ModelOpt NVFP4"):
        hf.convert(on_meta(folder))


def test_modelopt_s_own_file_says_how_the_weights_are_stored(tmp_path):
    """Older checkpoints have the settings beside config.json only."""
    folder, plain = checkpoints.quantised(tmp_path, "modelopt_fp8", "qwen3_moe")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    settings(folder)
    content = (folder / "config.json").read_text()
    (folder / "config.json").write_text(content.replace('"quantization_config"', '"unread"'))
    ours = models.experts_of(hf.convert(on_meta(folder))).base
    assert torch.equal(ours.unpack()[1], models.experts_of(plain).down_proj)
