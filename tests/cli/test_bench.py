"""`goldsmith bench` with a fake clock: it verifies before it times, and rows have every condition."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import bench
from benchmarks.bench import MODULES, PEERS
from benchmarks.modules.connection import Connection
from goldsmith.assay.report.check_report import Report
from goldsmith.assay.report.results import Finding
from goldsmith.cli import app
from goldsmith.cli.bench import command, moved, verifier
from goldsmith.cli.bench.rows import Conditions, TimingRow
from goldsmith.cli.bench.subject import MakeThere, Subject, Variant
from goldsmith.cli.bench.timing import CpuClock, Timing
from goldsmith.cli.verify.checks import Check
from goldsmith.cli.verify.outcome import VerifyOutcome
from goldsmith.cli.verify.selection import Job
from goldsmith.core.device import machine
from goldsmith.core.op import Op

pytestmark = pytest.mark.sweep(2, part=1)

PREFIX = ["--device", "cpu", "--backend", "reference", "--commit", "abc1234", "--json"]


class Clock(CpuClock):
    """Every call takes 100 us, a peer's twice as long, and memory copies 1000 bytes a microsecond."""

    def compare(self, calls, budget_s):
        for call in calls.values():
            call()
        return {
            name: Timing(100.0 * k, 90.0 * k, 120.0 * k, 7, 130.0) for name, k in zip(calls, range(1, 9), strict=False)
        }

    def copy_rate(self):
        return 1000.0


@pytest.fixture(autouse=True)
def _as_outside_of_the_interpreter_and_without_a_clock(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda: replace(machine(), interpreter=False))
    monkeypatch.setattr(command, "clock", lambda device: Clock())


def run(*arguments, to="-", program=bench.app):
    """As in a checkout, with peers and modules."""
    return CliRunner().invoke(program, [*PREFIX, str(to), *arguments])


def run_installed(*arguments):
    """As from the wheel, without any."""
    return CliRunner().invoke(app, ["bench", *PREFIX, "-", *arguments])


