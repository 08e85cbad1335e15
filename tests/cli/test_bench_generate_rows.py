"""Rows of `goldsmith bench generate`: the turns that they come from, their rules, and a run that goes on after them."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("gguf", reason="comes with the extra hf")

from benchmarks.generate import model_run, room, run
from benchmarks.generate.engines import peers
from benchmarks.generate.engines.peers import Precision, Setting
from benchmarks.generate.engines.processes import EngineError
from benchmarks.generate.model.shapes import SHAPES
from benchmarks.generate.resume import earlier, measured
from benchmarks.generate.rows import GenerateRow, Rate
from benchmarks.generate.rules import judged
from benchmarks.generate.tables import table
from benchmarks.generate.turns import Measured, rounds
from goldsmith.cli.terminal import Failure, console
from goldsmith.core import native

TINY = SHAPES["tiny"]


def generated(format="int4", dense="int4", *, rate=100.0, prompt=500.0, **more):
    """A row of goldsmith with three equal rounds."""
    fields = {"engine": "goldsmith", "label": "goldsmith", "dense_used": dense, "level": "avx2", "plan": "auto"} | more
    rates = {"decode": Rate.of([rate] * 3), "prompt": Rate.of([prompt] * 3)}
    return GenerateRow("tiny", TINY.sizes, 2, format, dense, **fields, **rates)


FIXED = {"budget": 4, "plan": "cpu", "label": "goldsmith, cpu"}
PLAIN = {"budget": 4, "plan": "", "label": "accelerate", "engine": "accelerate"}


@pytest.mark.parametrize(
    ("first", "second", "broken"),
    [
        (generated(rate=90), generated("bf16", "bf16"),
         "narrower format never decodes slower: tiny, 2 layers, decode, goldsmith: int4 reaches 90 tokens/s, bf16 100"),
        (generated("int4", "fp32", rate=90), generated("int8", "int8"), ""),  # neither is narrower everywhere
        (generated(budget=8, label="eight", prompt=10), generated(budget=4, label="four"),
         "more memory is never slower: tiny, 2 layers, prompt, int4: eight reaches 10 tokens/s, four 500"),
        (generated(budget=4), generated(**FIXED, rate=104), ""),  # within 5 %
        (generated(budget=4), generated(**FIXED, rate=110),
         "best fixed one: tiny, 2 layers, decode, int4: goldsmith reaches 100 tokens/s, goldsmith, cpu 110"),
        (generated(budget=4), generated(**PLAIN, rate=200),
         "plain offload: tiny, 2 layers, decode, int4: goldsmith reaches 100 tokens/s, accelerate 200"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_its_rates(first, second, broken):
    lines = [str(row) for row in judged([first, second]) if not row.kept]
    assert len(lines) == bool(broken) and all(line.endswith(broken) for line in lines)


def test_a_run_goes_on_after_the_rows_of_its_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    planned = [replace(generated(), decode=None, prompt=None), replace(generated(label="llama.cpp"), decode=None)]
    kept = [generated(), generated(label="llama.cpp")]
    rows.write_text("".join(json.dumps(row.to_json()) + "\n" for row in kept))
    assert measured(planned, earlier(str(rows)), 3) == kept
    assert measured(planned, earlier(str(rows)), 4) is None  # fewer rounds than are asked for
    assert measured(planned, kept[:1], 3) is None
    failed = replace(kept[1], decode=None, prompt=None, note="llama.cpp ended with signal 9")
    assert measured(planned, [kept[0], failed], 3) is None
    assert measured([replace(planned[0], level="avx512"), planned[1]], kept, 3) is None
    rows.write_text(rows.read_text() + "{")  # the end of a run that was killed
    assert len(earlier(str(rows))) == 2
    with pytest.raises(Failure, match="--resume reads the file of --json: give one"):
        earlier(None)


def test_an_interrupt_leaves_no_row_without_a_rate_or_a_reason(tmp_path, monkeypatch):
    def peer(name, **attributes):
        known = {"in_python": False, "budget": None, "plan": "", "lacks": lambda precision: None}
        known |= {"dense": lambda precision: precision.dense, "bytes": lambda *sizes: 0}
        return SimpleNamespace(name=name, label=name, **(known | attributes))

    engines = [peer(name) for name in ("whole", "first round", "failed", "waiting")]
    engines.append(peer("unfit", lacks=lambda precision: "has no int4"))
    monkeypatch.setattr(
        model_run.room, "fitted", lambda *_: SimpleNamespace(layers=2, checked=2, together=True, why="")
    )
    request, setting, precision = run.GenerateRequest(rounds=1), Setting(1, "cpu", 64), Precision("int4", "int4")
    model = model_run.ModelRun(request, setting, TINY, precision, None, engines, tmp_path, console(stderr=True))

    def interrupted():
        model.measured["whole"].prompt, model.measured["whole"].decode = [5.0], [2.0]
        model.measured["first round"].prompt = [4.0]
        model.measured["failed"].failed = "failed ended with signal 9"
        model.notes["waiting"] = "computes in float32"
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "measure", interrupted)
    written = []
    conditions = SimpleNamespace(device="cpu", machine="m", versions={}, commit="c", date="d")
    current = SimpleNamespace(
        conditions=conditions, load=None, shown=0, err=console(stderr=True), stream=console(), write=written.extend
    )
    with pytest.raises(KeyboardInterrupt):
        run._measured(model, current, {}, measured_before=[], rounds=1)
    assert [row.label for row in written] == ["whole", "first round", "failed", "unfit"]
    planned = [replace(row, decode=None, prompt=None, note="") for row in written]
    assert measured(planned[:1], written, 1) == written[:1]
    assert all(measured(planned[:n], written, 1) is None for n in (2, 3))  # these are measured again


def test_engines_take_turns_and_one_that_ends_is_not_waited_for():
    turns = []

    class Engine:
        def __init__(self, name):
            self.name = name

        def ask(self, verb, word="-", ids=()):
            turns.append((self.name, verb))
            if self.name == "b" and turns.count(("b", "prompt")) == 2:
                raise EngineError("b ended with signal 9")
            return {"seconds": 0.5} if verb == "prompt" else {"seconds": [0.1] * int(word)}

        def memory(self):
            return {"resident": 5, "peak": 7}

    loaded = {name: Engine(name) for name in "ab"}
    results = {name: Measured() for name in "ab"}
    rounds(dict.fromkeys("ab"), results, 3, list(range(20)), 4, lambda: None, lambda: None, keep=loaded)
    assert [name for name, verb in turns if verb == "prompt"] == ["a", "b", "a", "b", "a"]
    assert results["a"].prompt == [40.0] * 3 and results["a"].decode == pytest.approx([10.0] * 3)
    assert (results["b"].failed, len(results["b"].prompt)) == ("b ended with signal 9", 1)
    # those that do not fit together follow one another, each loaded once
    turns.clear()
    Engine.close = lambda self: turns.append((self.name, "close"))
    results = {name: Measured() for name in "ab"}
    rounds(
        {name: partial(Engine, name) for name in "ab"}, results, 2, [0] * 20, 4, lambda: None, lambda: None, keep=None
    )
    order = [(name, verb) for name, verb in turns if verb != "decode"]
    assert order == [("a", "prompt")] * 3 + [("a", "close")] + [("b", "prompt")] * 2 + [("b", "close")]
    assert (len(results["a"].decode), results["b"].failed) == (2, "b ended with signal 9")


def test_the_table_is_80_columns_wide(capsys, monkeypatch):
    rate = Rate.of([1023.0, 1100.0, 1000.0])
    row = GenerateRow(
        "small", SHAPES["small"].sizes, 8, "int4", "fp32", "goldsmith", "goldsmith", prompt_tokens=512,
        decode_tokens=128, prompt=rate, decode=rate, verified=True, error=1.2e-6, share_of_read=0.35,
        memory={"stated": 1 << 30, "resident": 1100 << 20},
    )  # fmt: skip
    stream = console()
    stream.width = 80
    stream.print(table([row]))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 80
    assert "1,023 ±5 %" in lines[2] and "1.1 GiB (1.0 GiB)" in lines[2]


def test_budgets_and_plans_reach_the_engine_on_a_gpu_and_decide_whether_all_are_loaded_at_once(monkeypatch, tmp_path):
    options = []
    monkeypatch.setattr(peers, "EngineProcess", lambda name, words, *_: options.append(json.loads(words[-1])))
    setting = Setting(2, "cuda", 64, known=frozenset({"dense_format"}))
    ours, plain = peers.goldsmith(setting, "4GiB", "cpu"), peers.accelerate(setting, "4GiB", 4 << 30)
    ours.start(tmp_path, TINY, Precision("int4", "int4"), tmp_path)
    assert [options[0].get(name) for name in ("budget", "lanes", "prefill", "dense_format")] == [
        "4GiB",
        "cpu",
        "cpu",
        None,
    ]
    assert (ours.label, ours.budget, ours.plan) == ("goldsmith, budget 4GiB, cpu", 4 << 30, "cpu")
    assert ours.dense(Precision("int4", "int4")) == "fp32"  # packed dense layers are for CPUs

    def together(*engines, gpu):
        return room.fitted(TINY, Precision("bf16", "bf16"), engines, 64, tmp_path, gpu << 30).together

    monkeypatch.setattr(room, "available", lambda: 8 << 30)
    assert together(ours, plain, gpu=16) and not together(ours, plain, gpu=8)
    assert not together(peers.goldsmith(setting, "auto"), gpu=80)  # takes all that is free


def test_a_level_below_the_machines_holds_torch_as_well(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: SimpleNamespace(gs_machine_level=lambda: 3))
    assert peers.levels("avx2") == {
        "GOLDSMITH_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }  # fmt: skip
    assert peers.levels("avx512") == {"GOLDSMITH_ISA": "avx512"} and peers.levels("avx512_vnni") == {}
