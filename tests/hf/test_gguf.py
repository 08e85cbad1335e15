"""GGUF files: experts keep their codes where a format holds them, everything else equals the package's own decoding."""

import shutil

import numpy as np
import pytest
import torch

from hf import gguf_files, models
from hf.gguf_files import Type
from offload.whole_models import check_alike

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

from goldsmith.hf.checkpoint.gguf.files import gguf_file, parts_of
from goldsmith.hf.checkpoint.gguf.header import check_header
from goldsmith.hf.checkpoint.opening import open_checkpoint
from goldsmith.hf.checkpoint.source import DecodedExperts
from goldsmith.hf.experts_spec import experts_modules, spec_of
from goldsmith.hf.model_class import config_of
from goldsmith.hf.offload.weights import coded_experts
from goldsmith.offload import from_pretrained
from goldsmith.offload.store.samples import digest

NAMES = ("gate", "up", "down")
SMALL = {"mlp_only_layers": [], "num_hidden_layers": 1, "norm_topk_prob": True, "moe_intermediate_size": 32}
WIDE = SMALL | {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 3}  # blocks of 256
KEPT = [
    ((Type.Q4_0,) * 3, ("int4", 32)),
    ((Type.Q8_0,) * 3, ("int8", 32)),
    ((Type.Q4_0, Type.Q4_0, Type.Q8_0), ("int8", 32)),
    ((Type.Q5_0, Type.IQ4_NL, Type.Q8_0), ("int8", 32)),
    ((Type.Q6_K,) * 3, ("int8", 16)),
    ((Type.Q4_0, Type.Q8_0, Type.Q6_K), ("int8", 16)),
    ((Type.MXFP4,) * 3, ("mxfp4", 32)),
]
DECODED = [
    ((Type.Q4_K, Type.Q4_K, Type.Q6_K), "Q4_K, Q6_K: not every weight is a whole number times a scale"),
    ((Type.Q4_1,) * 3, "Q4_1: not every weight"),
    ((Type.MXFP4, Type.MXFP4, Type.Q8_0), "MXFP4: no format holds both"),
]


def write_gguf(folder, types=(Type.F32,) * 3, dense=Type.F32, **options):
    """(file, the plain model that it represents)"""
    wide = any(gguf_files.gguf.GGML_QUANT_SIZES[kind][0] == 256 for kind in types)
    changes = options.pop("changes", {})
    plain = models.model("qwen3_moe", **((WIDE if wide else SMALL) | changes))
    return gguf_files.write(folder / "model.gguf", plain, dict(zip(NAMES, types)), dense, **options), plain


def on_meta(place, dtype=torch.float32):
    with torch.device("meta"):
        return models.transformers.AutoModelForCausalLM.from_config(config_of(place), dtype=dtype).eval()


def assert_same(ours, plain):
    """Experts and all other weights are equal."""
    base, experts = models.experts_of(ours).base, models.experts_of(plain)
    gate_up, down = base.unpack()
    assert torch.equal(gate_up, experts.gate_up_proj) and torch.equal(down, experts.down_proj)
    kept, wanted = ours.state_dict(), plain.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in wanted.items() if ".experts." not in name)


@pytest.mark.parametrize("types, wanted", KEPT, ids=["-".join(t.name for t in types) for types, _ in KEPT])
def test_codes_are_kept_where_a_format_holds_them(types, wanted, tmp_path, recwarn):
    file, plain = write_gguf(tmp_path, types, Type.Q8_0)
    ours = hf.convert(on_meta(tmp_path), checkpoint=tmp_path)
    base = models.experts_of(ours).base
    assert (base.format, base.group_size) == wanted
    assert_same(ours, plain)
    assert not [warning for warning in recwarn if issubclass(warning.category, DecodedExperts)]


@pytest.mark.parametrize("types, reason", DECODED, ids=["-".join(t.name for t in types) for types, _ in DECODED])
def test_other_types_are_decoded_to_float32_with_a_warning(types, reason, tmp_path):
    file, plain = write_gguf(tmp_path, types)
    with pytest.warns(DecodedExperts, match=f"model.gguf: no format of goldsmith holds .*{reason}.* float32 exactly"):
        ours = hf.convert(on_meta(file), checkpoint=file)
    assert models.experts_of(ours).base.format == "fp32"
    assert_same(ours, plain)


