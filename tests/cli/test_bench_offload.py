"""`python -m benchmarks.offload`: verified against float64 before timing, a row for each rule and its conditions."""

import json
import re
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

import torch
from typer.testing import CliRunner

from benchmarks.common import needs
from benchmarks.offload import calls, clock, command, guard, rules, run, shapes, steps
from goldsmith.cli.bench import session
from goldsmith.cli.bench.timing import Timing
from goldsmith.core import native
from goldsmith.core.device import machine
from goldsmith.offload.calibration.calibration import Calibration
from goldsmith.offload.engine import Engine
from offload import stores
from repo.tree import ROOT

pytestmark = pytest.mark.skipif(native.reason() is not None, reason="needs the native library")


def at_once(arguments, seconds, around=nullcontext):
    """Every way is called twice, and takes 100, 200, ... us."""
    for name, call in arguments.items():
        with around(name):
            call()
            call()
    return {name: Timing(100.0 * k, 90.0 * k, 120.0 * k, 2) for k, name in enumerate(arguments, 1)}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(needs, "machine", lambda: replace(machine(), interpreter=False))
    monkeypatch.setattr(calls, "take_turns", at_once)
    monkeypatch.setattr(steps, "take_turns", at_once)
    monkeypatch.setattr(guard, "MOST", guard.LEAST)
    monkeypatch.setattr(calls, "TURNS", {1: 2})
    monkeypatch.setattr(steps, "TURNS", {1: 2})
    monkeypatch.setattr(native, "measure", lambda what, **options: 1e10)
    costs = stores.costs
    monkeypatch.setattr(run, "calibrate", lambda store, **_: Calibration(costs(store), {}, {}, "none"))


def bench(*arguments):
    options = ["--device", "cpu", "--layers", "2", "--commit", "abc1234", "--json", "-"]
    result = CliRunner().invoke(command.app, [*options, "--threads", "1", "--seconds", "0.01", *arguments])
    return result, [json.loads(line) for line in result.stdout.splitlines()]


def test_all_variants_are_timed_in_one_run_and_ours_is_verified_first():
    result, rows = bench("--tokens", "1")
    assert result.exit_code == 0, result.stderr
    ways = {(row["op"], row["case"]): [r["peer"] for r in rows if (r["op"], r["case"]) == (row["op"], row["case"])]
            for row in rows}  # fmt: skip
    calls_of = ["goldsmith", "all on the CPU", "all copied", "fixed ratio", "Fiddler's rule"]
    peers = ["transformers, CPU", "grouped_mm, CPU"]
    assert ways["offload.calls", "decode T=1, 50% cached"] == calls_of + peers
    ours = [steps.HALF, steps.NONE, steps.CPU]
    assert ways["offload.step", "decode T=1"] == [*ours, *peers, "accelerate"]
    assert {("offload.guard", "decode T=1, 50% cached"), ("offload.memory", "decode and a prompt, 50% cached")} < set(
        ways
    )
    for row in rows:
        assert row["commit"] == "abc1234" and row["versions"]["accelerate"] and row["machine"] and row["note"]
        if row["op"] == "offload.calls":
            assert row["error"] < 0.01 and row["hardware_share"] > 0
        if row["peer"].startswith("goldsmith") and row["op"] in ("offload.calls", "offload.step"):
            assert row["verified"] is True and row["verified_by"]
        elif row["op"] != "offload.guard":
            assert "verified" not in row


def test_a_rule_sends_experts_where_it_says_and_the_bound_is_the_plans():
    _, rows = bench("calls", "--tokens", "1", "--no-peers")
    by = {(row["case"].split(", ")[1], row["peer"]): row for row in rows}
    for share in ("0% cached", "50% cached"):
        cpu, copied = by[share, "all on the CPU"], by[share, "all copied"]
        assert cpu["copied"] == 0 and copied["on_cpu"] == 0
        assert cpu["on_cpu"] == copied["copied"] == 2 * (1 - cpu["hit_rate"])
        assert (cpu["hit_rate"] > 0) == (share == "50% cached")
        ours = by[share, "goldsmith"]
        assert ours["bound_share"] == pytest.approx(ours["bound_us"] / ours["median_us"], rel=1e-3)
        assert ours["overlap"] == max(ours["cpu"], ours["link"], ours["device_busy"])
    assert by["0% cached", "fixed ratio"]["on_cpu"] == by["0% cached", "fixed ratio"]["copied"] == 1


def test_the_tables_of_the_documents_agree_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import offload_rows

    def table(titles, lines):
        return "".join(" | ".join(line) + "\n" for line in [titles, *lines])

    monkeypatch.setattr(offload_rows, "RESULTS", tmp_path)
    assert offload_rows.calls(table).startswith("No measurement")
    _, rows = bench("calls", "--tokens", "1", "--cached", "0", "--no-peers")
    text = "".join(json.dumps(row | {"device": "cuda"}) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text.replace("abc1234", "older") + text)
    output = offload_rows.calls(table)
    assert "tiny, decode T=1, 0% cached | 0.05 ±15 % | 1.0, 1.0, 0.0" in output and output.count("commit abc1234") == 1
    assert "older" not in output and "all copied" in output and "grouped_mm" not in output
    assert "tiny, calibrated: GB/s cpu 1, link 1, dram 4, device 1e+03" in output