def rows(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def words(text):
    return " ".join(text.split())


def outcome_of(request, *, verdict="pass", findings=()):
    """What verify would have found, without running it."""
    checks = []
    for name in request.names:
        made = Report(name, verdict, cases=["a float32"], findings=list(findings))
        checks.append(Check(name, request.backend, "cpu", [Job("a", "float32", "a float32")], reports=[made], done=1))
    return VerifyOutcome(checks, {})


def test_a_row_says_everything_that_a_table_needs(monkeypatch):
    requests = []
    monkeypatch.setattr(verifier.verify, "verify", lambda request, say: requests.append(request) or outcome_of(request))
    result = run("mhc.post", "--case", "T=1,D=4096", "--against", "eager")
    assert result.exit_code == 0, result.output
    assert [(r.names, r.backend, r.device, r.dtype) for r in requests] == [
        (("mhc.post",), "reference", "cpu", "bfloat16")
    ]
    ours, eager = rows(result)
    assert list(ours) == [f.name for f in fields(TimingRow)]
    assert (ours["op"], ours["case"], ours["peer"], ours["backend"]) == (
        "mhc.post", "decode[T=1,D=4096]", "goldsmith", "reference",
    )  # fmt: skip
    assert (ours["direction"], ours["mode"], ours["dtype"], ours["device"]) == ("forward", "wall", "bfloat16", "cpu")
    assert (ours["median_us"], ours["p10"], ours["p90"], ours["runs"], ours["wall_us"]) == (100, 90, 120, 7, 130)
    assert ours["bytes"] == 18 * 4096 and ours["copy_gb_s"] == 1.0
    assert ours["floor_us"] == pytest.approx(73.728) and ours["share_of_ceiling"] == pytest.approx(0.73728)
    assert (ours["verified"], eager["verified"]) == (True, None)
    assert ours["verified_by"] == "goldsmith verify, 1 cases, bfloat16"
    assert eager["peer"] == "eager" and eager["median_us"] == 200
    assert ours["error"] == float(f"{error_of_the_reference('mhc.post', 'decode[T=1,D=4096]'):.5g}"), "as JSON has it"
    assert ours["commit"] == "abc1234" and ours["versions"]["torch"] == torch.__version__
    output = words(result.stderr)
    assert "2.00x faster" in output and "1 of 1: mhc.post decode[T=1,D=4096]" in output


def error_of_the_reference(name, case):
    """|got - golden| / |golden| of the first result, on the very inputs that were timed."""
    op = Op.get(name)
    subject = Subject(op, next(c for c in op.bench if c.name == case), "cpu")
    golden = subject.reference()({n: t if t is None else t.double() for n, t in subject.tensors.items()})[0]
    got = op(*subject.tensors.values(), backend="reference", **subject.options)
    return float((got.double() - golden).norm() / golden.norm())


def test_the_error_is_of_the_first_result_and_none_where_it_means_nothing():
    golden = torch.tensor([3.0, 4.0], dtype=torch.float64)
    made = Variant("ours", lambda: (torch.tensor([3.0, 5.0]), torch.tensor([9.0])), [])
    assert verifier.relative_error(golden, made) == 0.2
    assert verifier.relative_error(golden, replace(made, comparable=False)) is None
    assert verifier.relative_error(None, made) is None and verifier.relative_error(golden * 0, made) is None


def test_an_operator_that_the_assay_rejects_is_not_timed(monkeypatch):
    bad = Finding("CERTAIN", "values", "y", None, 9.0, 1.0, "x_next exceeds its rounding bound", "a")
    monkeypatch.setattr(
        verifier.verify, "verify", lambda request, say: outcome_of(request, verdict="fail", findings=[bad])
    )
    result = run("mhc.post", "--case", "T=1,D=4096", "--against", "none")
    assert result.exit_code == 1 and rows(result) == []
    assert "mhc.post on reference was not timed: x_next exceeds its rounding bound" in words(result.stderr)


def test_an_operator_without_a_check_is_not_timed(monkeypatch):
    def nothing(request, say):
        return VerifyOutcome([Check("mhc.post", "reference", "cpu", [], reason="none of its cases applies")], {})

    monkeypatch.setattr(verifier.verify, "verify", nothing)
    result = run("mhc.post", "--case", "T=1,D=4096", "--against", "none")
    assert result.exit_code == 1 and rows(result) == []
    assert "nothing could be checked: none of its cases applies" in words(result.stderr)


def test_a_real_check_precedes_a_timing(tmp_path):
    file = tmp_path / "rows.jsonl"
    result = run("mhc.expand", "--case", "T=1,D=4096", "--against", "none", to=file)
    assert result.exit_code == 0, result.output
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["verified"] is True and "cases, bfloat16" in row["verified_by"]


def test_without_a_check_the_rows_say_so():
    result = run("mhc.expand", "--case", "T=1,D=4096", "--against", "none", "--no-verify")
    (row,) = rows(result)
    assert (row["verified"], row["verified_by"]) == (None, "not verified (--no-verify)")


def test_a_module_is_verified_in_this_process_and_timed(monkeypatch):
    runs = []
    monkeypatch.setattr(
        verifier, "check", lambda target, case, **options: runs.append((target.name, case.name)) or Report("x")
    )
    result = run("mhc.connection", "--case", "T=1,D=4096", "--against", "eager")
    assert result.exit_code == 0, result.output
    assert {name for name, _ in runs} == {"mhc.connection on reference"} and len(runs) == 4
    ours, eager = rows(result)
    assert ours["op"] == "mhc.connection" and ours["verified_by"] == "assay.check, 4 cases, bfloat16"
    assert ours["error"] == pytest.approx(eager["error"], rel=0.2)


def test_a_module_that_the_assay_rejects_is_not_timed(monkeypatch):
    bad = Finding("CERTAIN", "values", "y", None, 9.0, 1.0, "phi.grad is wrong", "a")
    monkeypatch.setattr(verifier, "check", lambda *_, **__: Report("x", "fail", findings=[bad]))
    result = run("mhc.connection", "--case", "T=1,D=4096", "--against", "none")
    assert result.exit_code == 1 and rows(result) == []
    assert "mhc.connection on reference was not timed: one_token: phi.grad is wrong" in words(result.stderr)


def test_forward_and_backward_of_a_training_case_are_rows_of_their_own(monkeypatch):
    entry = replace(Op.get("mhc.expand").bench[0], sizes={"T": 3, "n": 4, "dim": 8})
    small = Subject(Op.get("mhc.expand"), replace(entry, build=lambda **_: drawn()), "cpu")
    monkeypatch.setattr(command, "_makers", lambda *_: [lambda: small])
    result = run("mhc.expand", "--case", "T=4096", "--against", "eager", "--no-verify")
    assert [(r["direction"], r["peer"]) for r in rows(result)] == [
        ("forward", "goldsmith"), ("forward", "eager"), ("backward", "goldsmith"), ("backward", "eager"),
    ]  # fmt: skip


def drawn():
    return {"x": torch.randn(3, 8), "n": 4}


def test_a_peer_that_breaks_is_a_row_and_ends_nothing():
    def prepare(subject):
        raise ImportError("its library is for another machine\nand so on")

    broken = SimpleNamespace(NAME="broken", missing=lambda: None, prepare=prepare)
    result = run("mhc.expand", "--case", "T=1,D=4096", "--no-verify", program=bench.program({"broken": broken}, {}))
    assert result.exit_code == 0
    by_peer = {row["peer"]: row for row in rows(result)}
    assert by_peer["goldsmith"]["median_us"] == 100
    assert by_peer["broken"]["median_us"] is None
    assert by_peer["broken"]["note"] == "did not run: ImportError: its library is for another machine"
    assert "broken did not run: ImportError" in words(result.stderr)


def test_a_failure_of_ours_at_one_size_is_reported_and_other_operators_go_on(monkeypatch):
    ours = Subject.ours

    def sometimes(subject, backend):
        if subject.entry.name == "decode[T=1,D=7168]":
            raise RuntimeError("out of shared memory")
        return ours(subject, backend)

    monkeypatch.setattr(Subject, "ours", sometimes)
    monkeypatch.setattr(verifier.verify, "verify", lambda request, say: outcome_of(request))
    result = run("mhc.expand", "mhc.post", "--case", "T=1,", "--against", "none")
    assert result.exit_code == 1
    assert [(r["op"], r["case"]) for r in rows(result)] == [
        ("mhc.expand", "decode[T=1,D=4096]"), ("mhc.post", "decode[T=1,D=4096]"),
    ]  # fmt: skip
    assert "mhc.post on reference was not timed: decode[T=1,D=7168]: RuntimeError: out of shared memory" in words(
        result.stderr
    )


def test_a_missing_peer_is_reported_with_its_reason():
    absent = SimpleNamespace(NAME="liger", missing=lambda: "liger-kernel is not installed", prepare=None)
    program = bench.program({"liger": absent}, {})
    result = run("mhc.expand", "--case", "T=1,D=4096", "--no-verify", program=program)
    assert result.exit_code == 0 and "peer liger is left out: liger-kernel is not installed" in result.stderr
    result = run("mhc.expand", "--case", "T=1,D=4096", "--no-verify", "--against", "liger", program=program)
    assert result.exit_code == 2 and "--against liger: liger-kernel is not installed." in result.stderr


def test_a_peer_may_be_timed_at_some_cases_only():
    result = run("mhc.expand", "--case", "T=1,", "--no-verify", "--against", "eager:expand decode[T=1,D=7168")
    assert [(r["case"], r["peer"]) for r in rows(result)] == [
        ("decode[T=1,D=4096]", "goldsmith"), ("decode[T=1,D=7168]", "goldsmith"), ("decode[T=1,D=7168]", "eager"),
    ]  # fmt: skip


def test_times_of_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda: replace(machine(), interpreter=True))
    result = run("mhc.expand")
    assert result.exit_code == 2 and "TRITON_INTERPRET is set" in result.stderr


