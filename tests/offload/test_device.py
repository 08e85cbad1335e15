"""The lanes of a GPU on a machine without one: kernels in Triton's interpreter, copies in a thread."""

import json

import pytest
import torch

from goldsmith import assay
from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.report import NumericsError
from goldsmith.offload.memory import machine
from goldsmith.offload.testing import inject
from offload import stores
from offload.goldens import decode, inputs, target
from offload.processes import interpreter
from offload.test_routes import Seen

LANES = ("cpu", "copied", "cached", "mixed")


class Simulation(Engine):
    """An Engine with the lanes of a simulated GPU."""

    def _machine(self):
        reason = interpreter()
        if reason is not None:
            pytest.skip(f"a GPU's lanes are simulated by Triton's interpreter: {reason}")
        self._deferred = True
        return machine.SimulatedMachine()

    def _row_bytes(self):
        return 4 * (self.store.hidden_size + self.store.intermediate_size) + 24


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 2), format="fp32")


def engine_of(store, lanes="mixed", guard="raise"):
    return Simulation(store, device="cpu", gpu_budget="24MiB", lanes=lanes, guard=guard)


@assay.case(T=[3], kind=["holes"])
def few(make, T, kind):
    return inputs(make, T, k=2, E=3, H=32, kind=kind)


@assay.case(T=[9], kind=["uniform", "holes", "twice"])
def some(make, T, kind):
    return inputs(make, T, kind=kind)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0,), format="fp32", E=3, H=32, I=16)


