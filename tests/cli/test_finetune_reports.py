"""Held-out metrics, several files of data, and what trackers get of a run."""

import json
import math
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from accelerate import tracking
from typer.testing import CliRunner

from cli.finetune_tools import VERSE, saved_place, tiny_documents, tiny_model
from goldsmith.cli import app
from goldsmith.hf.training.data.packing import RowStream
from goldsmith.hf.training.records.journal import rows
from goldsmith.hf.training.run.loss import Evaluation, loss_and_hits

NAMES = ("eval_loss", "eval_perplexity", "eval_mean_token_accuracy")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = saved_place(tmp_path_factory.mktemp("reports"))
    (folder / "held.txt").write_text(VERSE.upper())
    (folder / "more.jsonl").write_text(json.dumps({"text": "Nor shall Death brag"}) + "\n")
    return folder


def run(place, output, *more, code=0):
    words = ["finetune", place / "model", "--data", place / "verse.txt", "--output", output, "--seq-len", 64]
    words += ["--threads", 1, "--schedule", "constant", "--eval-data", place / "held.txt", "--eval-every", 2, *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_token_accuracy_and_perplexity_are_those_of_each_document_alone():
    model, documents = tiny_model(64).eval(), tiny_documents(10)
    stream = RowStream(documents, 16, packed=False, seed=0)
    with torch.no_grad():
        loss, hits = (sum(each) for each in zip(*(loss_and_hits(model, stream.batch(k, 2)) for k in range(0, 10, 2))))
        expected, targets = 0, 0
        for document in documents:
            ids = torch.tensor([document.ids])
            expected += int((model(input_ids=ids).logits[0, :-1].argmax(-1) == ids[0, 1:]).sum())
            targets += len(document) - 1
    result = Evaluation(loss, hits, targets)
    assert (result.hits, result.accuracy) == (expected, expected / targets)
    assert result.perplexity == math.exp(loss / targets) and Evaluation(1e6, 0, 1).perplexity == math.inf


def test_a_run_logs_its_metrics_and_tensorboard_gets_the_log_also_after_it_resumes(place, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output = tmp_path / "out"
    shown = run(place, output, "--steps", 2, "--report-to", "tensorboard", "--data", place / "more.jsonl")
    assert (
        "verse.txt, more.jsonl: 6 documents" in shown
        and "held-out perplexity" in shown
        and "held-out token accuracy" in shown
    )
    refused = run(place, output, "--steps", 5, "--report-to", "tensorboard", code=2)
    assert "the content of --data has changed" in refused
    run(place, output, "--steps", 5, "--report-to", "tensorboard", "--data", place / "more.jsonl")
    log = rows(output / "log.jsonl")
    evaluations = [row for row in log if "eval_loss" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 5]
    assert all(row["eval_perplexity"] == math.exp(row["eval_loss"]) for row in evaluations)
    events = accumulator.EventAccumulator(str(output / "tensorboard")).Reload()
    for name, tag in (("loss", "train/loss"), ("lr", "train/learning_rate"), *((n, "eval/" + n[5:]) for n in NAMES)):
        values = {row["step"]: float(torch.tensor(row[name])) for row in log if name in row}  # float32
        assert {point.step: point.value for point in events.Scalars(tag)} == values, tag
    content = json.loads((output / "run.json").read_text())
    assert content["result"]["eval_perplexity"]["last"] == evaluations[-1]["eval_perplexity"]
    assert content["options"]["data"] == [str(place / "verse.txt"), str(place / "more.jsonl")]
    run(place, output, "--steps", 1, "--resume", "never")
    assert (output / "earlier-1" / "tensorboard").is_dir() and not (output / "tensorboard").exists()


class RecordingRun:
    """Stands for a run of Weights & Biases."""

    def __init__(self, **arguments):
        self.arguments, self.rows, self.finished = arguments, [], False

    def log(self, values, step):
        if self.arguments["project"] == "broken":
            raise RuntimeError("no network")
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module wandb that records its runs."""
    runs = []

    def init(**arguments):
        runs.append(RecordingRun(**arguments))
        return runs[-1]

    settings = {}
    config = SimpleNamespace(update=lambda values, **_: settings.update(values))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, config=config))
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    return SimpleNamespace(runs=runs, settings=settings)


def test_weights_and_biases_gets_one_run_for_each_folder_until_it_starts_over(place, tmp_path, wandb):
    output = tmp_path / "out"
    run(place, output, "--steps", 2, "--report-to", "wandb")
    run(place, output, "--steps", 3, "--report-to", "wandb")
    run(place, output, "--steps", 1, "--report-to", "wandb", "--resume", "never")
    first, second, third = wandb.runs
    assert first.arguments["project"] == "goldsmith" and first.arguments["name"] == "out" and first.finished
    assert first.arguments["id"] == second.arguments["id"] != third.arguments["id"]
    assert [step for step, _ in first.rows] == [0, 1, 2, 2] and [step for step, _ in second.rows] == [3, 3]
    assert wandb.settings["rank"] == 8 and "train/loss" in first.rows[1][1] and "eval/perplexity" in first.rows[0][1]


def test_a_tracker_that_fails_does_not_stop_the_run(place, tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "broken")
    shown = run(place, tmp_path / "out", "--steps", 1, "--report-to", "wandb")
    assert shown.count("--report-to wandb failed (no network); the run continues without it") == 1


@pytest.mark.parametrize(
    "names, message",
    [
        ("wandbb", "--report-to is wandbb; known are aim, clearml, comet_ml,"),
        ("wandb", "--report-to wandb: its package is not installed: pip install wandb."),
        ("tensorboard,tensorboard", "--report-to tensorboard,tensorboard names a tracker twice."),
    ],
)
def test_trackers_that_cannot_be_used_are_refused_before_anything_is_written(
    place, tmp_path, names, message, monkeypatch
):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["tensorboard"])
    assert message in run(place, tmp_path / "out", "--report-to", names, code=2)
    assert not (tmp_path / "out").exists()
