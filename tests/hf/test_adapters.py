"""Adapters in stock peft's files: the layout, exact round trips, and other modules that peft trains."""

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf import goldens, models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.adapter import layout
from goldsmith.hf.adapter.fitting import fitted
from goldsmith.hf.experts_spec import experts_modules, spec_of

# peft 0.21.2 warns because it looks for the patterns' keys only among targeted modules; it still applies them
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORAS = [
    {"rank": 3},
    {"rank": 4, "shared_a": True},
    {"rank": 3, "rslora": True, "alpha": 5},
    {"rank": {"gate": 2, "up": 3, "down": 5}, "alpha": {"gate": 4, "up": 6, "down": 7}},
    {"rank": 2, "targets": ("down",)},
    {"rank": 2, "targets": ("gate",)},
    {"rank": 2, "targets": ("up", "down"), "alpha": 3},
    {"rank": 3, "targets": ("gate", "up")},
]


def converted(family="qwen3_moe", lora=None, **options):
    ours = hf.convert(models.model(family, **options), format="fp32", lora=lora)
    models.randomise(ours)
    return ours


def factors_of(model):
    return models.experts_of(model).lora.factors()


def stock(family, folder, **options):
    return models.peft.PeftModel.from_pretrained(models.model(family, **options), folder)


def merged_by_peft(model):
    """{parameter: W + s B A} of the first wrapped experts of a peft model."""
    wrappers = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    return {w.parameter_name: w.get_param() + w.get_delta_weight("default") for w in wrappers}


def merged_by_us(model):
    """The same for a converted model, in the layout of the plain one."""
    module = models.experts_of(model)
    gate_up, down = module.lora.merge_into(*module.base.unpack())
    if module.spec.interleaved:
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    turned = (lambda w: w.mT) if module.spec.transposed else (lambda w: w)
    return {"gate_up_proj": turned(gate_up), "down_proj": turned(down)}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(a, b) for k in one for a, b in zip(one[k], other[k]))


# -- the layout ----------------------------------------------------------------------------------------


def test_peft_s_order_is_expert_major_in_a_and_rank_major_in_b():
    a, b = torch.arange(12.0).view(2, 3, 2), torch.arange(24.0).view(2, 4, 3)
    flat_a, flat_b = layout.to_peft(a, b)
    for e in range(2):
        for r in range(3):
            assert torch.equal(flat_a[e * 3 + r], a[e, r]) and torch.equal(flat_b[:, r * 2 + e], b[e, :, r])
    assert same({"x": (a, b)}, {"x": layout.from_peft(flat_a, flat_b, 2)})


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_stock_peft_adapter_loads_with_the_weights_that_peft_merges(family, tmp_path):
    theirs = models.with_peft(models.model(family), rank=3, alpha=5)
    theirs.save_pretrained(tmp_path)
    ours = hf.convert(models.model(family), format="fp32")
    hf.load_adapter(ours, tmp_path)
    lora = models.experts_of(ours).lora
    assert lora.shared_a and lora.up_a is lora.gate_a
    wanted = merged_by_peft(theirs)
    assert all(torch.equal(merged_by_us(ours)[name], wanted[name]) for name in wanted)
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
        n for n, _ in ours.named_parameters() if ".lora." in n
    }


@pytest.mark.parametrize("lora", LORAS, ids=str)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_stock_peft_merges_our_files_to_the_same_bits_and_we_read_them_back(family, lora, tmp_path):
    ours = converted(family, lora)
    hf.save_adapter(ours, tmp_path)
    theirs = merged_by_peft(stock(family, tmp_path))
    wanted = merged_by_us(ours)
    assert {name for name, w in wanted.items() if not torch.equal(w, base_of(ours)[name])} == set(theirs)
    assert all(torch.equal(theirs[name], wanted[name]) for name in theirs)
    for again in (converted(family, lora), hf.convert(models.model(family), format="fp32")):
        hf.load_adapter(again, tmp_path)
        assert same(factors_of(again), factors_of(ours))
        assert models.experts_of(again).lora.scaling == models.experts_of(ours).lora.scaling
        assert models.experts_of(again).lora.shared_a == models.experts_of(ours).lora.shared_a