def test_codes_that_no_format_holds_are_refused_and_their_weights_can_be_read(tmp_path):
    file, plain = write_gguf(tmp_path, (Type.Q4_1,) * 3)
    model = on_meta(file)
    path, module = next(iter(experts_modules(model)))
    layer = open_checkpoint(file, model).experts(path, spec_of(module))
    with pytest.raises(
        ValueError, match=r"model.gguf: layer 0: no format holds its codes \(Q4_1: .*\); read its weights"
    ):
        layer.codes("down", 1)
    assert torch.equal(layer.weights("down", 1), models.experts_of(plain).down_proj[1])


def test_float_experts_are_packed_like_those_of_any_plain_checkpoint(tmp_path, recwarn):
    file, plain = write_gguf(tmp_path, (Type.F16,) * 3)
    assert_same(hf.convert(on_meta(file), format="fp32", checkpoint=file), plain)
    write_gguf(tmp_path, (Type.BF16,) * 3)
    assert models.experts_of(hf.convert(on_meta(file), checkpoint=file)).base.format == "bf16"
    assert not [warning for warning in recwarn if issubclass(warning.category, DecodedExperts)]


@pytest.mark.parametrize("dense", [Type.F32, Type.Q4_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_the_model_is_the_one_that_transformers_loads(dense, tmp_path):
    file, _ = write_gguf(tmp_path, (Type.Q8_0,) * 3, dense)
    theirs = models.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, config=config_of(file), dtype=torch.float32
    )
    assert_same(hf.convert(on_meta(file), checkpoint=file), theirs)


def test_shared_experts_and_tied_embeddings_are_read(tmp_path):
    plain = models.transformers.Qwen2MoeForCausalLM(
        models.transformers.Qwen2MoeConfig(
            **models.COMMON | {"num_hidden_layers": 2, "intermediate_size": 40, "moe_intermediate_size": 32},
            shared_expert_intermediate_size=48, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    file = gguf_files.write(tmp_path / "model.gguf", plain, dict.fromkeys(NAMES, Type.Q4_0))
    ours = hf.convert(on_meta(file), checkpoint=file)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert_same(ours, plain)


def test_the_changes_of_llama_cpp_s_converter_are_undone(tmp_path):
    """Qwen3.5: norms stored as w + 1, log(-x), heads in another order: by transformers' own tables."""
    config = models.transformers.Qwen3_5MoeForCausalLM.config_class(
        vocab_size=48, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=64, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4,
        num_experts_per_tok=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_conv_kernel_dim=4,
    )  # fmt: skip
    shapes = models.transformers.Qwen3_5MoeForCausalLM(config)
    file = gguf_files.qwen35(tmp_path / "model.gguf", shapes, Type.Q8_0)
    theirs = models.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    ).eval()
    ours = hf.convert(on_meta(file), checkpoint=file)
    assert models.experts_of(ours).base.format == "int8"
    assert_same(ours, theirs)


@pytest.mark.parametrize("types", [(Type.MXFP4,) * 3, (Type.Q4_1,) * 3], ids=lambda types: types[0].name)
@pytest.mark.filterwarnings("ignore::goldsmith.hf.checkpoint.source.DecodedExperts")
def test_gpt_oss_has_biases_and_sinks_and_needs_its_config_in_the_folder(types, tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    plain = models.model("gpt_oss", intermediate_size=32)
    file = gguf_files.write(tmp_path / "model.gguf", plain, dict(zip(NAMES, types)))
    with pytest.raises(ValueError, match="does not read the whole config of 'gpt-oss' .* put the model's config.json"):
        config_of(file)
    plain.config.save_pretrained(tmp_path)
    ours = hf.convert(on_meta(file), checkpoint=file)
    base, experts, spec = models.experts_of(ours).base, models.experts_of(plain), models.experts_of(ours).spec
    assert base.format == ("mxfp4" if types[0] == Type.MXFP4 else "fp32")
    gate_up, down = base.unpack()
    assert torch.equal(gate_up, spec.canonical_gate_up(experts.gate_up_proj))
    assert torch.equal(down, spec.canonical_down(experts.down_proj))
    assert torch.equal(base.gate_up_bias, spec.canonical_gate_up(experts.gate_up_proj_bias))
    assert torch.equal(base.down_bias, experts.down_proj_bias)
    kept, wanted = ours.state_dict(), plain.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in wanted.items() if ".experts." not in name)
    with from_pretrained(file, device="cpu") as offloaded:
        check_alike(offloaded.model, plain)


@pytest.mark.parametrize("types", [(Type.Q4_0,) * 3, (Type.Q4_1,) * 3, (Type.F16,) * 3], ids=lambda t: t[0].name)
def test_an_offloaded_model_gives_the_plain_logits(types, tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    file, plain = write_gguf(tmp_path / "model", types)
    with pytest.warns(DecodedExperts) if types[0] == Type.Q4_1 else nothing():
        ours = from_pretrained(file, device="cpu")
    with ours:
        assert ours.engine.store.exact and ours.engine.store.format == ("int4" if types[0] == Type.Q4_0 else "fp32")
        check_alike(ours.model, plain)


@pytest.mark.parametrize("types", [types for types, _ in KEPT], ids=["-".join(t.name for t in t) for t, _ in KEPT])
def test_a_sample_reads_three_rows_of_a_matrix_and_is_that_of_the_whole(types, tmp_path):
    write_gguf(tmp_path, types)
    model = on_meta(tmp_path)
    (path, module), *_ = experts_modules(model)
    weights = coded_experts(open_checkpoint(tmp_path, model).experts(path, spec_of(module)))
    samples, whole = list(weights.samples()), list(weights.whole())
    assert {len(matrix.codes) for one in samples for matrix in vars(one.expert).values()} == {3}
    assert [digest(one) for one in samples] == [digest(one) for one in whole]
    assert len({digest(one) for one in whole}) == weights.num_experts


def nothing():
    import contextlib

    return contextlib.nullcontext()


def test_a_split_file_is_read_whole(tmp_path):
    file, plain = write_gguf(tmp_path, (Type.Q4_0,) * 3, parts=3)
    assert [part.name for part in parts_of(file)] == [f"model-0000{k}-of-00003.gguf" for k in (1, 2, 3)]
    assert gguf_file(parts_of(file)[1]) == file == gguf_file(tmp_path)
    assert_same(hf.convert(on_meta(tmp_path), checkpoint=tmp_path), plain)
    parts_of(file)[1].unlink()
    with pytest.raises(ValueError, match="the part model-00002-of-00003.gguf of model-00001-of-00003.gguf is missing"):
        hf.convert(on_meta(file), checkpoint=file)


def test_a_config_next_to_the_file_comes_first(tmp_path):
    file, plain = write_gguf(tmp_path)
    plain.config.rms_norm_eps = 1e-3
    plain.config.save_pretrained(tmp_path)
    assert config_of(file).rms_norm_eps == config_of(tmp_path).rms_norm_eps == 1e-3


def test_split_files_and_folders_are_refused_or_left_to_the_other_readers(tmp_path):
    file, plain = write_gguf(tmp_path)
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(ValueError, match=r"holds several GGUF files .model.gguf, other.gguf.: give the path of one"):
        gguf_file(tmp_path)
    assert gguf_file(tmp_path / "other.gguf") == tmp_path / "other.gguf"
    (tmp_path / "model.safetensors").touch()
    assert gguf_file(tmp_path) is None and gguf_file(tmp_path / "missing.gguf") is None


def test_other_architectures_are_refused_by_name(tmp_path):
    """transformers takes Mixtral's "llama" for a dense model, and would drop the experts."""
    writer = gguf_files.gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_expert_count(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match="architecture 'llama' is not supported; .*: qwen2moe, qwen3moe, qwen35moe, gpt-oss"
    ):
        config_of(tmp_path)


def test_a_truncated_file_is_named_wherever_it_ends(tmp_path):
    file, _ = write_gguf(tmp_path, (Type.Q4_0,) * 3)
    whole = file.read_bytes()
    for end in [0, 3, 4, 20, 24, 30, 100, *range(200, len(whole), len(whole) // 40), len(whole) - 40]:
        file.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="not a whole GGUF file") as raised:
            check_header(file)
        assert "\n" not in str(raised.value)


def test_a_file_with_altered_bytes_in_its_header_ends_in_one_sentence_or_is_read(tmp_path):
    """Counts and lengths of any size: nothing hangs, nothing but a ValueError is raised."""
    file, _ = write_gguf(tmp_path, fields=[("add_array", "tokens", ["a", "b"]), ("add_array", "numbers", [1, 2, 3])])
    whole = bytearray(file.read_bytes())
    end = min(len(whole), 4000)
    generator = np.random.default_rng(0)
    for _ in range(400):
        spoilt = bytearray(whole)
        for place in generator.integers(0, end, generator.integers(1, 4)):
            spoilt[place] = generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.integers(256)])
        file.write_bytes(spoilt)
        try:
            check_header(file)
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("qwen3moe.block_count", 2**30, "says 1073741824 layers, but its tensors belong to 1"),
        ("qwen3moe.expert_count", 0, "says expert_count 0, expected a whole number of at least 1"),
        ("qwen3moe.attention.key_length", 0, "says attention.key_length 0, expected a whole number"),
    ],
)
def test_sizes_of_which_no_model_can_be_made_are_refused(key, value, message, tmp_path):
    file, _ = write_gguf(tmp_path)
    reader = gguf_files.gguf.GGUFReader(file, "r+")
    reader.get_field(key).parts[-1][0] = value
    reader.data.flush()
    with pytest.raises(ValueError, match=f"model.gguf: its metadata {message}"):
        config_of(file)