def test_a_cpu_times_small_sizes_unless_a_case_is_named():
    def cases(**options):
        request = command.BenchRequest(names=("mhc.post",), **options)
        return [planned.entry.name for planned in command._subjects(request, command._names(request, {}), "cpu", {})]

    assert all(name.startswith("decode") for name in cases()) and cases()
    assert cases(cases=("train[T=4096",)) == ["train[T=4096,D=2560]"]


def test_ctrl_c_keeps_the_rows_so_far(monkeypatch, tmp_path):
    class Interrupted(Clock):
        calls = 0

        def compare(self, calls, budget_s):
            Interrupted.calls += 1
            if Interrupted.calls > 1:
                raise KeyboardInterrupt
            return super().compare(calls, budget_s)

    monkeypatch.setattr(command, "clock", lambda device: Interrupted())
    file = tmp_path / "rows.jsonl"
    result = run("mhc.expand", "--case", "T=1,", "--against", "none", "--no-verify", to=file)
    assert result.exit_code == 130 and len(file.read_text().splitlines()) == 1
    assert "Interrupted: the rows so far are kept." in result.stderr


def test_each_call_takes_the_next_of_the_inputs_that_rotate():
    drawn = Op.get("mhc.expand").bench[-1]
    entry = replace(drawn, build=lambda **_: {"x": torch.arange(6.0).view(3, 2), "n": 4}, rotated=("x",))
    subject = Subject(Op.get("mhc.expand"), entry, "cpu")
    assert subject.tensors["x"].tolist() == [0.0, 1.0]
    call = subject.in_turn(subject.tensors, lambda tensors: tensors["x"][0].item())
    assert [call() for _ in range(4)] == [0.0, 2.0, 4.0, 0.0]
    subject.rewind()
    assert call() == 0.0


