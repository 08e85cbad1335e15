"""`goldsmith bench --verified FILE`: checks of this code on this machine, from earlier runs."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from cli.test_bench import Clock, rows, run, words
from goldsmith.cli import app
from goldsmith.cli.bench import command, verified_files, verifier
from goldsmith.core.device import machine
from goldsmith.core.op import Op

pytestmark = pytest.mark.sweep(2, part=0)


@pytest.fixture(autouse=True)
def _without_a_clock(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda: replace(machine(), interpreter=False))
    monkeypatch.setattr(command, "clock", lambda device: Clock())
    monkeypatch.setattr(
        verifier.verify.os, "sched_getaffinity", lambda process: {0}
    )  # a second worker only loads torch


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("checks") / "expand.json"
    arguments = [
        "verify",
        "mhc.expand",
        "--backend",
        "reference",
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
        "--jobs",
        "1",
    ]
    assert CliRunner().invoke(app, [*arguments, "--json", str(file)]).exit_code == 0
    return file


def timed(*files, more=()):
    options = [part for file in files for part in ("--verified", str(file))]
    return run("mhc.expand", "--case", "T=1,D=4096", "--against", "none", *options, *more)


def changed(results, tmp_path, **what):
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(json.loads(results.read_text()) | what))
    return file


def test_a_check_in_a_file_replaces_the_one_in_the_run(monkeypatch, results):
    monkeypatch.setattr(verifier.verify, "verify", lambda *_: pytest.fail("it is verified already"))
    for more in ((), ("--no-verify",)):
        result = timed(results, more=more)
        assert result.exit_code == 0, result.output
        (row,) = rows(result)
        cases = json.loads(results.read_text())["proofs"][0]["report"]["cases"]
        assert row["verified"] is True
        assert row["verified_by"] == f"goldsmith verify, {len(cases)} of {len(cases)} cases, bfloat16 (expand.json)"
        assert len(cases) == sum("large" not in case.tags for case in Op.get("mhc.expand").cases) > 1


def test_the_old_name_of_the_option_still_works_and_warns(results):
    run_result = run("mhc.expand", "--case", "T=1,D=4096", "--against", "none", "--proof", str(results))
    assert "expand.json" in rows(run_result)[0]["verified_by"]
    assert "DeprecationWarning: --proof is now called --verified." in words(run_result.stderr)


def test_an_operator_that_the_file_does_not_cover_is_checked_in_the_run(results):
    (row,) = rows(run("mhc.post", "--case", "T=1,D=4096", "--against", "none", "--verified", str(results)))
    assert row["verified"] is True and "json" not in row["verified_by"]


def fewer(results, tmp_path, cases, name="fewer.json", **more):
    (check,) = json.loads(results.read_text())["proofs"]
    check["report"]["cases"] = check["report"]["cases"][cases]
    file = tmp_path / name
    file.write_text(json.dumps(json.loads(results.read_text()) | {"proofs": [check]} | more))
    return file


def test_a_file_with_some_of_the_cases_is_refused_with_the_command_for_the_rest(results, tmp_path):
    whole = len(json.loads(results.read_text())["proofs"][0]["report"]["cases"])
    file = fewer(results, tmp_path, slice(1))
    result = timed(file)
    assert result.exit_code == 2 and rows(result) == []
    output = words(result.stderr)
    assert f"1 of the {whole} cases of mhc.expand on reference in bfloat16 that bench would check itself" in output
    assert "`goldsmith verify mhc.expand --backend reference --dtype bfloat16 --json" in output


def test_files_are_taken_together_and_in_any_order(results, tmp_path):
    first, rest = fewer(results, tmp_path, slice(1), "1.json"), fewer(results, tmp_path, slice(1, None), "2.json")
    for files in ((first, rest), (rest, first), (first, results)):
        (row,) = rows(timed(*files))
        names = ", ".join(file.name for file in files)
        assert row["verified"] is True and row["verified_by"].endswith(f"bfloat16 ({names})")


def without_its_first(results, note):
    """A check whose first case reached no verdict, and how many others there are."""
    (check,) = json.loads(results.read_text())["proofs"]
    first, *rest = check["report"]["cases"]
    check["report"]["rows"] = [row for row in check["report"]["rows"] if row["case"] != first]
    check["report"]["notes"].append({"id": note, "tensor": "", "text": "odd sizes", "case": first})
    return check, len(rest)


def test_cases_that_a_backend_refuses_are_neither_wanted_nor_counted(results, tmp_path):
    check, others = without_its_first(results, "cannot_run")
    (row,) = rows(timed(changed(results, tmp_path, proofs=[check])))
    assert f"{others} of {others} cases" in row["verified_by"]


@pytest.mark.parametrize("note", ["not_run", "not_judged"])
def test_cases_that_reached_no_verdict_are_wanted_and_not_counted(results, tmp_path, note):
    check, others = without_its_first(results, note)
    result = timed(changed(results, tmp_path, proofs=[check]))
    assert result.exit_code == 2 and f"{others} of the {others + 1} cases" in words(result.stderr)


def test_the_backend_that_is_checked_is_a_fast_one_if_it_takes_any_small_case(monkeypatch):
    op, shapes = Op.get("experts.moe"), []

    def choose(self, wanted, tensors, options):
        shapes.append(tensors[0].shape)
        return "cuda_grouped" if tensors[0].shape[-1] % 8 == 0 and tensors[0].numel() else "reference"

    monkeypatch.setattr(Op, "choose", choose)
    assert verifier._backend(op, torch.bfloat16, "cpu", "auto") == "cuda_grouped" and shapes[0][-1] % 8
    assert verifier._backend(Op.get("mhc.expand"), torch.bfloat16, "cpu", "reference")


def test_a_quick_run_does_not_count(results, tmp_path):
    (row,) = rows(timed(changed(results, tmp_path, size="quick")))
    assert "json" not in row["verified_by"], "it is verified in the run"


def test_a_check_of_native_kernels_holds_for_one_level(results, tmp_path, monkeypatch):
    (check,) = json.loads(results.read_text())["proofs"]
    file = changed(results, tmp_path, proofs=[check | {"backend": "native"}], isa="scalar")
    monkeypatch.setattr(verified_files.native, "isa", lambda: "avx2")
    result = timed(file)
    assert result.exit_code == 2 and "made at level scalar, but avx2 is in use here" in words(result.stderr)
    monkeypatch.setattr(verified_files.native, "isa", lambda: "scalar")
    assert timed(file).exit_code == 0


def test_an_operator_that_a_file_rejects_is_not_timed(results, tmp_path):
    (check,) = json.loads(results.read_text())["proofs"]
    check["verdict"] = "fail"
    check["report"]["findings"] = [{"text": "y is wrong"}]
    result = timed(changed(results, tmp_path, proofs=[check]))
    assert result.exit_code == 1 and rows(result) == []
    assert "mhc.expand on reference was not timed: y is wrong (changed.json)" in words(result.stderr)


@pytest.mark.parametrize("what, message", [
    ({"source": "0" * 64}, "made for other code: source 000000000000 there"),
    ({"machine": {"gpus": [{"name": "NVIDIA H100"}], "cpu": "x"}}, "made on another machine, NVIDIA H100; this one is"),
    ({"interrupted": True}, "its run was interrupted"),
])  # fmt: skip
def test_files_for_other_source_or_another_machine_are_refused(results, tmp_path, what, message):
    result = timed(changed(results, tmp_path, **what))
    assert result.exit_code == 2 and message in words(result.stderr)


def test_files_of_another_kind_are_refused(tmp_path):
    assert "cannot be read: No such file" in words(timed(tmp_path / "none.json").stderr)
    for text, message in (("{", "not JSON"), ("[]", "not a file of this version's")):
        (tmp_path / "bad.json").write_text(text)
        result = timed(tmp_path / "bad.json")
        assert result.exit_code == 2 and message in words(result.stderr)
