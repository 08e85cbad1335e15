"""`goldsmith generate` and `finetune` on quantised folders and GGUF files: the plain text, or one sentence."""

import json

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from cli.finetune_tools import VERSE, tiny_tokenizer
from goldsmith.cli import app
from goldsmith.hf.offload.generation import tokenizer_of
from hf import checkpoints, gguf_files, models
from hf.gguf_files import Type
from offload.whole_models import assert_same_ids

STEPS, PROMPT = 6, "the thigh"
SIZES = {"vocab_size": 272, "max_position_embeddings": 256, "moe_intermediate_size": 32, "mlp_only_layers": []}
NAMES = ("gate", "up", "down")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def gguf_model(path, kind, **options):
    """(path, the plain model): a GGUF file with its tokenizer inside."""
    plain = models.model("qwen3_moe", **SIZES, num_hidden_layers=1, norm_topk_prob=True)
    fields = gguf_files.byte_tokenizer()
    return gguf_files.write(path, plain, dict.fromkeys(NAMES, kind), fields=fields, **options), plain


def gptq_model(folder):
    _, plain = checkpoints.quantised(folder, "gptq", "qwen3_moe", **SIZES)
    tiny_tokenizer().save_pretrained(folder)
    return folder, plain


def generated(place, *words):
    done = run("generate", place, "--prompt", PROMPT, "--device", "cpu", "--max-new-tokens", STEPS, "--json", *words)
    assert done.exit_code == 0, done.stderr
    (output,) = json.loads(done.stdout)["outputs"]
    return output["tokens"], done.stderr


def check_text(place, plain, *words):
    """The tokens are the plain model's, as far as they go: a row may end early. Returns what was told."""
    tokens, notes = generated(place, *words)
    ids = torch.tensor([tokenizer_of(place)(PROMPT)["input_ids"]])
    assert_same_ids(plain, torch.cat((ids, torch.tensor([tokens])), 1), ids, steps=len(tokens))
    return notes


def train(place, folder, *words):
    (folder / "verse.txt").write_text(VERSE)
    sizes = ["--steps", 2, "--seq-len", 64, "--batch-size", 1, "--threads", 1]
    return run("finetune", place, "--data", folder / "verse.txt", "--output", folder / "out", *sizes, *words)


def test_a_gptq_folder_generates_the_plain_text_and_is_trained(tmp_path):
    folder, plain = gptq_model(tmp_path / "model")
    check_text(folder, plain)
    done = train(folder, tmp_path)
    assert done.exit_code == 0, done.output
    assert "experts, int4" in done.output
    assert any(value.any() for value in load_file(tmp_path / "out" / "adapter_model.safetensors").values())


def test_a_gguf_file_generates_the_plain_text_and_is_trained(tmp_path):
    file, plain = gguf_model(tmp_path / "model" / "m.gguf", Type.Q4_0)
    check_text(file, plain)
    check_text(file.parent, plain)
    done = train(file, tmp_path)
    assert done.exit_code == 0, done.output
    assert "experts, int4" in done.output
    again = train(file, tmp_path)
    assert again.exit_code == 0 and "trained" in again.output


def test_experts_that_are_decoded_are_announced_on_the_terminal(tmp_path):
    file, plain = gguf_model(tmp_path / "model" / "m.gguf", Type.Q4_1)
    wanted = "no format of goldsmith holds the codes of its experts (GGUF: Q4_1: "
    assert wanted in " ".join(check_text(file, plain).split())
    done = train(file, tmp_path, "--dry-run")
    assert done.exit_code == 0 and wanted in " ".join(done.output.split()) and "experts, fp32" in done.output


def test_a_gguf_file_uses_a_tokenizer_in_its_folder(tmp_path):
    file, plain = gguf_model(tmp_path / "model" / "m.gguf", Type.Q8_0)
    tiny_tokenizer().save_pretrained(file.parent)
    assert tokenizer_of(file).get_vocab() == AutoTokenizer.from_pretrained(file.parent).get_vocab()
    check_text(file, plain)


def test_the_content_of_a_gguf_file_is_part_of_a_run(tmp_path):
    file, _ = gguf_model(tmp_path / "model" / "m.gguf", Type.Q4_0)
    assert train(file, tmp_path).exit_code == 0
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = train(file, tmp_path)
    assert done.exit_code == 2 and "the content of MODEL has changed" in " ".join(done.output.split())


def damaged(path, which):
    file, _ = gguf_model(path, Type.Q4_0)
    data = file.read_bytes()
    if which == "cut":
        file.write_bytes(data[: len(data) * 2 // 3])
    elif which == "header":
        file.write_bytes(data[:900])
    elif which == "not one":
        file.write_bytes(b"PK" + data[2:])
    return file


@pytest.mark.parametrize(
    "which, message",
    [
        ("cut", "not a whole GGUF file: "),
        ("header", "not a whole GGUF file: it ends inside its header"),
        ("not one", "not a GGUF file: it does not begin with the letters GGUF"),
    ],
)
def test_a_damaged_gguf_file_is_one_sentence_and_nothing_is_written(which, message, tmp_path):
    file = damaged(tmp_path / "model" / "m.gguf", which)
    for done in (run("generate", file, "--prompt", PROMPT, "--device", "cpu"), train(file, tmp_path)):
        text = " ".join(done.output.split())
        assert done.exit_code == 2 and message in text and "Traceback" not in text, text
    assert not (tmp_path / "out").exists() and not list((tmp_path / "cache").rglob("*.store"))


def test_a_gguf_file_without_a_tokenizer_says_so(tmp_path):
    plain = models.model("qwen3_moe", **SIZES, num_hidden_layers=1)
    file = gguf_files.write(tmp_path / "m.gguf", plain)
    done = run("generate", file, "--prompt", PROMPT, "--device", "cpu")
    text = " ".join(done.output.split())
    assert done.exit_code == 2 and "has no tokenizer in its metadata: put the model's tokenizer.json beside it" in text


def test_another_quantisation_is_refused_by_name_and_nothing_is_written(tmp_path):
    folder, _ = gptq_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps(config))
    for done in (run("generate", folder, "--prompt", PROMPT, "--device", "cpu"), train(folder, tmp_path)):
        text = " ".join(done.output.split())
        assert done.exit_code == 2 and "quantised with 'hqq'; supported are compressed-tensors, gptq" in text, text
    assert not (tmp_path / "out").exists()