def test_each_number_of_threads_is_a_row_and_one_may_be_for_some_cases(monkeypatch):
    monkeypatch.setattr(verifier.verify, "verify", lambda request, say: outcome_of(request))
    before = torch.get_num_threads()
    result = run("mhc.expand", "--case", "T=1,", "--against", "none", "--threads", "1", "--threads", "2:D=7168")
    assert [(r["case"], r["threads"]) for r in rows(result)] == [
        ("decode[T=1,D=4096]", 1), ("decode[T=1,D=7168]", 1), ("decode[T=1,D=7168]", 2),
    ]  # fmt: skip
    assert torch.get_num_threads() == before
    wrong = run("mhc.expand", "--threads", "0")
    assert wrong.exit_code == 2 and "--threads 0: expected a whole number" in words(wrong.stderr)


def test_the_commit_comes_from_git_unless_it_is_given():
    assert Conditions.here("cpu", "abc").commit == "abc"
    assert len(Conditions.here("cpu").commit.rstrip("+")) in (0, *range(7, 13))


def test_bench_inputs_are_drawn_on_the_device_and_repeat():
    first, again = (MakeThere(torch.bfloat16, "cpu", 3) for _ in range(2))
    assert torch.equal(first.normal(4, 5, std=2.0), again.normal(4, 5, std=2.0))
    drawn = first.uniform(1000)
    assert drawn.dtype == torch.bfloat16 and bool((drawn < 1).all()) and bool((drawn >= 0).all())
    assert first.integers(0, 9, 6).dtype == torch.int64


def test_the_connection_counts_the_same_bytes_as_pre_and_post():
    post = {entry.name: entry for entry in Op.get("mhc.post").bench}
    pre = {entry.name: entry for entry in Op.get("mhc.pre").bench}
    for entry in Connection.entries():
        assert entry.forward_bytes == pre[entry.name].forward_bytes + post[entry.name].forward_bytes


def test_an_installed_goldsmith_times_operators_and_says_where_peers_are(monkeypatch, tmp_path):
    monkeypatch.setattr(moved, "ROOT", tmp_path)
    result = run_installed("mhc.expand", "--case", "T=1,D=4096", "--no-verify")
    assert result.exit_code == 0 and [row["peer"] for row in rows(result)] == ["goldsmith"]
    assert "python -m benchmarks.bench --against PEER" in words(result.stderr)
    for refused, message in (
        (("--against", "liger"), "an installed goldsmith has no peers"),
        (("mhc.connection",), "modules of several operators: python -m benchmarks.bench"),
    ):
        result = run_installed(*refused)
        assert result.exit_code == 2 and message in words(result.stderr)
        assert "python -m benchmarks.bench" in words(result.stderr)


@pytest.mark.parametrize("name", moved.MOVED)
def test_commands_that_have_moved_still_run_in_a_checkout_and_say_where_they_are(name, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(moved, "_run", lambda module, arguments: started.append((module, arguments)) or 3)
    result = CliRunner().invoke(app, ["bench", name, "--seeds", "1", "--help"])
    assert (result.exit_code, started) == (3, [(f"benchmarks.{name}", ["--seeds", "1", "--help"])])
    assert f"DeprecationWarning: `goldsmith bench {name}` has moved" in words(result.stderr)
    monkeypatch.setattr(moved, "ROOT", tmp_path)
    result = CliRunner().invoke(app, ["bench", name])
    assert result.exit_code == 2 and f"`python -m benchmarks.{name}`" in words(result.stderr)


@pytest.mark.parametrize("arguments", [["mhc.connection"], ["mhc.post", "--against", "liger"], ["--against=compile"]])
def test_peers_and_modules_still_run_in_a_checkout_and_say_where_they_are(arguments, monkeypatch):
    started = []
    monkeypatch.setattr(moved, "_run", lambda module, words: started.append((module, words)) or 3)
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert (result.exit_code, started) == (3, [("benchmarks.bench", arguments)])
    assert "DeprecationWarning: `goldsmith bench` with peers or modules has moved" in words(result.stderr)
    assert CliRunner().invoke(app, ["bench", "nosuch", "--against", "none"]).exit_code == 2 and len(started) == 1


def test_a_checkout_names_its_peers_and_modules():
    output = words(run("--help").output.replace("│", " "))
    assert ", ".join(MODULES) in output and ", ".join(PEERS) in output
    unknown = run("--against", "nosuch")
    assert unknown.exit_code == 2
    assert f"no peer 'nosuch'; there are: {', '.join(PEERS)}, and none" in words(unknown.stderr)
    unknown = run("nosuch")
    assert unknown.exit_code == 2 and f"modules: {', '.join(MODULES)}" in words(unknown.stderr)
