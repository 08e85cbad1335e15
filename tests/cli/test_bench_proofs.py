"""`goldsmith bench --proof FILE`: proofs of this very code, on this machine, made before."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from cli.test_bench import Clock, rows, run, words
from goldsmith.cli import app
from goldsmith.cli.bench import command, proof_files, prover
from goldsmith.core.device import machine
from goldsmith.core.op import Op

pytestmark = pytest.mark.sweep(2, part=0)


@pytest.fixture(autouse=True)
def _without_a_clock(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda: replace(machine(), interpreter=False))
    monkeypatch.setattr(command, "clock", lambda device: Clock())
    monkeypatch.setattr(prover.verify.os, "sched_getaffinity", lambda process: {0})  # a second worker only loads torch


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    file = tmp_path_factory.mktemp("proofs") / "expand.json"
    asked = ["verify", "mhc.expand", "--backend", "reference", "--device", "cpu", "--dtype", "bfloat16", "--jobs", "1"]
    assert CliRunner().invoke(app, [*asked, "--json", str(file)]).exit_code == 0
    return file


def timed(*files, more=()):
    given = [part for file in files for part in ("--proof", str(file))]
    return run("mhc.expand", "--case", "T=1,D=4096", "--against", "none", *given, *more)


def changed(proof, tmp_path, **what):
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(json.loads(proof.read_text()) | what))
    return file


def test_a_proof_from_a_file_stands_for_one_in_the_run(monkeypatch, proof):
    monkeypatch.setattr(prover.verify, "verify", lambda *_: pytest.fail("it is verified already"))
    for more in ((), ("--no-verify",)):
        result = timed(proof, more=more)
        assert result.exit_code == 0, result.output
        (row,) = rows(result)
        cases = json.loads(proof.read_text())["proofs"][0]["report"]["cases"]
        assert row["verified"] is True
        assert row["verified_by"] == f"goldsmith verify, {len(cases)} of {len(cases)} cases, bfloat16 (expand.json)"
        assert len(cases) == sum("large" not in case.tags for case in Op.get("mhc.expand").cases) > 1


def test_an_operator_that_the_file_does_not_cover_is_proved_in_the_run(proof):
    (row,) = rows(run("mhc.post", "--case", "T=1,D=4096", "--against", "none", "--proof", str(proof)))
    assert row["verified"] is True and "json" not in row["verified_by"]


def fewer(proof, tmp_path, cases, name="fewer.json", **more):
    (made,) = json.loads(proof.read_text())["proofs"]
    made["report"]["cases"] = made["report"]["cases"][cases]
    file = tmp_path / name
    file.write_text(json.dumps(json.loads(proof.read_text()) | {"proofs": [made]} | more))
    return file


def test_some_of_the_cases_are_no_proof_and_the_message_has_the_command_for_the_rest(proof, tmp_path):
    whole = len(json.loads(proof.read_text())["proofs"][0]["report"]["cases"])
    file = fewer(proof, tmp_path, slice(1))
    result = timed(file)
    assert result.exit_code == 2 and rows(result) == []
    output = words(result.stderr)
    assert f"1 of the {whole} cases of mhc.expand on reference in bfloat16 that bench would check itself" in output
    assert "`goldsmith verify mhc.expand --backend reference --dtype bfloat16 --json" in output


def test_files_are_taken_together_and_in_any_order(proof, tmp_path):
    first, rest = fewer(proof, tmp_path, slice(1), "1.json"), fewer(proof, tmp_path, slice(1, None), "2.json")
    for files in ((first, rest), (rest, first), (first, proof)):
        (row,) = rows(timed(*files))
        names = ", ".join(file.name for file in files)
        assert row["verified"] is True and row["verified_by"].endswith(f"bfloat16 ({names})")


def without_its_first(proof, note):
    """A proof whose first case came to no verdict, and how many others there are."""
    (made,) = json.loads(proof.read_text())["proofs"]
    first, *rest = made["report"]["cases"]
    made["report"]["rows"] = [row for row in made["report"]["rows"] if row["case"] != first]
    made["report"]["notes"].append({"id": note, "tensor": "", "text": "odd sizes", "case": first})
    return made, len(rest)


def test_cases_that_a_backend_refuses_are_neither_wanted_nor_counted(proof, tmp_path):
    made, others = without_its_first(proof, "cannot_run")
    (row,) = rows(timed(changed(proof, tmp_path, proofs=[made])))
    assert f"{others} of {others} cases" in row["verified_by"]


@pytest.mark.parametrize("note", ["not_run", "not_judged"])
def test_cases_that_came_to_no_verdict_are_wanted_and_not_counted(proof, tmp_path, note):
    made, others = without_its_first(proof, note)
    result = timed(changed(proof, tmp_path, proofs=[made]))
    assert result.exit_code == 2 and f"{others} of the {others + 1} cases" in words(result.stderr)


def test_the_backend_that_is_proved_is_a_fast_one_if_it_takes_any_small_case(monkeypatch):
    op, tried = Op.get("experts.moe"), []

    def choose(self, wanted, tensors, options):
        tried.append(tensors[0].shape)
        return "cuda_grouped" if tensors[0].shape[-1] % 8 == 0 and tensors[0].numel() else "reference"

    monkeypatch.setattr(Op, "choose", choose)
    assert prover._backend(op, torch.bfloat16, "cpu", "auto") == "cuda_grouped" and tried[0][-1] % 8
    assert prover._backend(Op.get("mhc.expand"), torch.bfloat16, "cpu", "reference")


def test_a_quick_run_proves_nothing(proof, tmp_path):
    (row,) = rows(timed(changed(proof, tmp_path, size="quick")))
    assert "json" not in row["verified_by"], "it is verified in the run"


def test_a_proof_of_native_kernels_holds_for_one_level(proof, tmp_path, monkeypatch):
    (made,) = json.loads(proof.read_text())["proofs"]
    file = changed(proof, tmp_path, proofs=[made | {"backend": "native"}], isa="scalar")
    monkeypatch.setattr(proof_files.native, "isa", lambda: "avx2")
    result = timed(file)
    assert result.exit_code == 2 and "made at level scalar, but avx2 is in use here" in words(result.stderr)
    monkeypatch.setattr(proof_files.native, "isa", lambda: "scalar")
    assert timed(file).exit_code == 0


def test_an_operator_that_a_file_rejects_is_not_timed(proof, tmp_path):
    (made,) = json.loads(proof.read_text())["proofs"]
    made["verdict"] = "fail"
    made["report"]["findings"] = [{"text": "y is wrong"}]
    result = timed(changed(proof, tmp_path, proofs=[made]))
    assert result.exit_code == 1 and rows(result) == []
    assert "mhc.expand on reference was not timed: y is wrong (changed.json)" in words(result.stderr)


@pytest.mark.parametrize("what, message", [
    ({"source": "0" * 64}, "made for other code: source 000000000000 there"),
    ({"machine": {"gpus": [{"name": "NVIDIA H100"}], "cpu": "x"}}, "made on another machine, NVIDIA H100; this one is"),
    ({"interrupted": True}, "its run was interrupted"),
])  # fmt: skip
def test_proofs_of_other_source_or_another_machine_are_refused(proof, tmp_path, what, message):
    result = timed(changed(proof, tmp_path, **what))
    assert result.exit_code == 2 and message in words(result.stderr)


def test_files_that_are_no_proofs_are_refused(tmp_path):
    assert "cannot be read: No such file" in words(timed(tmp_path / "none.json").stderr)
    for text, message in (("{", "not JSON"), ("[]", "not a file of this version's")):
        (tmp_path / "bad.json").write_text(text)
        result = timed(tmp_path / "bad.json")
        assert result.exit_code == 2 and message in words(result.stderr)