def test_the_time_of_a_calibration_is_a_row(monkeypatch):
    def busy(store, **_):
        time.sleep(0.01)
        return Calibration(stores.costs(store), {}, {}, "none", others=0.25)

    monkeypatch.setattr(run, "calibrate", busy)
    result, rows = bench("memory")
    first, memory = rows
    assert (first["op"], memory["op"]) == ("offload.calibrate", "offload.memory") and "verified" not in first
    assert first["case"].startswith("first") and "other programs took 25 % of the processors' time" in first["note"]
    assert first["figures"]["calibrate_s"] >= 0.01
    result = CliRunner().invoke(command.app, ["memory", "--device", "cpu", "--layers", "1"])
    assert result.exit_code == 0 and re.search(r"calibrate +[0-9.]+ s", result.stdout)


def test_the_times_of_a_store_need_no_calibration(monkeypatch):
    monkeypatch.setattr(run, "calibrate", None)
    _, (row,) = bench("store")
    figures = row["figures"]
    assert row["op"] == "offload.store" and "verified" not in row
    assert {name for name in figures if name.endswith("_s")} == {
        "build_s", "key_s", "find_s", "compare_s", "verify_s", "open_s"
    }  # fmt: skip
    assert all(value > 0 for value in figures.values())
    assert (
        figures["weights"] == pytest.approx(2 * 8 * 3 * 64 * 64 * 2, rel=1e-4) and figures["store"] > figures["weights"]
    )
    result = CliRunner().invoke(command.app, ["store", "--device", "cpu", "--layers", "1"])
    assert result.exit_code == 0 and "KiB" in result.stdout and " s" in result.stdout.split("verify", 2)[-1]


def test_an_engine_that_computes_something_else_is_not_timed(monkeypatch):
    whole = Engine._piece
    monkeypatch.setattr(Engine, "_direct_calls", lambda self: None)
    monkeypatch.setattr(Engine, "_piece", lambda self, *arguments: whole(self, *arguments) * 1.1)
    result, rows = bench("calls", "--tokens", "1", "--cached", "0")
    assert result.exit_code == 1
    _, *rows = rows  # after the calibration
    assert [(row["peer"], row["verified"], row.get("median_us")) for row in rows] == [("goldsmith", False, None)]
    result, (_, *rows) = bench("steps", "--tokens", "1", "--no-peers")
    assert result.exit_code == 1 and rows and not any(row["verified"] for row in rows)


def test_fiddlers_rule_puts_each_expert_where_it_alone_is_quicker(tmp_path):
    store = stores.build(tmp_path / "a.store")
    even = stores.costs(store)  # CPU and link are alike, but what is copied is computed as well
    assert rules.fiddlers_cpu([1, 0, 1, 5], frozenset({3}), even) == {0, 2}
    slow = replace(even, cpu_flops=even.cpu_flops / 1e6)
    assert rules.fiddlers_cpu([1, 0, 1, 5], frozenset({3}), slow) == set()
    ids = torch.tensor([[0, 2], [3, 1]])
    mine, others = rules.parts(ids, {0, 1}, 6)
    assert mine.tolist() == [[0, -1], [-1, 1]] and others.tolist() == [[-1, 2], [3, -1]]


@pytest.mark.parametrize("words, message", [
    (["cals"], "no part 'cals'; there are: calls, steps, guard, memory"),
    (["--shape", "gpt"], "no shape 'gpt'; there are: qwen3, v2-lite, tiny"),
    (["--format", "int3"], "no format 'int3'"),
    (["--folder", "/nosuch"], "2 layers of tiny do not fit: [Errno 2] No such file or directory"),
])  # fmt: skip
def test_unknown_parts_and_shapes_are_refused_in_a_paragraph(words, message):
    result, _ = bench(*words)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_a_busy_machine_is_reported_and_its_load_is_in_the_rows(monkeypatch):
    monkeypatch.setattr(session, "load", lambda: 7.5)
    result, rows = bench("memory", "--tokens", "1")
    assert "Others use this machine (load 7.5)" in " ".join(result.stderr.split())
    assert [(row["op"], row["load"]) for row in rows] == [("offload.calibrate", 7.5), ("offload.memory", 7.5)]


def test_no_case_is_begun_after_the_limit():
    result, rows = bench("calls", "--limit", "0")
    assert result.exit_code == 2 and rows == []


def test_the_layers_are_those_of_the_models():
    for name, experts in (("qwen3", 9.44e6), ("v2-lite", 17.3e6)):
        shape = shapes.SHAPES[name]
        assert 6 * shape.H * shape.I == pytest.approx(experts, rel=0.01)
        config = shape.config(2)
        assert config.num_hidden_layers == 2 + shape.dense and config.num_experts_per_tok == shape.k


@pytest.mark.parametrize("long, untimed", [(1.0, clock.LEAST), (0.01, 1)])
def test_ways_take_turns_and_a_slow_one_is_timed_a_few_times(long, untimed, monkeypatch):
    monkeypatch.setattr(clock, "LONG", long)
    seen = []

    def slow():
        seen.append("slow")
        time.sleep(0.02)

    @contextmanager
    def around(name):
        before = seen.count(name)
        yield
        timed[name] += seen.count(name) - before

    timed = Counter()
    result = clock.take_turns({"slow": slow, "quick": lambda: seen.append("quick")}, 0.01, around)
    assert timed == {name: each.runs for name, each in result.items()}
    assert (
        seen.count("slow") == clock.LEAST + untimed and seen.count("quick") == timed["quick"] + clock.TURNS
    )  # untimed ones
    assert result["slow"].runs == clock.LEAST and 2e4 <= result["slow"].median < 1e6
    assert result["quick"].runs > clock.LEAST and result["quick"].median < 2e4
    assert seen.index("quick") < len(seen) - seen[::-1].index("slow")  # not one after the other
