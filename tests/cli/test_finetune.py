"""`goldsmith finetune`: from a text to an adapter that stock peft loads, however the way there is interrupted."""

import copy
import json
import os
import re
import shutil
import signal
import time

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import huggingface_hub
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cli.finetune_tools import VERSE, saved_model, saved_place, tiny_model
from goldsmith.cli import app
from goldsmith.cli.finetune.display import FinetuneDisplay
from goldsmith.core import native
from goldsmith.hf import convert, load_adapter
from goldsmith.hf.training.data.attention_masks import masks, no_masks
from goldsmith.hf.training.data.documents import cut, read
from goldsmith.hf.training.data.packing import RowStream
from goldsmith.hf.training.model import accounting
from goldsmith.hf.training.records.journal import rows
from goldsmith.hf.training.run.loss import summed_loss
from goldsmith.hf.training.run.trainer import Trainer
from hf import goldens, models

STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and two texts."""
    folder = saved_place(tmp_path_factory.mktemp("finetune"))
    (folder / "held.txt").write_text(VERSE.upper())
    return folder


def command(place, output, *more):
    """The words of a small run."""
    words = ["finetune", place / "model", "--data", place / "verse.txt", "--output", output, "--lr", "0.01"]
    words += ["--seq-len", "128", "--batch-size", "2", "--save-every", "2", "--dropout", "0.1", "--threads", "1"]
    words += [] if "--steps" in more or "--epochs" in more else ["--steps", STEPS]
    return [str(word) for word in [*words, *more]]


def run(*words):
    return CliRunner().invoke(app, list(words))


def finished(place, output, *more):
    result = run(*command(place, output, *more))
    assert result.exit_code == 0, result.output
    return result


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(place):
    """A run that nobody disturbs."""
    finished(place, place / "whole")
    return place / "whole"


def held_out_loss(model, place, apart=no_masks):
    """As the run has it, in its batches of two."""
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    documents = cut(read(place / "held.txt", tokenizer), 128).documents
    stream, loss = RowStream(documents, 128, packed=True, seed=0), 0.0
    with torch.no_grad():
        for first in range(0, len(stream), 2):
            loss += float(summed_loss(model.eval(), stream.batch(first, min(2, len(stream) - first)), apart))
    return loss / sum(d.targets for d in documents)


def plain_model(place):
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model


def test_the_loss_falls_and_stock_peft_reads_the_adapter(place, tmp_path):
    more = (
        "--lora-modules",
        "q_proj,v_proj",
        "--train-router",
        "--eval-data",
        str(place / "held.txt"),
        "--grad-accum",
        "2",
    )
    result = finished(place, tmp_path, *more, "--json", "--steps", "12")
    content = json.loads(result.stdout)
    assert content["status"] == "trained" and content["loss"]["last"] < content["loss"]["first"] - 0.1
    logged = rows(tmp_path / "log.jsonl")
    assert [row["step"] for row in logged if "loss" in row] == list(range(1, 13))
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "seconds"} == logged[1].keys()
    record = json.loads((tmp_path / "run.json").read_text())
    trained = record["trained_parameters"]
    assert trained["total"] == trained["expert_lora"] + trained["attention_lora"] + trained["router"]
    assert trained["router"] == 2 * 4 * 32 and record["options"]["lora_modules"] == ["q_proj", "v_proj"]
    assert content["eval_loss"]["first"] == held_out_loss(convert(plain_model(place)), place)
    ours = load_adapter(convert(plain_model(place)), tmp_path)
    assert content["eval_loss"]["last"] == held_out_loss(ours, place)
    peft = PeftModel.from_pretrained(plain_model(place), tmp_path)
    goldens.check_alike(ours, peft)
    ids = torch.tensor([[5, 6, 7]])
    assert peft.generate(input_ids=ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 6)


def test_gpt_oss_with_its_biases_and_masks_is_trained(place, tmp_path):
    folder = tmp_path / "model"
    model = models.model(
        "gpt_oss", vocab_size=264, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(place / "model").save_pretrained(folder)
    words = command(place, tmp_path / "out", "--eval-data", place / "held.txt", "--json")
    words[1] = str(folder)
    result = run(*words)
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["loss"]["last"] < content["loss"]["first"]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.set_experts_implementation("eager")
    ours = load_adapter(convert(copy.deepcopy(plain)), tmp_path / "out")
    assert content["eval_loss"]["last"] == held_out_loss(ours, place, masks(ours))
    peft = PeftModel.from_pretrained(plain, tmp_path / "out")
    goldens.check_alike(ours, peft)


@pytest.mark.forks
def test_after_kill_9_in_the_middle_of_a_step_the_same_command_ends_with_the_same_bits(place, whole, tmp_path):
    real = Trainer._clip_gradient

    def clipped(self):
        if self.done == 3:
            time.sleep(60)
        return real(self)

    child = os.fork()
    if child == 0:
        try:
            Trainer._clip_gradient = clipped
            run(*command(place, tmp_path))
        finally:
            os._exit(0)
    while len(rows(tmp_path / "log.jsonl")) < 3:
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    result = finished(place, tmp_path)
    assert "Resuming after step 2 of 6" in result.output
    assert same(adapter(tmp_path), adapter(whole))
    assert [row["loss"] for row in rows(tmp_path / "log.jsonl")] == [row["loss"] for row in rows(whole / "log.jsonl")]


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_continue(place, whole, tmp_path, monkeypatch):
    real = FinetuneDisplay.row

    def row(self, report):
        real(self, report)
        if report["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(FinetuneDisplay, "row", row)
    result = run(*command(place, tmp_path))
    assert result.exit_code == 130
    assert "Stopped after step 3 of 6. The same command resumes from there." in result.output
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert (tmp_path / "adapter_model.safetensors").exists()
    monkeypatch.undo()
    finished(place, tmp_path)
    assert same(adapter(tmp_path), adapter(whole))


def test_finished_steps_are_not_repeated(place, whole):
    before = (whole / "log.jsonl").read_text()
    assert "All 6 steps are done already." in finished(place, whole).output
    assert (whole / "log.jsonl").read_text() == before


def test_a_changed_option_that_alters_the_result_is_rejected_by_name(place, whole):
    words = ("--rank", "4", "--targets", "down", "--steps", "7", "--grad-accum", "2")
    result = run(*command(place, whole, *words))
    text = " ".join(result.output.split())
    assert result.exit_code == 2 and "Traceback" not in text
    for message in ("--rank was 8 and is 4", "--targets was gate,up,down and is down", "--grad-accum was 1 and is 2"):
        assert message in text
    assert "--steps or --epochs was 6 and is 7" in text and "--resume never" in text


def test_options_that_do_not_alter_the_result_may_change(place, whole, tmp_path):
    words = ("--steps", "2", "--schedule", "constant", "--warmup", "1", "--no-pack")
    finished(place, tmp_path, *words)
    more = ("--save-every", "1", "--keep", "3", "--checkpointing", "--eval-data", str(place / "held.txt"))
    finished(place, tmp_path, *words[2:], *more, "--steps", "4")
    finished(place, tmp_path / "other", *words[2:], "--steps", "4")
    assert same(adapter(tmp_path), adapter(tmp_path / "other"))


def test_asking_for_fewer_steps_than_done_ends_the_run(place, tmp_path):
    words = ("--schedule", "constant", "--warmup", "0")
    finished(place, tmp_path, *words, "--steps", "4")
    before = adapter(tmp_path)
    output = " ".join(finished(place, tmp_path, *words, "--steps", "3").output.split())
    assert "4 steps are done already, and only 3 were requested: no step is left" in output and "Stopped" not in output
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["result"]["status"] == "trained" and (run["result"]["step"], run["steps"]) == (4, 4)
    assert "of 3 steps" not in (tmp_path / "loss.html").read_text() and same(adapter(tmp_path), before)


def test_changed_data_is_rejected(place, tmp_path):
    data = tmp_path / "mine.txt"
    data.write_text(VERSE)
    words = command(place, tmp_path / "out", "--steps", "1")
    words[words.index("--data") + 1] = str(data)
    assert run(*words).exit_code == 0
    data.write_text(VERSE + "One line more.\n")
    assert "the content of --data has changed" in " ".join(run(*words).output.split())


def test_a_model_with_one_changed_byte_is_rejected(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    words = command(place, tmp_path / "out", "--steps", "1")
    words[1] = str(tmp_path / "model")
    assert run(*words).exit_code == 0
    weights = tmp_path / "model" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[len(changed) // 2] ^= 1
    weights.write_bytes(changed)
    assert "the content of MODEL has changed" in " ".join(run(*words).output.split())


@pytest.mark.skipif(native.reason() is not None, reason="there is one level of instructions without the library")
def test_a_run_on_another_instruction_set_continues_with_a_note(place, tmp_path, monkeypatch):
    words = ("--schedule", "constant", "--warmup", "0")
    finished(place, tmp_path, *words, "--steps", "1")
    here = native.isa()
    monkeypatch.setattr(native, "isa", lambda: "another")
    output = " ".join(finished(place, tmp_path, *words, "--steps", "2").output.split())
    assert f"instructions was {here}, " in output and "and is another, " in output and "not bit for bit" in output


def test_a_dry_run_counts_and_trains_nothing(place, tmp_path):
    result = finished(place, tmp_path / "none", "--dry-run", "--json", "--format", "int8", "--shared-a")
    content = json.loads(result.stdout)
    layer = 4 * 8 * (32 + 2 * 16 + 16 + 32)
    assert content["status"] == "dry run" and content["trained_parameters"]["total"] == 2 * layer
    assert content["format"] == "int8" and content["bytes"]["optimizer"] == 3 * 4 * 2 * layer
    assert 0 < content["bytes"]["experts"] < 2 * 4 * 3 * 16 * 32 * 2 + 2**17
    assert not (tmp_path / "none").exists()
    shown = " ".join(finished(place, tmp_path / "none", "--dry-run").output.split())
    assert "expert LoRA, gate 3,072" in shown and "total in the optimizer 9,216" in shown
    assert "would also fit" not in shown  # the batch is a whole step already


def test_no_line_is_wider_than_the_terminal(place, tmp_path, monkeypatch):
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = finished(place, tmp_path / "none", "--dry-run", "--batch-size", "1", "--grad-accum", "2").output
        assert max(map(len, shown.splitlines())) <= columns and "would also fit" in " ".join(shown.split())
        assert "429 of them trained on, in 5 rows; 6 steps of 1 x 2 rows" in " ".join(shown.split())


def test_the_proposed_batch_fits_into_memory():
    assert accounting.propose(row=10.0, window=12, free=100.0) == (6, 2)
    assert accounting.propose(row=10.0, window=12, free=1e9) == (12, 1)
    assert accounting.propose(row=100.0, window=12, free=100.0) is None


def test_the_measured_activations_grow_with_the_rank_and_not_with_the_base(place, tmp_path):
    def measured(*more):
        words = ("--dry-run", "--json", *more)
        return json.loads(finished(place, tmp_path / "none", *words).stdout)["bytes"]["activations"]

    plain = measured()
    assert plain == measured("--format", "fp32") > measured("--checkpointing") > 0


@pytest.mark.parametrize(
    "more, message",
    [
        (("--epochs", "1", "--steps", "1"), "--steps and --epochs exclude one another"),
        (("--targets", "gate,side"), "--targets is gate,side; expected one or more of gate,up,down"),
        (("--seed", str(2**63)), "--seed is 9223372036854775808; expected 0 or more, below 2^63"),
        (("--threads", "100000"), "--threads is 100000; expected 1 to 1,024"),
        (("--dropout", "1"), "--dropout is 1.0; expected 0 or more, below 1"),
        (("--lr", "0"), "--lr is 0.0; expected a number above 0"),
        (("--format", "int4", "--group-size", "24"), "then model --group-size 24 must be a multiple of 8"),
        (("--lora-modules", "q_proj,nosuch"), "--lora-modules nosuch: no layer of this model has that name"),
        (("--lora-modules", "embed_tokens"), "model.embed_tokens is of class Embedding, not a linear layer"),
        (("--train-router", "--dtype", "bf16"), "--train-router trains model.layers.0.mlp.gate.weight itself"),
        (("--resume", "nosuch"), "nosuch is not a checkpoint: state.json is missing"),
        (("--data", "nosuch.txt"), "nosuch.txt: there is no such file"),
        (("--eval-data", "nosuch.csv"), "nosuch.csv: there is no such file"),
        (("--data", "./README"), "README: the name has no ending"),
    ],
)
def test_a_mistake_is_one_readable_paragraph_and_status_2(place, tmp_path, more, message):
    result = run(*command(place, tmp_path / "out", *more))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output and isinstance(result.exception, SystemExit)


def test_an_impossible_model_or_output_is_named(place, tmp_path):
    words = command(place, tmp_path / "out")
    words[1] = str(tmp_path / "nothing" / "here")
    assert f"MODEL {words[1]}: there is no such folder." in " ".join(run(*words).output.split())
    (tmp_path / "file").write_text("")
    result = run(*command(place, tmp_path / "file"))
    assert result.exit_code == 2 and "cannot be written" in " ".join(result.output.split())


def test_a_missing_tokenizer_or_one_of_another_model_is_reported(place, tmp_path):
    words = command(place, tmp_path / "out")
    words[1] = str(tmp_path / "small")
    saved_model(tmp_path / "small").joinpath("tokenizer.json").unlink()
    result = run(*words)
    assert result.exit_code == 2 and "has no tokenizer" in " ".join(result.output.split()), result.output
    tiny_model(100).to(torch.bfloat16).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(place / "model").save_pretrained(tmp_path / "small")
    result = run(*words)
    sentence = r"tokenizer produces the id 2\d\d, but its embedding table has only 100"
    assert result.exit_code == 2 and re.search(sentence, " ".join(result.output.split())), result.output


def test_a_name_on_the_hub_is_fetched_once_and_streamed(place, tmp_path, monkeypatch):
    def fetched(name, allow_patterns):
        if name != "someone/tiny":
            raise huggingface_hub.errors.LocalEntryNotFoundError("Cannot find it on the hub.\n\nMore words.")
        return str(place / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    words = command(place, tmp_path, "--steps", "1", "--lora-modules", "q_proj")
    words[1] = "someone/tiny"
    assert run(*words).exit_code == 0
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/tiny"
    words[1] = "someone/else"
    message = "MODEL someone/else is not a folder here, and fetching it from the hub failed: Cannot find it on the hub."
    assert message in " ".join(run(*words).output.split())


def test_a_loss_that_is_not_finite_ends_the_run_with_step_and_module(place, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(place / "model").save_pretrained(tmp_path / "model")
    words = command(place, tmp_path / "out")
    words[1] = str(tmp_path / "model")
    result = run(*words, "--json")
    assert result.exit_code == 1
    assert re.search(r"Step 1: the loss is nan\..*is in model\.layers\.1\.self_attn\.o_proj", result.output)
    content = json.loads(result.stdout)
    assert content["status"] == "diverged" and "unknown" not in content["error"] and "step 0" not in content["error"]
    assert content["error"] == json.loads((tmp_path / "out" / "run.json").read_text())["result"]["error"]
    assert (tmp_path / "out" / "loss.html").exists()


def test_the_page_stands_alone_and_shows_the_curves(whole):
    text = (whole / "loss.html").read_text()
    assert "<script" not in text and "http" not in re.sub(r"http-equiv", "", text)
    assert "prefers-color-scheme: dark" in text and text.count("<svg") == 4
    assert "after 6 steps." in text and "expert LoRA, gate" in text


def test_every_option_explains_itself():
    result = run("finetune", "--help")
    shown = re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)
    assert result.exit_code == 0 and "adapter for peft" in shown
    for word in "--output --eval-data --format --group-size --rank --alpha --targets --shared-a --dropout".split():
        assert word in shown
