"""The lanes on a GPU: the golden, and the hazards of streams with deliberately delayed work."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from goldsmith import assay
from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.report import NumericsError
from goldsmith.offload.lanes import cpu_lane
from goldsmith.offload.testing import inject
from offload import stores
from offload.goldens import decode, inputs, target

pytestmark = pytest.mark.gpu
LANES = ("cpu", "copied", "cached", "mixed")
FORMATS = ("fp32", "bf16", "int8", "int4", "int4_asym", "mxfp4", "fp8_block")
LATE = 100_000_000  # cycles of a GPU: about 50 ms


@pytest.fixture(scope="module")
def store_of(tmp_path_factory):
    built = {}

    def of(format="bf16", **options):
        key = (format, *options.items())
        if key not in built:
            group = {"group_size": 32} if format in ("int8", "int4", "int4_asym") else {}
            path = tmp_path_factory.mktemp("stores") / "a.store"
            built[key] = stores.build(path, format=format, **group | options)
        return built[key]

    return of


def engine_of(store, lanes="mixed", guard="raise", budget="64MiB", **options):
    return Engine(store, device="cuda", gpu_budget=budget, lanes=lanes, guard=guard, exact=False, **options)


def call_of(store, T=5, k=3, dtype=torch.bfloat16, layer=0):
    return tuple(t.cuda() for t in stores.call(store, layer, T, k, dtype=dtype))


@assay.case(T=[37], why="prefill: experts with many tokens and with few")
def prefill(make, T):
    return inputs(make, T)


@assay.case(T=[70], why="more rows of an expert than a tile has")
def wide(make, T):
    return inputs(make, T, H=192)


@assay.case(T=[9], kind=["holes", "twice"])
def odd(make, T, kind):
    return inputs(make, T, kind=kind)


@pytest.mark.parametrize("lanes", LANES)
def test_every_lane_holds_to_the_golden(store_of, lanes):
    with engine_of(store_of(), lanes, guard="off") as engine:
        assay.check(target(store_of(), engine, torch.bfloat16, [*decode, *prefill, *odd]), device="cuda")


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_lane_holds_to_the_golden_in_every_format_and_dtype(store_of, format, dtype, lanes):
    with engine_of(store_of(format), lanes, guard="off") as engine:
        result = target(store_of(format), engine, dtype, [*decode, *prefill])
        assay.check(result, device="cuda", probes=["values", "second_call"])


@pytest.mark.parametrize("group", [8, 48, 64], ids="groups of {}".format)
@pytest.mark.parametrize("format", ["int8", "int4", "int4_asym"])
def test_a_prompt_has_groups_of_any_size(store_of, format, group):
    store = store_of(format, group_size=group, H=192, I=192)
    with engine_of(store, "copied", guard="off") as engine:
        for dtype in (torch.bfloat16, torch.float16):
            assay.check(target(store, engine, dtype, wide), device="cuda", probes=["values"])


def test_gpt_oss_biases_and_limits_hold_to_the_golden(store_of):
    store = store_of("bf16", bias=True, activation="swiglu_oai", limit=7.0)
    with engine_of(store, guard="off") as engine:
        assay.check(target(store, engine, torch.bfloat16, prefill), device="cuda", probes=["values"])


def test_the_same_calls_give_the_same_bits(store_of):
    call = call_of(store_of(), T=40)
    items = []
    for _ in range(2):
        with engine_of(store_of()) as engine:
            items += [engine(0, *call) for _ in range(3)]
    assert all(torch.equal(y, items[0]) for y in items)


def test_a_late_compute_stream_reads_and_releases_nothing_early(store_of):
    """Hazards 1, 2 and 3: x arrives late on the CPU; slots are read late and must not be refilled before."""
    store = store_of()
    call = call_of(store)
    with engine_of(store) as engine:
        wanted = engine(0, *call)
    for lanes in LANES:
        with engine_of(store, lanes, budget="24MiB") as engine:
            for transit in (engine._lanes.cpu.x, engine._lanes.cpu.results):
                transit.take((4096,), torch.float32).fill_(float("nan"))
            for _ in range(3):
                torch.cuda._sleep(LATE)
                y = engine(0, *call)
            torch.cuda._sleep(LATE)
            again = engine(0, *call)
            difference = (y - wanted).abs().max() + (again - wanted).abs().max()
            assert float(difference) < 0.1 * float(wanted.abs().max())


def test_a_late_copy_stream_is_waited_for(store_of):
    store = store_of()
    call = call_of(store)
    for lanes in ("copied", "cached"):
        with engine_of(store, lanes) as engine:
            for arena in engine._arenas:
                arena.data.fill_(255)  # NaN in bfloat16
            with torch.cuda.stream(engine._lanes.copies.stream):
                torch.cuda._sleep(LATE)
            assert torch.isfinite(engine(0, *call)).all()
            engine.flush()


def test_a_late_copy_into_a_slot_that_is_reused_at_once(store_of):
    store = store_of()
    with engine_of(store, "copied", budget="24MiB") as engine:
        calls = [call_of(store, T=1, k=3) for _ in range(2)]
        wanted = [engine(layer, *calls[layer]) for layer in (0, 1)]
        for _ in range(20):
            for layer in (0, 1):
                torch.cuda._sleep(LATE // 50)
                assert torch.equal(engine(layer, *calls[layer]), wanted[layer])


@pytest.mark.parametrize("tokens", [1, 5, 80])
def test_a_late_cpu_is_waited_for_by_the_stream_and_not_by_the_caller(store_of, monkeypatch, tokens):
    call = call_of(store_of(), tokens)
    with engine_of(store_of()) as engine:
        assert engine.runs_ahead
        clean = engine(0, *call)
        engine.flush()
        library = cpu_lane.native.library()

        def late(*arguments):
            threading.Timer(0.3, library.gs_lane_begin, arguments).start()
            return 0

        slow = SimpleNamespace(gs_lane_begin=late, gs_lane_end=library.gs_lane_end, gs_lane_ready=library.gs_lane_ready)
        monkeypatch.setattr(cpu_lane, "native", SimpleNamespace(library=lambda: slow, check=cpu_lane.native.check))
        began = time.perf_counter()
        out = engine(0, *call)
        returned = time.perf_counter() - began
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert returned < 0.3 < time.perf_counter() - began
        assert torch.equal(out, clean)
        monkeypatch.undo()
        assert engine.stats().t_wall > 0.3


def test_it_runs_in_the_callers_stream_and_thread(store_of):
    call = call_of(store_of())
    with engine_of(store_of()) as engine:
        wanted = engine(0, *call)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE)
            y = engine(0, *call)
        last = engine(0, *call)
        stream.synchronize()
        assert torch.equal(y, wanted) and torch.equal(last, wanted)
        items = []
        thread = threading.Thread(target=lambda: items.append(engine(0, *call)))
        thread.start()
        thread.join()
        torch.cuda.synchronize()
        assert torch.equal(items[0], wanted)


def test_the_engine_takes_no_more_than_its_budget(store_of):
    store, call = store_of("bf16", H=256, I=128), None
    call = call_of(store, T=64)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with engine_of(store, budget="48MiB") as engine:
        for _ in range(100):
            engine(0, *call)
        engine.flush()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= 48 << 20 and engine.spending.total <= 48 << 20
        steady = torch.cuda.memory_stats()["num_alloc_retries"]
        assert steady == 0


def test_a_gpu_out_of_memory_in_a_call_raises_and_nothing_is_lost(store_of):
    store, few = store_of(), call_of(store_of())
    many = call_of(store, T=400_000)
    with engine_of(store) as engine:
        wanted = engine(0, *few)
        engine.flush()
        torch.cuda.empty_cache()
        share = torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        try:
            with pytest.raises(MemoryError, match=r"cuda(:0)? ran out of memory in a call of 400000 tokens in layer 0"):
                engine(0, *many)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.equal(engine(0, *few), wanted)
        store.verify()


def test_a_graph_capture_is_refused(store_of):
    call = call_of(store_of())
    with engine_of(store_of()) as engine:
        engine(0, *call)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                engine(0, *call)


def test_float16_does_not_overflow_inside(store_of):
    store = store_of("fp32", dtype=torch.float32, scale=8.0)
    x, ids, weights = call_of(store, dtype=torch.float16)
    with engine_of(store) as engine:
        y = engine(0, x * 40, ids, weights * 1e-3)
        engine.flush()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("stage", ["weights", "input", "routing", "gate_up", "down", "transfer", "race"])
def test_a_fault_is_raised_at_the_next_call(store_of, stage):
    call = call_of(store_of())
    expert = int(call[1][0, 0])
    where = {"rows": [0]} if stage in ("input", "routing") else {"expert": expert}
    with engine_of(store_of(), "copied") as engine:
        engine(0, *call)
        with inject(engine, stage, layer=0, **where):
            engine(0, *call)
            with pytest.raises(NumericsError) as raised:
                engine.end_forward()
        report = raised.value.report
        assert report.layer == 0 and report.stage == {"race": "down"}.get(stage, stage)


@pytest.mark.parametrize("lanes", LANES)
def test_a_nan_is_found_in_any_piece_of_a_prompt(store_of, lanes):
    x, ids, weights = call_of(store_of(), T=96)
    with engine_of(store_of(), lanes) as engine:
        engine._lanes.most_rows = 96  # three pieces of 32 tokens
        clean = engine(0, x, ids, weights)
        for row in (3, 40, 95):
            bad = x.clone()
            bad[row, 5] = float("nan")
            torch.cuda._sleep(LATE)
            with pytest.raises(NumericsError) as raised:
                engine(0, bad, ids, weights)
                engine.flush()
            report = raised.value.report
            assert (report.layer, report.stage, report.rows, report.first) == (0, "input", (row,), True)
        assert torch.equal(engine(0, x, ids, weights), clean)
        with inject(engine, "down", layer=1, expert=int(ids[1, 0]), rows=[1]):
            with pytest.raises(NumericsError) as raised:
                engine(1, x, ids, weights)
        report = raised.value.report
        assert (report.layer, report.stage, report.experts, report.rows) == (1, "down", (int(ids[1, 0]),), (1,))


@pytest.mark.parametrize("how", ["close", "block"])
def test_a_nan_of_the_last_call_is_raised_at_the_end(store_of, how):
    x, ids, weights = call_of(store_of())
    x[1] = float("nan")
    engine = engine_of(store_of())
    torch.cuda._sleep(LATE)
    engine(0, x, ids, weights)
    with pytest.raises(NumericsError, match="NaN in layer 0, stage 'input'"):
        if how == "close":
            engine.close()
        with engine:
            pass
    assert engine.closed


@pytest.mark.parametrize("mode", ["registered", "ring", "memory"])
def test_bytes_reach_the_device_in_every_transport_mode(store_of, monkeypatch, mode):
    import functools

    from goldsmith.offload.memory import transport

    call = call_of(store_of())
    with engine_of(store_of(), "copied") as engine:
        wanted = engine(0, *call)
    monkeypatch.setattr(transport, "Transport", functools.partial(transport.Transport, force=mode))
    with engine_of(store_of(), "copied") as engine:
        assert torch.equal(engine(0, *call), wanted)
        assert f"copies    {mode}" in str(engine.explain())