def test_a_tensor_without_elements_is_refused(tmp_path):
    file, _ = write_gguf(tmp_path)
    whole, name = bytearray(file.read_bytes()), b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name) + 4 + 8  # the number of dimensions and the first of them come before it
    whole[at : at + 8] = bytes(8)
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=r"model.gguf: blk.0.attn_q.weight is \[0, 32\]: it has no elements"):
        check_header(file)


def test_a_file_with_altered_metadata_gives_a_model_or_one_sentence(tmp_path):
    file, plain = write_gguf(tmp_path, (Type.Q4_0,) * 3)
    whole = bytearray(file.read_bytes())
    generator = np.random.default_rng(0)
    for _ in range(40):
        spoilt = bytearray(whole)
        spoilt[generator.integers(0, 900)] = generator.choice([0, 1, 0x7F, 0x80, 0xFF])
        file.write_bytes(spoilt)
        try:
            hf.convert(on_meta(file), checkpoint=file)
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q8_0, Type.Q6_K, Type.MXFP4], ids=lambda kind: kind.name)
def test_altered_scales_are_named(kind, tmp_path):
    file, _ = write_gguf(tmp_path, (kind,) * 3)
    reader = gguf_files.gguf.GGUFReader(file, "r+")
    data = next(t for t in reader.tensors if "ffn_up_exps" in t.name).data
    at = {Type.Q6_K: 208}.get(kind, 0)
    data[1, 0, at : at + 2] = 255  # NaN in float16, and in E8M0
    reader.data.flush()
    with pytest.raises(ValueError, match=r"model.gguf: layer 0: up of expert 1: a scale is (NaN|255)"):
        hf.convert(on_meta(file), checkpoint=file)