def base_of(model):
    module = models.experts_of(model)
    kept, module.lora = module.lora, None
    gate_up, down = module.base.unpack()
    module.lora = kept
    if module.spec.interleaved:
        gate_up = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)
    return {
        "gate_up_proj": gate_up.mT if module.spec.transposed else gate_up,
        "down_proj": down.mT if module.spec.transposed else down,
    }


def test_different_scalings_of_gate_and_up_are_written_as_one(tmp_path):
    ours = converted(lora={"rank": 2, "alpha": {"gate": 2, "up": 8, "down": 2}})
    hf.save_adapter(ours, tmp_path)
    wanted = merged_by_us(ours)
    assert all(torch.equal(w, wanted[name]) for name, w in merged_by_peft(stock("qwen3_moe", tmp_path)).items())
    again = hf.load_adapter(hf.convert(models.model("qwen3_moe"), format="fp32"), tmp_path)
    assert models.experts_of(again).lora.scaling == {"gate": 1.0, "up": 1.0, "down": 1.0}
    assert all(torch.equal(w, wanted[name]) for name, w in merged_by_us(again).items())


@pytest.mark.parametrize("alpha", [{"gate": 0, "up": 2, "down": 2}, {"gate": 2, "up": 0, "down": 0}, 0], ids=str)
def test_a_target_scaled_by_0_is_written_and_adds_nothing(alpha, tmp_path):
    ours = converted(lora={"rank": 2, "alpha": alpha})
    hf.save_adapter(ours, tmp_path)
    wanted = merged_by_us(ours)
    assert all(torch.equal(w, wanted[name]) for name, w in merged_by_peft(stock("qwen3_moe", tmp_path)).items())
    again = hf.load_adapter(hf.convert(models.model("qwen3_moe"), format="fp32"), tmp_path)
    assert all(torch.equal(w, wanted[name]) for name, w in merged_by_us(again).items())


def test_our_adapter_trained_further_by_stock_peft_is_read_unchanged(tmp_path):
    """Its B is full: the zeros of separate gate and up are gone, so both share all of A."""
    hf.save_adapter(converted(lora={"rank": 2}), tmp_path)
    theirs = stock("qwen3_moe", tmp_path)
    models.randomise(theirs, seed=9)
    tensors = {n.replace(".default", ""): p.detach() for n, p in theirs.named_parameters() if "lora_" in n}
    with_our_metadata = models_metadata(tmp_path)
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / WEIGHTS, with_our_metadata)
    ours = hf.load_adapter(converted(lora={"rank": 2}), tmp_path)
    assert models.experts_of(ours).lora.rank == {"gate": 4, "up": 4, "down": 2}
    assert all(torch.equal(w, merged_by_us(ours)[name]) for name, w in merged_by_peft(theirs).items())


def models_metadata(folder):
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "pt") as file:
        return file.metadata()


def test_a_lora_of_the_same_kind_is_written_in_place_and_another_replaced(tmp_path):
    hf.save_adapter(converted(lora={"rank": 2}), tmp_path)
    ours = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 2, "dropout": 0.25})
    gate_a = models.experts_of(ours).lora.gate_a
    hf.load_adapter(ours, tmp_path)
    assert models.experts_of(ours).lora.gate_a is gate_a and models.experts_of(ours).lora.dropout == 0.25
    other = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 5, "dropout": 0.25})
    hf.load_adapter(other, tmp_path)
    assert models.experts_of(other).lora.rank["gate"] == 2 and models.experts_of(other).lora.dropout == 0.25


def test_layers_without_lora_are_left_out_by_name(tmp_path):
    ours = converted("mixtral", {"rank": 2}, num_hidden_layers=3)
    ours.model.layers[1].mlp.experts.lora = None
    hf.save_adapter(ours, tmp_path)
    theirs = stock("mixtral", tmp_path, num_hidden_layers=3)
    wrapped = {n.partition(".mlp")[0] for n, m in theirs.named_modules() if type(m).__name__ == "ParamWrapper"}
    assert wrapped == {f"base_model.model.model.layers.{i}" for i in (0, 2)}
    goldens.check_alike(ours, theirs)
    again = hf.load_adapter(hf.convert(models.model("mixtral", num_hidden_layers=3), format="fp32"), tmp_path)
    assert torch.equal(again(models.tokens()).logits, ours(models.tokens()).logits)


