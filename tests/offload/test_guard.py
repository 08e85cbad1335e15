"""The guard names each cause, planted or real, with its stage, its experts and its rows."""

import json
import math
import pickle
import warnings

import pytest
import torch

from goldsmith.offload import ExpertStore
from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.report import NumericsError, NumericsReport, NumericsWarning
from goldsmith.offload.testing import inject
from offload import stores

CAUSES = {
    "weights": "weights", "input": "input", "routing": "input", "gate_up": "overflow", "activation": "overflow",
    "product": "overflow", "down": "overflow", "transfer": "transfer", "merge": "merge", "race": "race",
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(1, 3))


def engine_of(store, lanes="mixed", guard="raise", **options):
    return Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes, guard=guard, **options)


def report_of(engine, *call):
    with pytest.raises(NumericsError) as raised:
        engine(*call)
    return raised.value.report


@pytest.mark.parametrize("lanes", ["cpu", "copied", "cached"])
@pytest.mark.parametrize("stage", CAUSES)
def test_a_planted_fault_is_named(store, stage, lanes):
    x, ids, weights = stores.call(store, 3, 9, 2)
    e = int(ids[4, 0])
    hit = sorted((ids == e).any(1).nonzero()[:, 0].tolist())
    with engine_of(store, lanes) as engine:
        clean = engine(3, x, ids, weights)
        if stage in ("input", "routing"):
            with inject(engine, stage, layer=3, rows=[4]):
                report = report_of(engine, 3, x, ids, weights)
            assert (report.experts, report.rows, report.lane) == ((), (4,), None)
        else:
            engine._caches[3].clear()  # a slot that is already filled is not filled again
            with inject(engine, stage, layer=3, expert=e):
                report = report_of(engine, 3, x, ids, weights)
            assert (report.experts, list(report.rows), report.lane) == ((e,), hit, lanes)
        wanted = {"race": "down"}.get(stage, stage)
        assert (report.layer, report.stage, report.cause, report.kind) == (3, wanted, CAUSES[stage], "nan")
        assert report.first and report.num_rows == len(report.rows) and report.call == 2
        assert f"layer 3, stage {wanted!r}" in str(report) and report.evidence and report.advice
        engine._caches[3].clear()
        assert torch.equal(engine(3, x, ids, weights), clean)  # only one call had it


