"""Where a run may not write, what it leaves of another's files, and how it ends when memory does not suffice."""

import json
import os
import shutil
import signal

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from typer.testing import CliRunner

from cli.finetune_tools import rows_without_times, saved_place, session, tiny_trainer, trained
from goldsmith.cli import app
from goldsmith.cli.finetune.display import FinetuneDisplay
from goldsmith.cli.terminal import console
from goldsmith.hf.checkpoint.foreign_errors import out_of_memory
from goldsmith.hf.training.model import loading as models
from goldsmith.hf.training.options import Options
from goldsmith.hf.training.records.journal import rows
from goldsmith.hf.training.run.memory_errors import paragraph
from goldsmith.hf.training.run.session import CONFIG, LOG, WEIGHTS, RunCallbacks, again
from goldsmith.hf.training.run.trainer import Trainer

pytestmark = pytest.mark.sweep(5)

HUGE = 1 << 50  # bytes; more than an address space of 48 bits gives to anyone


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return saved_place(tmp_path_factory.mktemp("finetune"))


def run(place, output, *more, model=None):
    words = ["finetune", model or place / "model", "--data", place / "verse.txt", "--output", output]
    words += ["--seq-len", "64", "--batch-size", "2", "--steps", "4", "--save-every", "2", "--threads", "1", *more]
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result, " ".join(result.output.split())


def refused(place, output, *more, message, **how):
    before = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    result, text = run(place, output, *more, **how)
    assert result.exit_code == 2 and message in text and "Traceback" not in text, text
    assert {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()} == before


def result_of(folder):
    return json.loads((folder / "run.json").read_text())["result"]


# where it may not write


def test_the_models_own_folder_is_rejected_as_output(place, tmp_path):
    refused(place, place / "model", message="model is MODEL's own folder: an adapter there would be mistaken for part")
    (tmp_path / "link").symlink_to(place / "model")
    refused(place, tmp_path / "link", message="is MODEL's own folder")


def test_another_models_folder_is_rejected_as_output(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "other")
    refused(place, tmp_path / "other", message="other contains a config.json, like a model's folder: an adapter")
    assert {p.name for p in (tmp_path / "other").iterdir()} == {p.name for p in (place / "model").iterdir()}