# -- together with peft's own LoRA -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 3}}], ids=str)
def test_attention_by_peft_and_experts_by_us_form_one_adapter(options, tmp_path):
    config = models.peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=8, **options)
    ours = models.peft.get_peft_model(models.model("qwen3_moe"), config)
    hf.convert(ours, format="fp32", lora={"rank": 3})
    models.randomise(ours)
    trained = hf.trainable_report(ours)["trained_parameters"]
    assert trained["attention_lora"] and trained["expert_lora"] and not trained["other"]
    hf.save_adapter(ours, tmp_path)
    theirs = stock("qwen3_moe", tmp_path)
    goldens.check_alike(ours, theirs)
    assert not any(torch.equal(theirs(models.tokens()).logits, m(models.tokens()).logits) for m in without_a_part(ours))
    again = hf.convert(models.model("qwen3_moe"), format="fp32", lora={"rank": 3})
    hf.load_adapter(again, tmp_path)
    assert torch.equal(again(models.tokens()).logits, ours(models.tokens()).logits)
    assert hf.trainable_report(again)["trained_parameters"] == trained
    hf.save_adapter(again, tmp_path / "again")
    kept, now = (load_file(folder / WEIGHTS) for folder in (tmp_path, tmp_path / "again"))
    assert kept.keys() == now.keys() and all(torch.equal(kept[n], now[n]) for n in kept)


def without_a_part(model):
    """The model with one of the two parts of its adapter switched off."""
    import copy

    for part in ("lora_B", "lora.gate_b"):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if part in name:
                    parameter.zero_()
        yield other


# -- files -----------------------------------------------------------------------------------------------


def test_the_config_describes_the_file_and_sets_dropout_to_0(tmp_path):
    hf.save_adapter(converted(lora={"rank": 3, "alpha": 6, "dropout": 0.5}), tmp_path / "a" / "b")
    config = json.loads((tmp_path / "a" / "b" / CONFIG).read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (6, 12, 0.0)
    assert config["rank_pattern"] == {"mlp.experts.down_proj": 3}
    assert config["alpha_pattern"] == {"mlp.experts.down_proj": 6}
    assert config["task_type"] == "CAUSAL_LM" and config["peft_type"] == "LORA"
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_files_whole(call, tmp_path, monkeypatch):
    ours = converted(lora={"rank": 2})
    hf.save_adapter(ours, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"os.{call}", full)
    models.randomise(ours, seed=7)
    with pytest.raises(OSError, match="No space left"):
        hf.save_adapter(ours, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_new_files_get_the_umask_s_mode_and_replaced_files_keep_theirs(tmp_path):
    def modes():
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

    before = os.umask(0o077)
    try:
        hf.save_adapter(converted(lora={"rank": 2}), tmp_path)
        assert modes() == {CONFIG: 0o600, WEIGHTS: 0o600}
        (tmp_path / CONFIG).chmod(0o640)
        hf.save_adapter(converted(lora={"rank": 2}), tmp_path)
        assert modes() == {CONFIG: 0o640, WEIGHTS: 0o600}
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_folder_with_a_file_s_name_is_refused_before_writing(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=rf"save_adapter: the path is a folder, not a file; nothing was written.*{name}"):
        hf.save_adapter(converted(lora={"rank": 2}), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def broken(change):
    """A function that spoils the files of an adapter."""

    def spoil(folder):
        change(folder)

    return spoil


def tensors(folder, change):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / WEIGHTS)


def doubled(weights):
    """As for twice as many experts."""
    weights.update({name: torch.cat((t, t), 0 if "lora_A" in name else 1) for name, t in weights.items()})


def metadata(folder, value):
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, value)


def config(folder, **changes):
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(content))


