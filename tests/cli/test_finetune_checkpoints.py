"""Checkpoints: what is damaged is passed over and named, what belongs to another run refused."""

import json
import os

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

from cli.finetune_tools import rows_without_times, same, session, trained
from goldsmith.hf.training.errors import TrainingError
from goldsmith.hf.training.records import checkpoints
from goldsmith.hf.training.run.session import FILES, RunCallbacks, locked


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbs: its folder, and its end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(folder)


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, whole):
    trained(tmp_path)
    path = tmp_path / "checkpoints" / "step-000006" / checkpoints.TENSORS
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    notes = []
    checkpoint = session(tmp_path).find("auto", RunCallbacks(note=notes.append))
    assert checkpoint.step == 4 and "step-000006: state.safetensors is damaged" in notes[0]
    assert same(trained(tmp_path), whole[1]) and rows_without_times(tmp_path) == rows_without_times(whole[0])


def test_if_no_checkpoint_is_whole_the_run_does_not_start_over(tmp_path):
    trained(tmp_path, keep=1)
    (tmp_path / "checkpoints" / "step-000006" / checkpoints.TENSORS).write_bytes(b"")
    with pytest.raises(TrainingError, match="No checkpoint can be read: .*has 0 bytes of .*--resume never"):
        trained(tmp_path)


def test_options_that_alter_the_result_are_rejected_by_name(tmp_path):
    trained(tmp_path)
    other = {"--rank": 16, "--data": "other", "--alpha": 1}
    with pytest.raises(TrainingError) as error:
        session(tmp_path, identity=other).find("auto", RunCallbacks())
    for message in ("--rank was 8 and is 16", "the content of --data has changed", "--alpha was not given before"):
        assert message in str(error.value)


def test_a_damaged_byte_in_the_facts_is_detected(tmp_path, whole):
    """Each flipped bit: the checkpoint is passed over with the sentence of any other damage, or says just the same."""
    trained(tmp_path)
    path = tmp_path / "checkpoints" / "step-000006" / checkpoints.FACTS
    raw, right = path.read_bytes(), checkpoints.read(path.parent).facts
    passed = 0
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 7]) + raw[at + 1 :])
        notes = []
        checkpoint = session(tmp_path).find("auto", RunCallbacks(note=notes.append))
        assert (checkpoint.step, checkpoint.facts) == (6, right) or checkpoint.step == 4 and "damaged" in notes[0], (
            at,
            notes,
        )
        passed += checkpoint.step == 4
    assert passed > len(raw) / 2
    path.write_bytes(raw.replace(b'"step": 6', b'"step": 7', 1))
    assert same(trained(tmp_path), whole[1]) and rows_without_times(tmp_path) == rows_without_times(whole[0])


def rewritten(path, change, check=True):
    facts = json.loads(path.read_text())
    facts.pop("check")
    change(facts)
    path.write_text(json.dumps(facts | {"check": checkpoints._check_of(facts)} if check else facts))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda f: f.update(step=5), "state.json is damaged (it says step 5)"),
        (lambda f: f.pop("identity"), "state.json is damaged (identity is missing or not of type dict)"),
        (lambda f: f.update(circumstances=[]), "state.json is damaged (circumstances is missing or not of type dict)"),
        (lambda f: f.update(format=3), "unknown format 3; goldsmith reads formats 1 and 2"),
    ],
)
def test_a_checkpoint_without_required_facts_is_skipped(change, message, tmp_path):
    trained(tmp_path)
    rewritten(tmp_path / "checkpoints" / "step-000006" / checkpoints.FACTS, change)
    notes = []
    assert session(tmp_path).find("auto", RunCallbacks(note=notes.append)).step == 4
    assert message in notes[0]


def test_a_checkpoint_of_format_1_is_read_if_its_step_matches_the_folder(tmp_path, whole):
    trained(tmp_path)
    path = tmp_path / "checkpoints" / "step-000006" / checkpoints.FACTS
    rewritten(path, lambda f: f.update(format=1), check=False)
    assert session(tmp_path).find("auto", RunCallbacks()).step == 6
    rewritten_step = path.read_text().replace('"step": 6', '"step": 5')
    path.write_text(rewritten_step)
    assert session(tmp_path).find("auto", RunCallbacks()).step == 4


@pytest.mark.parametrize("name", [*FILES, "checkpoints"])
def test_a_wrong_kind_of_file_in_the_output_folder_is_rejected_before_the_run(name, tmp_path):
    if name == "checkpoints":
        (tmp_path / name).write_text("")
    else:
        os.mkfifo(tmp_path / name)
    with (
        pytest.raises(TrainingError, match=f"has a (device, a pipe or a socket|file) named {name}, where this run"),
        locked(tmp_path),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_an_output_name_that_the_disk_rejects_is_reported(tmp_path):
    with pytest.raises(TrainingError, match="cannot be written: File name too long"), locked(tmp_path / ("x" * 300)):
        pass
