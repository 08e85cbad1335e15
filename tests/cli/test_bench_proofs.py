"""`goldsmith bench --proof FILE`: proofs of this very code, on this machine, made before."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cli.test_bench import Clock, rows, run, words
from goldsmith.cli import app
from goldsmith.cli.bench import command, prove
from goldsmith.core.device import machine


@pytest.fixture(autouse=True)
def _without_a_clock(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda: replace(machine(), interpreter=False))
    monkeypatch.setattr(command, "clock", lambda device: Clock())


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    file = tmp_path_factory.mktemp("proofs") / "expand.json"
    asked = ["verify", "mhc.expand", "--backend", "reference", "--device", "cpu", "--dtype", "bfloat16", "--quick"]
    assert CliRunner().invoke(app, [*asked, "--json", str(file)]).exit_code == 0
    return file


def timed(*proofs, more=()):
    given = [part for file in proofs for part in ("--proof", str(file))]
    return run("mhc.expand", "--case", "T=1,D=4096", "--against", "none", *given, *more)


def changed(proof, tmp_path, **what):
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(json.loads(proof.read_text()) | what))
    return file


def test_a_proof_from_a_file_stands_for_one_in_the_run(monkeypatch, proof):
    monkeypatch.setattr(prove.verify, "verify", lambda *_: pytest.fail("it is proved already"))
    for more in ((), ("--no-verify",)):
        result = timed(proof, more=more)
        assert result.exit_code == 0, result.output
        (row,) = rows(result)
        cases = json.loads(proof.read_text())["proofs"][0]["report"]["cases"]
        assert row["verified"] is True
        assert row["verified_by"] == f"goldsmith verify, {len(cases)} cases, bfloat16 (expand.json)"


def test_what_it_does_not_speak_of_is_proved_as_ever(proof):
    (row,) = rows(run("mhc.post", "--case", "T=1,D=4096", "--against", "none", "--proof", str(proof)))
    assert row["verified"] is True and "json" not in row["verified_by"]


def test_what_a_file_rejects_is_not_timed(proof, tmp_path):
    (made,) = json.loads(proof.read_text())["proofs"]
    made["verdict"] = "fail"
    made["report"]["findings"] = [{"text": "y is wrong"}]
    result = timed(changed(proof, tmp_path, proofs=[made]))
    assert result.exit_code == 1 and rows(result) == []
    assert "mhc.expand on reference was not timed: y is wrong (changed.json)" in words(result.stderr)


@pytest.mark.parametrize("what, said", [
    ({"source": "0" * 64}, "proves other code: source 000000000000 there"),
    ({"machine": {"gpus": [{"name": "NVIDIA H100"}], "cpu": "x"}}, "was made on another machine: NVIDIA H100 there"),
    ({"interrupted": True}, "that run was interrupted"),
])  # fmt: skip
def test_proofs_of_something_else_are_refused(proof, tmp_path, what, said):
    result = timed(changed(proof, tmp_path, **what))
    assert result.exit_code == 2 and said in words(result.stderr)


def test_files_that_are_no_proofs_are_refused(tmp_path):
    assert "cannot be read: No such file" in words(timed(tmp_path / "none.json").stderr)
    for text, said in (("{", "no JSON"), ("[]", "not what this version's")):
        (tmp_path / "bad.json").write_text(text)
        result = timed(tmp_path / "bad.json")
        assert result.exit_code == 2 and said in words(result.stderr)
