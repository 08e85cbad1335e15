"""`goldsmith merge` and `goldsmith adapter`: output, JSON, exit statuses, and refusals that write nothing."""

import importlib.util
import json

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cli.finetune_tools import saved_model
from goldsmith.cli import app
from hf import models

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("merge")
    base = saved_model(place / "model", **SIZES)
    models.with_peft(AutoModelForCausalLM.from_pretrained(base), rank=3, alpha=7).save_pretrained(place / "adapter")
    return base, place / "adapter"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "merge-cache"))


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def words_of(text):
    return " ".join(text.split())


def test_the_merged_model_generates_the_text_of_the_adapter(folders, tmp_path):
    base, adapter = folders
    done = run("merge", base, adapter, "--output", tmp_path / "out")
    assert done.exit_code == 0 and "survive" not in done.stderr, done.stderr
    assert "in the base's own format" in words_of(done.stdout)
    assert "of its change arrives" in done.stdout and str(tmp_path / "out") in done.stdout
    options = ("--device", "cpu", "--max-new-tokens", 6, "--prompt", "the sea", "--json")
    texts = [
        json.loads(run("generate", *words, *options).stdout)["outputs"][0]["tokens"]
        for words in ((tmp_path / "out",), (base, "--adapter", adapter))
    ]
    assert texts[0] == texts[1]


def test_a_format_that_loses_the_adapter_warns_and_offers_to_keep_it_apart(folders, tmp_path):
    base, adapter = folders
    assert run("merge", base, adapter, "--output", tmp_path / "coded", "--format", "int4").exit_code == 0
    small = tmp_path / "small"
    small.mkdir()
    (small / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / WEIGHTS)
    save_file({n: t * 1e-3 if "lora_B" in n else t for n, t in weights.items()}, small / WEIGHTS)
    done = run("merge", tmp_path / "coded", small, "--output", tmp_path / "lost", "--json")
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert result["format"] == "int4" and result["along"] < 0.9 and result["worst_layer"]["layer"]
    text = words_of(done.stderr)
    assert max(map(len, done.stderr.splitlines())) <= 100 + len(str(tmp_path)), "the paragraph is not folded"
    assert "(below 90 %)" in text and f"goldsmith generate {tmp_path / 'coded'} --adapter {small}" in text


@pytest.mark.parametrize("command", [("merge", "--output"), ("adapter", "export", "--output"), ("adapter", "check")])
def test_an_adapter_of_another_model_is_refused_and_nothing_is_written(folders, tmp_path, command):
    other = saved_model(tmp_path / "other")
    models.with_peft(AutoModelForCausalLM.from_pretrained(other), rank=3).save_pretrained(tmp_path / "adapter")
    output = ["--output", tmp_path / "out"] if command[-1] == "--output" else []
    done = run(*(word for word in command if word != "--output"), folders[0], tmp_path / "adapter", *output)
    text = words_of(done.stderr)
    assert done.exit_code == 2 and f"ADAPTER {tmp_path / 'adapter'}: " in text and "are for other experts" in text
    assert not done.stdout and sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "other"]


def test_an_output_that_exists_is_refused(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    done = run("merge", *folders, "--output", tmp_path / "out")
    assert done.exit_code == 2 and "exists and is not an empty folder" in words_of(done.stderr)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes"]


def test_the_check_has_a_row_for_each_runtime_and_its_exit_status_says_whether_all_apply_it(folders):
    done = run("adapter", "check", *folders, "--runtime", "ours", "--runtime", "merged")
    assert done.exit_code == 0, done.stderr
    assert "ours" in done.stdout and "applies the adapter" in done.stdout
    done = run("adapter", "check", *folders, "--runtime", "merged", "--merged", folders[0], "--json")
    result = json.loads(done.stdout)
    assert done.exit_code == 1 and not result["ok"] and result["runtimes"][0]["verdict"] == "dropped"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_a_check_in_which_no_runtime_ran_does_not_pass(folders):
    done = run("adapter", "check", *folders, "--runtime", "vllm")
    assert done.exit_code == 2 and "Nothing was checked: vllm is not installed here." in words_of(done.stderr)


@pytest.mark.parametrize("words, text", [
    (["--runtime", "llama.cpp"], "--runtime 'llama.cpp' is unknown"),
    (["--text", "/nowhere.txt"], "--text /nowhere.txt cannot be read"),
    (["--merged", "/nowhere"], "--merged /nowhere is not the folder of a model"),
], ids=["runtime", "text", "merged"])  # fmt: skip
def test_wrong_options_of_the_check_are_refused(folders, words, text):
    done = run("adapter", "check", *folders, *words)
    assert done.exit_code == 2 and text in words_of(done.stderr)


def test_an_exported_adapter_has_a_pair_for_each_expert(folders, tmp_path):
    done = run("adapter", "export", *folders, "--output", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    names = load_file(tmp_path / "out" / WEIGHTS)
    assert json.loads(done.stdout)["tensors"] == len(names) == 2 * 4 * 3 * 2
    assert any(".experts.3.gate_proj.lora_A.weight" in name for name in names)