@pytest.mark.parametrize("lanes, dtype", [("cpu", torch.float32), ("mixed", torch.float32), ("mixed", torch.float16)])
def test_a_token_alone_has_the_same_bits_as_among_others(small, lanes, dtype):
    """Here the CPU begins first, and the merge reads its rows in host memory. No expert has more rows than the native
    library multiplies one at a time at any level (two with AVX2); beyond that, sums have another order.
    """
    x, ids, weights = stores.call(small, 0, 4, 2, dtype=dtype)
    ids[0], ids[1], ids[2] = torch.tensor([2, 0]), torch.tensor([-1, 0]), torch.tensor([1, 1])
    ids[3] = torch.tensor([2, -1])
    with engine_of(small, lanes) as engine:
        wanted = engine(0, x, ids, weights)
        alone = [engine(0, x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(4)]
        assert torch.equal(torch.cat(alone), wanted)
        stats = engine.stats()
        assert stats.t_cpu > 0 and stats.bytes_d2h > 0


@pytest.mark.parametrize("lanes, dtype", [("cpu", "float32"), ("mixed", "float32"), ("mixed", "float16")])
def test_lanes_hold_to_the_golden(small, lanes, dtype):
    with engine_of(small, lanes, guard="off") as engine:
        result = target(small, engine, getattr(torch, dtype), few)
        assay.check(result, probes=["values", "second_call", "layouts"])


@pytest.mark.slow
@pytest.mark.parametrize("lanes", LANES)
def test_every_lane_passes_all_probes(store, lanes):
    with engine_of(store, lanes, guard="off") as engine:
        assay.check(target(store, engine, torch.float32, [*decode, *some]))


def test_weights_in_another_dtype_are_not_rounded(small):
    x, ids, weights = stores.call(small, 0, 2, 2, dtype=torch.float32)
    with engine_of(small) as engine:
        wanted = engine(0, x, ids, weights.bfloat16().float())
        assert torch.equal(engine(0, x, ids, weights.bfloat16()), wanted)


@pytest.mark.parametrize("ids", [[[2, 0, 1]], [[1, 1, 0]], [[2, -1, 3]], [[0, 2, 2], [1, 0, -1]]])
def test_the_cpu_lane_computes_the_same_rows_as_without_a_gpu(small, ids):
    ids = torch.tensor(ids)
    x, weights = torch.randn(len(ids), small.hidden_size), torch.rand(ids.shape)
    with engine_of(small, "cpu") as one, Engine(small, device="cpu", lanes="cpu") as other:
        for _ in range(3):
            assert torch.equal(one(0, x, ids, weights), other(0, x, ids, weights))


def test_a_prompt_wakes_none_of_torchs_threads(small):
    """Woken threads take cores from the CPU lane: 512 tokens took 18 ms with a gather of torch, 13 without."""
    x, ids, weights = stores.call(small, 0, 70, 2, dtype=torch.float32)
    ids[3, 1] = 3  # a skipped route
    with engine_of(small) as engine:
        wanted = engine(0, x, ids, weights)
        with Seen() as seen:
            assert engine(0, x, ids, weights).equal(wanted)
    assert not {"aten.index.Tensor", "aten.index_put_.default", "aten.gather.default"} & set(seen.names)


def test_a_call_in_pieces_is_the_same_calls_one_after_the_other(small):
    """Each piece has its own counts, so an expert's rows begin elsewhere in each."""
    x, ids, weights = stores.call(small, 0, 7, 2, dtype=torch.float32)
    ids[:3], ids[5] = torch.tensor([2, 2]), -1
    for lanes in ("cpu", "copied"):
        with engine_of(small, lanes) as engine:
            wanted = [engine(0, x[at : at + 2], ids[at : at + 2], weights[at : at + 2]) for at in range(0, 7, 2)]
            engine.reset_stats()
            engine._lanes.most_rows = 5
            assert torch.equal(engine(0, x, ids, weights), torch.cat(wanted))
            assert (engine.stats().calls, engine.stats().tokens) == (1, 7)


def test_the_launched_work_of_a_failed_call_is_waited_for(small, monkeypatch):
    x, ids, weights = stores.call(small, 0, 3, 2, dtype=torch.float32)
    with engine_of(small) as engine:
        wanted = engine(0, x, ids, weights)
        before = engine._lanes._end
        with monkeypatch.context() as patch:
            patch.setattr(engine._lanes, "_lists", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine(0, x, ids, weights)
        assert engine._lanes._end is not before
        assert torch.equal(engine(0, x, ids, weights), wanted)


def test_faults_are_raised_one_call_later(store):
    x, ids, weights = stores.call(store, 0, 3, 2, dtype=torch.float32)
    with engine_of(store) as engine:
        clean = engine(0, x, ids, weights)
        with inject(engine, "input", layer=0, rows=[1]):
            assert torch.isnan(engine(0, x, ids, weights)[1]).all()
            with pytest.raises(NumericsError) as raised:
                engine(2, x, ids, weights)
        assert (raised.value.report.layer, raised.value.report.rows) == (0, (1,))
        assert torch.equal(engine(0, x, ids, weights), clean)
        with inject(engine, "transfer", layer=2, expert=int(ids[0, 0])):
            engine(2, x, ids, weights)
            with pytest.raises(NumericsError) as raised:
                engine.end_forward()
        report = raised.value.report
        assert (report.layer, report.cause, report.experts) == (2, "transfer", (int(ids[0, 0]),))


def test_a_failed_transfer_is_also_found_for_a_single_token(small):
    """The merge reads these rows in host memory, unless faults are planted in the transfer."""
    x, ids, weights = stores.call(small, 0, 1, 2, dtype=torch.float32)
    with engine_of(small, "cpu") as engine:
        clean = engine(0, x, ids, weights)
        with inject(engine, "transfer", layer=0, expert=int(ids[0, 1])):
            assert torch.isnan(engine(0, x, ids, weights)).all()
            with pytest.raises(NumericsError) as raised:
                engine.end_forward()
        report = raised.value.report
        assert (report.stage, report.cause, report.experts) == ("transfer", "transfer", (int(ids[0, 1]),))
        assert "were finite on the CPU, but are not on the device" in report.evidence[0]
        assert torch.equal(engine(0, x, ids, weights), clean)


def test_cpu_work_of_a_failed_call_ends_before_its_buffers_are_reused(store, monkeypatch):
    x, ids, weights = stores.call(store, 0, 1, 4, dtype=torch.float32)
    with engine_of(store, "cpu") as engine:
        clean = engine(0, x, ids, weights)
        with inject(engine, "input", layer=0):
            engine(0, x, ids, weights)
        beside, seen = engine._lanes.cpu, []
        with pytest.raises(NumericsError):
            engine(2, x, ids, weights)
        begun = beside.lane._busy
        assert begun is not None
        read = beside.x._buffers[beside.x._at].data_ptr()
        of_size = beside._of_size
        monkeypatch.setattr(beside, "_of_size", lambda n: seen.append(beside.lane._busy) or of_size(n))
        assert torch.equal(engine(0, x, ids, weights), clean) and seen == [None]
        assert beside.x._buffers[beside.x._at].data_ptr() != read


def test_15_a_graph_capture_is_refused_before_any_work(small, monkeypatch):
    x, ids, weights = stores.call(small, 0, 2, 2, dtype=torch.float32)
    with engine_of(small) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "device", torch.device("cuda", 0))
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph, .* between the calls"):
                engine(0, x, ids, weights)
        assert engine.stats().calls == 0 and torch.isfinite(engine(0, x, ids, weights)).all()


def test_times_and_spans_are_reported_by_lane(store, tmp_path):
    x, ids, weights = stores.call(store, 0, 1, 6, dtype=torch.float32)
    with engine_of(store) as engine, engine.trace(tmp_path / "t.json"):
        engine(0, x, ids, weights)
        stats = engine.stats()
    block = store.expert_nbytes(0)
    assert all(getattr(stats, f"t_{lane}") > 0 for lane in ("cpu", "link", "device", "merge"))
    assert stats.bytes_h2d == 4 * block + 2 * 4 * store.hidden_size and stats.bytes_d2h == x.nbytes
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {lanes[e["tid"]] for e in events if e["ph"] == "X"} == {"call", "cpu", "link", "device", "merge"}