A = "base_model.model.model.layers.1.mlp.experts.lora_A.weight"


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: (f / CONFIG).unlink(), "has no adapter_config.json, so it is not the folder of a peft adapter"),
        (lambda f: (f / WEIGHTS).unlink(), "has no adapter_model.safetensors"),
        (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json: not JSON"),
        (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "not a whole safetensors file"),
        (lambda f: config(f, peft_type="IA3"), "peft_type is 'IA3'; experts support only 'LORA'"),
        (lambda f: config(f, use_dora=True), "use_dora is set"),
        (lambda f: (f / CONFIG).write_text("[1]"), "holds a list, expected a JSON object"),
        (lambda f: config(f, lora_alpha=None), "lora_alpha is None, expected a number"),
        (lambda f: config(f, r=0), "r is 0, expected a number above 0"),
        (lambda f: config(f, rank_pattern=[1]), r"rank_pattern is \[1\], expected a number for each name"),
        (lambda f: config(f, alpha_pattern={"(": 3}), r"alpha_pattern has the invalid pattern '\('"),
        (lambda f: config(f, target_parameters="mlp"), "target_parameters is 'mlp', expected a list of names"),
        (lambda f: config(f, target_modules="(("), r"target_modules has the invalid pattern '\(\('"),
        (lambda f: config(f, target_modules=3), "target_modules is 3, expected a list of names or a pattern"),
        (lambda f: config(f, modules_to_save=3), "modules_to_save is 3, expected a list of names"),
        (lambda f: tensors(f, lambda t: t.update({A: t[A] * torch.nan})), "lora_A.weight has NaN or Inf in it"),
        (lambda f: tensors(f, lambda t: t.update({A: t[A].int()})), "lora_A.weight has the dtype int32"),
        (lambda f: tensors(f, lambda t: t.update({A: t[A].to(torch.float8_e4m3fn)})), "has the dtype float8_e4m3fn"),
        (lambda f: tensors(f, lambda t: t.update({A: t[A][0, 0]})), r"lora_A.weight \[\] .* for other experts"),
        (lambda f: tensors(f, doubled), "has rank 8 with 5 experts, but .* says rank 4; the adapter may be for"),
        (lambda f: metadata(f, {"goldsmith.ranks": '{"a": 3}'}), "metadata entry goldsmith.ranks is damaged"),
        (lambda f: tensors(f, lambda t: t.pop(A)), "belong together, but one is missing"),
        (lambda f: tensors(f, lambda t: t.update({A: t[A][:, :5]})), r"lora_A.weight \[10, 5\] .* other experts"),
        (lambda f: tensors(f, lambda t: t.update({A: t[A][:7]})), r"\[7, 24\].* expected \[r\*5, 24\] and \[32, r"),
        (lambda f: tensors(f, lambda t: t.update({A.replace("1", "7"): t.pop(A)})), "lora_A.*one is missing"),
        (lambda f: tensors(f, lambda t: t.update({A.replace("1", "7"): t[A] + 1})), "layers.7.* has no place in"),
        (lambda f: tensors(f, dict.clear), "has no tensors for this model's experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_unreadable_adapter_is_reported_and_the_model_stays(spoil, message, tmp_path):
    hf.save_adapter(converted(lora={"rank": 2}), tmp_path)
    spoil(tmp_path)
    ours = converted(lora={"rank": 3})
    before = {k: (a.clone(), b.clone()) for k, (a, b) in factors_of(ours).items()}
    with pytest.raises(ValueError, match=message):
        hf.load_adapter(ours, tmp_path)
    assert same(factors_of(ours), before)


@pytest.mark.parametrize("value", ["((", 3, {"x": {}}], ids=repr)
def test_a_wrong_value_in_an_adapters_config_is_one_sentence_with_the_files_name(value, tmp_path):
    """Whatever class peft raises for it."""
    options = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"], "r": 2}
    plain = models.model("qwen3_moe")
    models.peft.get_peft_model(models.model("qwen3_moe"), models.peft.LoraConfig(**options)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / CONFIG).read_text())
    refused = 0
    for key in content:
        (tmp_path / CONFIG).write_text(json.dumps(content | {key: value}))
        try:
            fitted(plain, {path: spec_of(module) for path, module in experts_modules(plain)}, tmp_path, "test")
        except ValueError as error:
            refused += 1
            assert str(tmp_path) in str(error) and "\n" not in str(error)
    assert refused > 5


def test_only_a_converted_model_with_lora_has_an_adapter(tmp_path):
    with pytest.raises(ValueError, match="no experts of this model are converted: .*PeftModel.from_pretrained"):
        hf.load_adapter(models.model("mixtral"), tmp_path)
    with pytest.raises(ValueError, match="no experts of this model have a LoRA; convert it with lora"):
        hf.save_adapter(hf.convert(models.model("mixtral")), tmp_path)