@pytest.mark.parametrize("stage", ["gate_up", "race"])
def test_a_refilled_slot_is_not_mistaken_for_a_broken_transfer(store, stage):
    x = torch.randn(9, store.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.arange(18).view(9, 2) % 6
    size = store.expert_nbytes(3)
    with Engine(store, device="cpu", gpu_budget=2 * size, lanes="copied") as engine:
        assert engine.spending.staging == 2  # six experts through two slots: the first is gone when the guard looks
        with inject(engine, stage, layer=3, expert=0):
            report = report_of(engine, 3, x, ids, torch.full((9, 2), 0.5))
    wanted = {"race": ("down", "race")}.get(stage, (stage, "overflow"))
    assert (report.stage, report.cause, report.experts) == (*wanted, (0,))


@pytest.mark.parametrize("left", ["cpu", "device"])
def test_a_lane_that_writes_nothing_is_found_and_no_stale_row_is_used(store, left, monkeypatch):
    x, ids, weights = stores.call(store, 3, 9, 6)
    with engine_of(store) as engine:
        engine(3, x, ids, weights)  # its stale rows are still there, and finite
        lanes = engine._lanes
        place = lanes._place
        monkeypatch.setattr(lanes, "_place", lambda *of: None if of[-1] == left else place(*of))
        report = report_of(engine, 3, x, ids, weights)
    assert (report.stage, report.cause) == ("merge", "merge") and "were never written" in report.evidence[0]
    assert report.experts and {e % 3 == 0 for e in report.experts} == {left == "cpu"}


def test_an_infinity_is_reported_as_inf(store):
    x, ids, weights = stores.call(store, 1, 3, 2)
    with engine_of(store) as engine, inject(engine, "input", layer=1, rows=[1], value=math.inf):
        assert report_of(engine, 1, x, ids, weights).kind in ("nan", "inf")


def test_nan_weights_in_the_checkpoint_are_named(tmp_path):
    source = {0: stores.weights()}
    source[0]["down"][2, 5, 7] = math.nan
    store = ExpertStore.build(source, tmp_path / "a.store", allow_nonfinite=True)
    x, ids, weights = stores.call(store, 0, 20, 2)
    with engine_of(store) as engine:
        report = report_of(engine, 0, x, ids, weights)
    assert (report.stage, report.cause, report.experts, report.lane) == ("weights", "weights", (2,), "cached")
    assert "its checksum matches" in report.evidence[0]


def test_weights_damaged_after_the_build_are_named(tmp_path):
    path = tmp_path / "a.store"
    store = stores.build(path, layers=(0,))
    with open(path, "r+b") as file:  # a page of the file changes under the mapping, as on a bad disk
        at = store.raw(0, 4).data_ptr() - store._bytes.data_ptr()
        file.seek(at)
        file.write(b"\xff" * 64)
    x, ids, weights = stores.call(store, 0, 20, 2)
    with engine_of(store, "cpu") as engine:
        report = report_of(engine, 0, x, ids, weights)
    assert (report.stage, report.cause, report.experts) == ("weights", "weights", (4,))
    assert "is not finite, and its bytes" in report.evidence[0] or "is finite in the store, but" in report.evidence[0]
    assert "not those that were written (section gate)" in report.evidence[0]


def scaled(path, **factors):
    """A float32 store whose tensors are scaled."""
    source = stores.weights(dtype=torch.float32)
    for name, factor in factors.items():
        source[name] = source[name] * factor
    return ExpertStore.build({0: source}, path, activation=("relu2" if "relu" in path.name else "silu"))


@pytest.mark.parametrize("stage, name, factors, x_scale", [
    ("gate_up", "a", {"gate_up": 1e25}, 1e20), ("activation", "relu", {"gate_up": 1e20}, 1.0),
    ("product", "a", {"gate_up": 1e20}, 1.0), ("down", "a", {"gate_up": 1e15, "down": 1e20}, 1.0),
], ids=["gate_up", "activation", "product", "down"])  # fmt: skip
def test_a_real_overflow_is_found_in_the_stage_where_it_happens(tmp_path, stage, name, factors, x_scale):
    store = scaled(tmp_path / f"{name}.store", **factors)
    x, ids, weights = stores.call(store, 0, 5, 2, dtype=torch.float32)
    with engine_of(store) as engine:
        report = report_of(engine, 0, x * x_scale, ids, weights)
    assert (report.stage, report.cause) == (stage, "overflow")
    assert "a recomputation gives it again" in report.evidence[0] and "max |" in report.evidence[0]


def test_sums_beyond_the_dtype_are_an_overflow_of_the_merge(tmp_path):
    store = ExpertStore.build({0: stores.weights(dtype=torch.float32, scale=30.0)}, tmp_path / "a.store")
    x, ids, weights = stores.call(store, 0, 5, 2, dtype=torch.float16)
    with engine_of(store) as engine:
        assert torch.isfinite(engine(0, x, ids, weights)).all()
        report = report_of(engine, 0, x, ids, weights * 1e6)
    assert (report.stage, report.cause, report.kind, report.experts) == ("merge", "overflow", "inf", ())
    assert "do not fit" in report.evidence[0] or "does not fit float16" in report.evidence[0]


def test_nan_in_a_router_names_the_input_and_no_expert(store):
    x, ids, weights = stores.call(store, 1, 4, 2)
    weights[2, 1] = math.nan
    with engine_of(store) as engine:
        report = report_of(engine, 1, x, ids, weights)
    assert (report.stage, report.cause, report.rows, report.experts) == ("routing", "input", (2,), ())
    assert "the router is at fault. They arrived like this; there is no layer" in str(report)


def test_nothing_is_masked_with_warn_and_off(store):
    x, ids, weights = stores.call(store, 1, 4, 2)
    x[3, 0] = math.nan
    with engine_of(store, guard="off") as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        off = engine(1, x, ids, weights)
    with engine_of(store, guard="warn") as engine:
        with pytest.warns(NumericsWarning, match="NaN in layer 1, stage 'input'") as warned:
            warn = engine(1, x, ids, weights)
        assert isinstance(warned[0].message.report, NumericsReport)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine(1, x, ids, weights)  # once per layer and cause
        with pytest.warns(NumericsWarning, match="layer 3"):
            engine(3, x, ids, weights)
    assert torch.isnan(off[3]).all() and not torch.isnan(off[:3]).any()
    assert torch.equal(off.isnan(), warn.isnan()) and torch.equal(off[:3], warn[:3])


def test_a_report_says_whether_the_layer_before_was_clean(store):
    x, ids, weights = stores.call(store, 1, 4, 2)
    bad = x.clone()
    bad[1] = math.nan
    with engine_of(store, guard="warn") as engine, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine(1, bad, ids, weights)
        engine(3, bad, ids, weights)
        reports = [w.message.report for w in seen]
    assert [r.first for r in reports] == [True, False]
    assert "layer 1, the experts before this one, was not clean" in reports[1].evidence[0]
    with engine_of(store) as engine:
        engine(1, x, ids, weights)
        report = report_of(engine, 3, bad, ids, weights)
    assert report.first and "layer 1, the experts before this one, was clean" in report.evidence[0]


def test_positions_are_reported_if_known(store):
    x, ids, weights = stores.call(store, 1, 6, 2)
    x[4, 1] = math.nan
    with engine_of(store) as engine:
        engine.begin_forward(2, 3)
        report = report_of(engine, 1, x, ids, weights)
    assert report.positions == ((1, 1),)
    with engine_of(store) as engine:
        assert report_of(engine, 1, x, ids, weights).positions == ()


def test_at_most_a_thousand_rows_are_listed(store):
    x, ids, weights = stores.call(store, 1, 1200, 1)
    with engine_of(store) as engine:
        report = report_of(engine, 1, x * math.nan, ids, weights)
    assert (len(report.rows), report.num_rows) == (1000, 1200)


def test_a_report_goes_through_json_and_pickle(store):
    x, ids, weights = stores.call(store, 1, 2, 1)
    with engine_of(store) as engine, pytest.raises(ArithmeticError) as raised:
        engine(1, x * math.inf, ids, weights)
    error = raised.value
    assert json.loads(json.dumps(error.report.to_dict()))["stage"] == "input"
    assert pickle.loads(pickle.dumps(error)).report == error.report and str(error) == str(error.report)


def test_the_rows_of_a_piece_are_counted_from_the_whole_call(store):
    x, ids, weights = stores.call(store, 1, 20, 2)
    x[17, 0] = math.nan
    with engine_of(store) as engine:
        engine._lanes.most_rows = 8
        assert report_of(engine, 1, x, ids, weights).rows == (17,)


@pytest.mark.parametrize("wrong, text", [
    ({"stage": "gate"}, "stage='gate' is unknown"), ({"expert": 99}, "expert=99, but layer 1 has 0..5"),
    ({"times": 0}, "times=0"),
])  # fmt: skip
def test_invalid_faults_are_refused(store, wrong, text):
    with engine_of(store) as engine, pytest.raises(ValueError, match=text.replace("[", r"\[")):
        with inject(engine, **{"stage": "input", "layer": 1} | wrong):
            pass