def test_a_folder_inside_the_models_folder_is_accepted_as_output(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    for steps in ("2", "4"):
        more = ("--schedule", "constant", "--warmup", "0", "--steps", steps)
        result, text = run(place, tmp_path / "model" / "tuned", *more, model=tmp_path / "model")
        assert result.exit_code == 0, text
    assert "Resuming after step 2 of 4" in text


def test_an_empty_output_name_does_not_mean_the_current_directory(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(place, "", message="--output is empty; expected the name of a folder, or . for the current one")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--data", "--eval-data"])
@pytest.mark.parametrize("name", ["log.jsonl", "checkpoints/rows.jsonl", ".unfinished-adapter/rows.jsonl"])
def test_files_that_the_run_reads_are_rejected_as_output(place, tmp_path, option, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"text": "something of the user\'s"}\n')
    message = f"{name.partition('/')[0]}, which this run writes itself. Give another --output."
    refused(place, tmp_path / "out", option, path, message=message)
    os.link(path, tmp_path / "rows.jsonl")
    (tmp_path / "link.jsonl").symlink_to(path)
    refused(place, tmp_path / "out", option, tmp_path / "link.jsonl", message=message)
    if name == LOG:
        refused(place, tmp_path / "out", option, tmp_path / "rows.jsonl", message=message)
    assert path.read_text() == '{"text": "something of the user\'s"}\n'


def test_output_files_have_the_permissions_of_the_umask(place, tmp_path):
    before = os.umask(0o077)
    try:
        assert run(place, tmp_path / "out", "--train-router")[0].exit_code == 0
    finally:
        os.umask(before)
    by_name = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {CONFIG, WEIGHTS, LOG} < by_name.keys() and set(by_name.values()) == {0o600}, by_name


def test_data_in_the_output_folder_is_accepted(place, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "something of the user\'s"}\n')
    result, text = run(place, tmp_path, "--data", tmp_path / "rows.jsonl", "--steps", "1")
    assert result.exit_code == 0, text


# what is there of another run


def test_an_existing_adapter_is_moved_and_not_overwritten(place, tmp_path):
    for name in (WEIGHTS, CONFIG):
        (tmp_path / name).write_text("hours of somebody's work")
    result, text = run(place, tmp_path, "--steps", "1")
    assert result.exit_code == 0 and "of an earlier run in" in text, text
    earlier = {path.name: path.read_text() for path in (tmp_path / "earlier-1").iterdir()}
    assert earlier == dict.fromkeys((WEIGHTS, CONFIG), "hours of somebody's work")
    assert (tmp_path / WEIGHTS).stat().st_size > 1000 and result_of(tmp_path)["status"] == "trained"


def test_starting_over_moves_everything_and_continuing_moves_nothing(place, tmp_path):
    run(place, tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    run(place, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == written
    adapter = (tmp_path / WEIGHTS).read_bytes()
    assert run(place, tmp_path, "--resume", "never", "--seed", "1")[0].exit_code == 0
    assert {path.name for path in (tmp_path / "earlier-1").iterdir()} == written - {".lock"}
    assert (tmp_path / "earlier-1" / WEIGHTS).read_bytes() == adapter != (tmp_path / WEIGHTS).read_bytes()
    assert result_of(tmp_path / "earlier-1")["status"] == "trained"


def test_a_checkpoint_of_an_earlier_run_continues_that_runs_log(tmp_path):
    trained(tmp_path)
    first = rows_without_times(tmp_path)
    trained(tmp_path, resume="never", eval_every=1)
    trained(tmp_path, resume=str(tmp_path / "earlier-1" / "checkpoints" / "step-000004"))
    assert rows_without_times(tmp_path) == first
    assert len(rows_without_times(tmp_path / "earlier-2")) > len(first)
    assert len(list((tmp_path / "earlier-2" / "checkpoints").iterdir())) == 2


def test_rows_of_discarded_steps_are_kept_with_their_checkpoints(tmp_path):
    trained(tmp_path)
    before = rows(tmp_path / LOG)
    trained(tmp_path, resume=str(tmp_path / "checkpoints" / "step-000004"))
    assert rows(tmp_path / "earlier-1" / LOG) == before
    assert [p.name for p in (tmp_path / "earlier-1" / "checkpoints").iterdir()] == ["step-000006"]


def test_a_run_that_cannot_begin_moves_no_files(tmp_path):
    trained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    session(tmp_path).find("never", RunCallbacks())
    assert {path.name for path in tmp_path.iterdir()} == names


def test_the_log_of_a_run_that_was_killed_before_its_first_checkpoint_is_moved_too(place, tmp_path):
    left = {LOG: '{"step": 1, "loss": 5.5}\n', "run.json": '{"result": {"status": "running"}}'}
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    result, text = run(place, tmp_path, "--steps", "1")
    assert result.exit_code == 0 and "of an earlier run in" in text, text
    assert {path.name: path.read_text() for path in (tmp_path / "earlier-1").iterdir()} == left
    assert len(rows(tmp_path / LOG)) == 1 and result_of(tmp_path)["status"] == "trained"


@pytest.mark.parametrize("inside, argument", [(".", "step-000004"), ("step-000006", "../step-000004")])
def test_a_checkpoints_log_is_found_from_inside_its_folder(tmp_path, monkeypatch, inside, argument):
    trained(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a" / "checkpoints" / inside)
    trained(tmp_path / "b", resume=argument)
    assert rows_without_times(tmp_path / "b") == rows_without_times(tmp_path / "a")


def test_a_checkpoints_log_is_found_through_links(tmp_path):
    trained(tmp_path / "a")
    (tmp_path / "best").symlink_to(tmp_path / "a" / "checkpoints" / "step-000004")
    trained(tmp_path / "b", resume=str(tmp_path / "best"))
    (tmp_path / "a" / "checkpoints").rename(tmp_path / "large")
    (tmp_path / "a" / "checkpoints").symlink_to(tmp_path / "large")
    trained(tmp_path / "c", resume=str(tmp_path / "a" / "checkpoints" / "step-000004"))
    assert (
        rows_without_times(tmp_path / "b") == rows_without_times(tmp_path / "c") == rows_without_times(tmp_path / "a")
    )


def test_a_rejected_command_does_not_mark_a_killed_run_as_failed(place, tmp_path):
    assert run(place, tmp_path)[0].exit_code == 0
    killed = '{"result": {"status": "running"}}'
    (tmp_path / "run.json").write_text(killed)
    result, text = run(place, tmp_path, "--rank", "3")
    assert result.exit_code == 2 and "and is 3" in text, text
    assert (tmp_path / "run.json").read_text() == killed


# when memory does not suffice


def test_out_of_memory_errors_are_recognised():
    for fails in (
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: torch.empty(1 << 62),
        lambda: bytearray(1 << 62),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as error:
            fails()
        assert out_of_memory(error.value), error.value
    assert out_of_memory(OSError(12, "Cannot allocate memory")) and not out_of_memory(OSError(28, "No space"))
    with pytest.raises(RuntimeError) as error:
        torch.ones(2) @ torch.ones(3)
    assert not out_of_memory(error.value) and not out_of_memory(ValueError("DefaultCPUAllocator"))


def test_out_of_memory_in_a_step_is_one_paragraph_and_the_same_command_continues(place, tmp_path, monkeypatch):
    assert run(place, tmp_path / "whole")[0].exit_code == 0
    real = Trainer._loss

    def loss(self, batch):
        if self.done == 3:
            torch.empty(HUGE, dtype=torch.uint8)
        return real(self, batch)

    monkeypatch.setattr(Trainer, "_loss", loss)
    result, text = run(place, tmp_path / "out")
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), text
    message = "--device cpu has too little memory for 1,048,576.0 GiB more. The checkpoint of step 2 is complete: "
    assert message in text and "with --checkpointing, the same command resumes from there. These take less" in text
    for option in ("--batch-size", "--seq-len", "--rank", "--format int4", "--resume never"):
        assert option in text
    ended = result_of(tmp_path / "out")
    assert (ended["status"], ended["step"]) == ("failed", 3) and ended["error"].startswith(message)
    monkeypatch.undo()
    result, text = run(place, tmp_path / "out", "--checkpointing")
    assert result.exit_code == 0 and "Resuming after step 2 of 4" in text, text
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def paragraph_after(folder, *, begun=True, checkpoints=("step-000002",), **options):
    for name in checkpoints:
        (folder / "checkpoints" / name).mkdir(parents=True)
    argument = Options(model="m", data="d", output=str(folder), **options)
    return paragraph(MemoryError(), argument, begun=begun)


def test_the_out_of_memory_message_names_a_command_that_continues(tmp_path):
    output = paragraph_after(tmp_path / "anew", resume="never")
    assert "or with --checkpointing, the same command without --resume never resumes from there" in output
    output = paragraph_after(tmp_path / "path", resume="run/checkpoints/step-000002")
    assert "the same command without --resume run/checkpoints/step-000002 resumes" in output
    output = paragraph_after(tmp_path / "less", checkpointing=True)
    assert output.count("--checkpointing") == 0 and "when more memory is free, the same command resumes" in output
    output = paragraph_after(tmp_path / "before", resume="never", begun=False)
    assert "checkpoint of step" not in output and "resumes" not in output
    assert "of step 2 is complete" in paragraph_after(tmp_path / "later", begun=False)


def test_a_full_disk_and_an_interrupt_name_the_command_that_continues(tmp_path, capsys):
    assert again(tmp_path, "never") == again(tmp_path, "auto") == "the same command"
    trained(tmp_path)
    training = session(tmp_path)
    training.find("never", RunCallbacks())
    assert "the same command without --resume never resumes" in training._write_failure(
        tiny_trainer(), OSError(28, "full")
    )
    show = FinetuneDisplay(console(), console())
    interrupted = {"status": "interrupted", "step": 1, "loss": None, "eval_loss": None}
    show.ended(interrupted, 2, tmp_path, again(tmp_path, "A/b"))
    assert "The same command without --resume A/b resumes" in " ".join(capsys.readouterr().out.split())


def test_out_of_memory_before_the_first_checkpoint_and_before_the_model(place, tmp_path, monkeypatch):
    def load(*words):
        bytearray(1 << 62)

    monkeypatch.setattr(models, "load", load)
    result, text = run(place, tmp_path / "out", "--checkpointing", "--format", "int4")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert text.endswith(
        "--device cpu has too little memory. These take less: a smaller --batch-size (with a larger --grad-accum), "
        "a smaller --seq-len or --rank."
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"result": {"status": "running"}}')  # as a kill leaves it
    run(place, tmp_path / "out")
    assert result_of(tmp_path / "out")["status"] == "failed"


def test_before_a_run_the_advice_names_what_needs_the_memory(place, tmp_path, monkeypatch):
    for free, rank, message in (
        (10_000_000, 1024, "a smaller --rank or fewer --targets"),
        (1000, 8, "a smaller --seq-len"),
    ):
        monkeypatch.setattr("goldsmith.hf.training.model.accounting.memory_free", lambda free=free: free)
        result, text = run(place, tmp_path / "none", "--dry-run", "--rank", str(rank))
        assert (
            result.exit_code == 0
            and message in text
            and ("trained parameters leave too little memory" in text) == (rank > 8)
        )


def test_a_full_disk_marks_the_run_as_failed_in_run_json(place, tmp_path, monkeypatch):
    def write(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("goldsmith.hf.training.records.checkpoints.write", write)
    result, text = run(place, tmp_path)
    assert result.exit_code == 2 and "No space left on device" in text
    assert result_of(tmp_path)["status"] == "failed" and "No space left" in result_of(tmp_path)["error"]


@pytest.mark.parametrize("name", ["loss.html", "run.json"])
def test_a_page_or_a_record_that_cannot_be_written_costs_no_training(place, tmp_path, monkeypatch, name):
    """The disk is full for this file from the second write on (run.json must be there before the first step)."""
    from goldsmith.hf.training.records import checkpoints, loss_page

    replace, attempts = checkpoints.replace, []

    def full(path, text):
        attempts.append(path.name)
        if path.name == name and attempts.count(name) > (name == "run.json"):
            raise OSError(28, "No space left on device")
        replace(path, text)

    monkeypatch.setattr(checkpoints, "replace", full)
    monkeypatch.setattr(loss_page, "replace", full)
    result, text = run(place, tmp_path)
    assert result.exit_code == 0 and attempts.count(name) > 1
    assert (tmp_path / "adapter_model.safetensors").exists() and "loss " in text
    assert text.count(f"{name}: No space left on device.") == 1
    assert text.count("loss.html") == 1 and text.count("log.jsonl") == 1


# signals


@pytest.mark.forks
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("ignored", [True, False], ids=["ignored", "not"])
def test_a_signal_ends_the_run_unless_it_was_started_to_ignore_it(number, ignored, place, tmp_path):
    """nohup has SIGHUP ignored, and `&` of a shell without jobs SIGINT."""
    real = FinetuneDisplay.row

    def row(self, message):
        real(self, message)
        os.kill(os.getpid(), number)

    child = os.fork()
    if child == 0:
        code = 255
        try:
            signal.signal(number, signal.SIG_IGN if ignored else signal.default_int_handler)
            FinetuneDisplay.row = row
            code = run(place, tmp_path)[0].exit_code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if ignored else 130)
    result = result_of(tmp_path)
    assert (result["status"], result["step"]) == (("trained", 4) if ignored else ("interrupted", 1))
