"""The guard over a call that is computed in pieces: each is checked, and the report is about the first bad one."""

import math
import warnings

import pytest
import torch

from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.report import NumericsError, NumericsWarning
from goldsmith.offload.testing import inject
from offload import stores
from offload.test_device import engine_of as simulated

T, K, ROWS = 12, 2, 8  # three pieces of four tokens


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 2), format="fp32")


def on_a_cpu(store, lanes="mixed", guard="raise"):
    return Engine(store, device="cpu", gpu_budget="24MiB", lanes=lanes, guard=guard)


@pytest.fixture(params=[on_a_cpu, simulated], ids=["on a CPU", "simulated"])
def make(request, store):
    """An engine whose calls run in pieces, and the arguments of one call."""

    def build(*arguments, **options):
        engine = request.param(store, *arguments, **options)
        engine._lanes.most_rows = ROWS
        return engine, *stores.call(store, 0, T, K, dtype=torch.float32)

    return build


def report_of(engine, *call):
    with pytest.raises(NumericsError) as raised:
        engine(*call)
        engine.flush()
    return raised.value.report


def reports(warned):
    return [w.message.report for w in warned if issubclass(w.category, NumericsWarning)]


@pytest.mark.parametrize("lanes", ["cpu", "copied", "cached", "mixed"])
def test_a_nan_is_found_in_any_piece(make, lanes):
    engine, x, ids, weights = make(lanes)
    with engine:
        clean = engine(0, x, ids, weights)
        for row in (0, 5, 11):
            bad = x.clone()
            bad[row, 3] = math.nan
            report = report_of(engine, 0, bad, ids, weights)
            assert (report.layer, report.stage, report.rows, report.first) == (0, "input", (row,), True)
            assert torch.equal(engine(0, x, ids, weights), clean)


@pytest.mark.parametrize("stage", ["down", "race", "weights", "transfer"])
def test_the_origin_is_found_in_the_first_and_the_last_piece(make, stage):
    engine, x, ids, weights = make("copied")
    e = int(ids[1, 0])
    piece = [row for row in range(4) if e in ids[row]]
    with engine, inject(engine, stage, layer=0, expert=e):
        report = report_of(engine, 0, x, ids, weights)
    wanted = {"race": "down"}.get(stage, stage)
    assert (report.layer, report.stage, report.experts, report.lane) == (0, wanted, (e,), "copied")
    assert list(report.rows) == piece and report.first


def test_rows_of_a_fault_are_counted_from_the_first_token_of_the_call(make):
    engine, x, ids, weights = make("copied", guard="off")
    with engine:
        clean = engine(0, x, ids, weights)
        with inject(engine, "down", layer=0, rows=[5]):
            out = engine(0, x, ids, weights)
    rest = [row for row in range(T) if row != 5]
    assert torch.isnan(out[5]).any() and torch.equal(out[rest], clean[rest])


def test_the_next_layer_says_that_the_one_before_was_not_clean(make):
    """A clean later piece does not make the layer clean."""
    engine, x, ids, weights = make(guard="warn")
    x[0] = math.nan
    with engine, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine(0, x, ids, weights)
        engine(2, x, ids, weights)
        engine.flush()
    first, later = reports(seen)
    assert (first.layer, first.first, later.layer, later.first) == (0, True, 2, False)
    assert "layer 0, the experts before this one, was not clean" in later.evidence[0]


def test_another_cause_in_a_later_piece_is_reported_too(make):
    engine, x, ids, weights = make("cpu", guard="warn")
    x[10] = math.nan
    with engine, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with inject(engine, "down", layer=2, rows=[1]):
            engine(2, x, ids, weights)
            engine.flush()
    result = reports(seen)
    assert [(r.cause, r.rows, r.first) for r in result] == [("overflow", (1,), True), ("input", (10,), True)]
    assert "layer 0, the experts before this one, was clean" in result[1].evidence[0]


class Waits:
    """Counts the waits for the device."""

    def __init__(self, lanes):
        self.count = 0
        lanes.machine.new_mark, self._unset = self._marked, lanes.machine.new_mark

    def _marked(self):
        mark = self._unset()
        mark.synchronize = self._counted
        return mark

    def _counted(self):
        self.count += 1


@pytest.mark.parametrize("guard, rows, waits", [("raise", 24, 0), ("raise", 12, 1), ("off", 12, 0)])
def test_the_device_is_waited_for_only_between_pieces_and_only_for_the_guard(store, guard, rows, waits):
    x, ids, weights = stores.call(store, 0, T, K, dtype=torch.float32)
    with simulated(store, "copied", guard=guard) as engine:
        engine._lanes.most_rows = rows
        seen = Waits(engine._lanes)
        engine(0, x, ids, weights)
        assert seen.count == waits