def test_a_missing_or_wrong_tensor_is_named(tmp_path):
    file, plain = write_gguf(tmp_path)
    config = config_of(file)
    config.moe_intermediate_size = 48
    with torch.device("meta"):
        other = models.transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match=r"blk.0.ffn_gate_exps.weight is \[5, 32, 32\], but the config says \[5, 48, 32\]"
    ):
        hf.convert(other, checkpoint=file)
    config.moe_intermediate_size, config.num_hidden_layers = 32, 2
    with torch.device("meta"):
        other = models.transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="blk.1.ffn_gate_exps.weight is missing"):
        hf.convert(other, checkpoint=file)


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(monkeypatch):
    """A list that grows by one with each table of names that the package gguf builds."""
    plain, calls = gguf_files.gguf.get_tensor_name_map, []
    monkeypatch.setattr(gguf_files.gguf, "get_tensor_name_map", lambda *args: calls.append(args) or plain(*args))
    return calls


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_names_are_those_of_transformers_from_one_table(family, tmp_path, tables):
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    model = models.model(family, **({} if family == "gpt_oss" else SMALL))
    file = gguf_files.write(tmp_path / "model.gguf", model)
    tables.clear()
    checkpoint = open_checkpoint(file, model)
    names = checkpoint.names
    assert len(tables) == 1
    known = get_gguf_hf_weights_map(model, checkpoint._processor)
    assert len(tables) == 1 + len(list(model.modules()))
    sinks = {f"{stored}.weight": name for stored, name in known.items() if name.endswith("sinks")}
    assert {stored: name for name, stored in names.items()} == {
        stored: name for stored, name in (known | sinks).items() if stored in names.values()
    }
    assert set(names) <= {name for name, _ in model.named_parameters()}


def test_names_that_only_a_module_below_knows_are_used(tmp_path):
    file, model = write_gguf(tmp_path)
    outer = torch.nn.Module()
    outer.config, outer.inner = model.config, model
    wanted = {f"inner.{name}": stored for name, stored in open_checkpoint(file, model).names.items()}
    assert open_checkpoint(file, outer).names == wanted
