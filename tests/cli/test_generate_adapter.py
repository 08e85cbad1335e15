"""`goldsmith generate --adapter`: stock peft's text, several adapters by name, and adapters that do not fit."""

import json

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from cli.finetune_tools import saved_model
from goldsmith.cli import app
from goldsmith.hf.offload import generation
from hf.models import randomise
from offload.whole_models import assert_same_ids

STEPS = 8
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("generate") / "model")


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory):
    """Folders of adapters that stock peft wrote: one on experts and attention, one on the experts alone."""
    place, folders = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, modules) in enumerate({"both": ["q_proj", "o_proj"], "experts": []}.items()):
        config = LoraConfig(target_parameters=EXPERTS, target_modules=modules, r=3 + seed, lora_alpha=7)
        theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
        randomise(theirs, seed)
        theirs.save_pretrained(place / name)
        folders[name] = place / name
    return folders


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "generate-cache"))


def run(*words):
    fixed = ["--device", "cpu", "--max-new-tokens", str(STEPS)]
    return CliRunner().invoke(app, ["generate", *fixed, *map(str, words)])


def peft_text_is(model, folder, prompt, tokens):
    """Asserts that these are the tokens of stock peft, up to ties."""
    theirs = AutoModelForCausalLM.from_pretrained(model)
    if folder is not None:
        theirs = PeftModel.from_pretrained(theirs, folder).merge_and_unload()
    theirs.set_experts_implementation("eager")
    ids = generation.tokenizer_of(model)(prompt, return_tensors="pt").input_ids
    assert_same_ids(theirs.eval(), torch.cat((ids, torch.tensor([tokens])), 1), ids, steps=STEPS)


def outputs_of(model, *words):
    done = run(model, "--prompt", "the sea", "--json", *words)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)["outputs"]


def test_the_text_is_stock_pefts(model, adapters):
    (plain,) = outputs_of(model)
    assert "adapter" not in plain
    for name, folder in adapters.items():
        (output,) = outputs_of(model, "--adapter", folder)
        assert output["adapter"] == name and output["tokens"] != plain["tokens"]
        peft_text_is(model, folder, "the sea", output["tokens"])


def test_several_adapters_answer_in_turn_under_their_names(model, adapters):
    words = ["--adapter", f"first={adapters['experts']}", "--adapter", adapters["both"]]
    outputs = outputs_of(model, *words)
    assert [output["adapter"] for output in outputs] == ["first", "both"]
    alone = [outputs_of(model, "--adapter", adapters[name])[0]["tokens"] for name in ("experts", "both")]
    assert [output["tokens"] for output in outputs] == alone
    done = run(model, "--prompt", "the sea", *words)
    assert done.exit_code == 0
    assert done.stdout == "".join(f"=== {output['adapter']}\n{output['text']}\n" for output in outputs)


def changed(folder, to, *, config=None, tensors=None):
    """A copy of an adapter with changes to its config and tensors."""
    to.mkdir()
    settings = json.loads((folder / CONFIG).read_text())
    (to / CONFIG).write_text(json.dumps(settings | (config or {})))
    weights = load_file(folder / WEIGHTS)
    save_file(weights if tensors is None else tensors(weights), to / WEIGHTS)
    return to


def transposed(tensors):
    return {name: tensor.T.contiguous() for name, tensor in tensors.items()}


def renamed(tensors):
    return {name.replace(".mlp.", ".block_sparse_moe."): tensor for name, tensor in tensors.items()}


def of_other_experts(tensors):
    return {name: tensor[..., : tensor.shape[-1] // 2].contiguous() for name, tensor in tensors.items()}


@pytest.mark.parametrize("change, text", [
    ({"config": {"r": 5}}, "has rank 4 with"),
    ({"tensors": transposed}, "are for other experts; expected [r*"),
    ({"tensors": renamed}, "has no place in this model"),
    ({"tensors": of_other_experts}, "are for other experts; expected [r*"),
    ({"config": {"target_parameters": ["block_sparse_moe.experts.w1"]}}, "which matches no parameter of this model"),
    ({"config": {"peft_type": "IA3"}}, "peft_type is 'IA3'"),
    ({"tensors": lambda tensors: dict(list(tensors.items())[:3])}, "belong together, but one is missing"),
    ({"tensors": lambda tensors: {name: t * float("nan") for name, t in tensors.items()}}, "expected finite floats"),
], ids=["rank", "transposed", "names", "sizes", "parameters", "kind", "truncated", "nan"])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_in_one_paragraph(model, adapters, tmp_path, monkeypatch, change, text):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    folder = changed(adapters["experts"], tmp_path / "wrong", **change)
    done = run(model, "--prompt", "the sea", "--adapter", folder)
    message = " ".join(done.stderr.split())
    assert done.exit_code == 2 and text in message and f"--adapter {folder}: " in message, done.stderr
    assert not done.stdout and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("cache/**/*.store"))


@pytest.mark.parametrize("words, text", [
    (["--adapter", "/nowhere/at/all"], "there is no folder '/nowhere/at/all' with an adapter"),
    (["--adapter", "=x"], "--adapter '=x' is not an adapter: give FOLDER or NAME=FOLDER"),
    (["--adapter", "a=/x", "--adapter", "a=/y"], "Two adapters are called a"),
], ids=["missing", "empty", "twice"])  # fmt: skip
def test_an_option_that_names_no_adapter_is_refused(model, words, text):
    done = run(model, "--prompt", "the sea", *words)
    assert done.exit_code == 2 and text in " ".join(done.stderr.split()), done.stderr


def test_a_models_folder_is_no_adapter(model):
    done = run(model, "--prompt", "the sea", "--adapter", model)
    assert done.exit_code == 2 and "has no adapter_config.json" in " ".join(done.stderr.split())
