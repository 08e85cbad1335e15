"""The hazards of experts on several lanes, each provoked; the numbers in test names are those of `HAZARDS`.

Hazards of streams are provoked on a GPU by deliberately delayed work (test_gpu.py), and on a CPU by streams that delay
everything as long as events allow (test_device_late.py).
"""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from goldsmith.offload.engine import Engine
from offload import stores

_LATE, _ALL = "test_device_late", "a_delayed_gpu_gives_the_same_numbers"
# number -> the hazard, and the tests that provoke it; only those in test_gpu need a GPU
HAZARDS = {
    1: ("rows are read before their copy from the device ends", ("test_gpu", "a_late_compute_stream"),
        (_LATE, _ALL)),
    2: ("a host buffer is filled again before its copy ended", ("test_gpu", "a_late_compute_stream"),
        ("test_slots", "2_a_buffer_is_reused_only"), (_LATE, "each_waves_list_is_read")),
    3: ("a slot is overwritten while it is read", ("test_gpu", "a_late_copy_into_a_slot"), (_LATE, _ALL),
        ("test_slots", "3_a_slot_is_not_written_before_its_last_reader")),
    4: ("a tensor is freed on another stream", ("test_gpu", "the_engine_takes_no_more_than_its_budget"),
        ("test_hazards", "4_the_arenas_are_allocated_once")),
    5: ("stream and device belong to a thread", ("test_gpu", "it_runs_in_the_callers_stream_and_thread"),
        (_LATE, _ALL), ("test_engine", "calls_from_many_threads")),
    6: ("copies from pageable memory block", ("test_gpu", "bytes_reach_the_device_in_every_transport_mode"),
        ("test_transport", "the_mode_is_the_first_that_works")),
    7: ("memory is read that nobody wrote", ("test_hazards", "7_unwritten_memory_is_never_read"),
        ("test_store_publish", "a_builder_killed_at_any_byte")),
    8: ("groups are padded", ("test_hazards", "8_an_expert_with_one_token_next_to_one_with_a_thousand")),
    9: ("ids are out of range", ("test_engine", "an_id_out_of_range_is_named_before_any_lane_starts")),
    10: ("a weight of 0 does not clear a NaN", ("test_engine", "skipped_routes_are_not_read")),
    11: ("float16 overflows inside", ("test_gpu", "float16_does_not_overflow_inside"),
         ("test_hazards", "11_float16_does_not_overflow_between_its_ends")),
    12: ("ids go through a pool of another dtype", ("test_engine", "integer_ids_and_float32_weights_keep_every_bit"),
         ("test_slots", "12_buffers_hold_bytes")),
    13: ("symptoms are masked", ("test_guard", "nothing_is_masked_with_warn_and_off")),
    14: ("forks, dead workers, endless queues", ("test_hazards", "14_an_exception_in_a_worker_is_raised_by_the_call"),
         ("test_engine", "a_fork_gets_an_error_that_says_so"), ("test_engine_lock", "a_fork_answers_or_raises")),
    15: ("a CUDA graph captures the call", ("test_gpu", "a_graph_capture_is_refused"),
         ("test_device", "15_a_graph_capture_is_refused")),
    16: ("more threads than processors", ("test_hazards", "16_two_engines_in_parallel_take_no_longer")),
}  # fmt: skip
LANES = ("cpu", "copied", "cached", "mixed")


@pytest.mark.parametrize("number", range(1, 17))
def test_every_hazard_has_its_test(number):
    _, *tests = HAZARDS[number]
    for file, name in tests:
        assert f"\ndef test_{name}" in (Path(__file__).parent / f"{file}.py").read_text(), (file, name)
    assert any(file != "test_gpu" for file, _ in tests)  # each is also provoked without a GPU


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 1), E=12)


def engine_of(store, lanes="mixed", budget="200kB", **options):
    return Engine(store, device="cpu", gpu_budget=budget, lanes=lanes, **options)


def plain(store, layer, *call):
    with Engine(store, device="cpu") as engine:
        return engine(layer, *call)


def late(engine, seconds):
    """Delays every copy, so that code that does not wait computes with old bytes."""
    copy = engine._lanes._copy

    def slowly(*arguments):
        time.sleep(seconds)
        copy(*arguments)

    engine._lanes._copy = slowly


def poison(engine):
    """Fills everything that the engine owns with NaN, or with bytes that are not finite as scales."""
    for arena in engine._arenas:
        arena.data.fill_(255)
    for rows in engine._lanes._rows:
        rows.fill_(float("nan"))


@pytest.mark.parametrize("lanes", LANES)
def test_2_3_late_slots_are_waited_for_and_not_reused_early(store, lanes):
    calls = [stores.call(store, i % 2, 4, 6, seed=i) for i in range(6)]
    with engine_of(store, lanes) as engine:
        poison(engine)
        late(engine, 0.003)
        for i, call in enumerate(calls):
            assert torch.equal(engine(i % 2, *call), plain(store, i % 2, *call))


def test_3_a_cache_smaller_than_k_under_every_policy(store):
    for cache in ("lru", "lfu", "none"):
        costs = stores.calibration(store, cpu_bytes_per_s=1e7)
        with engine_of(store, "auto", "90kB", cache=cache, calibration=costs) as engine:
            assert max(engine.spending.cache.values()) < 8
            late(engine, 0.001)
            for i in range(6):
                call = stores.call(store, 0, 2, 8, seed=i)
                assert torch.equal(engine(0, *call), plain(store, 0, *call))


def test_4_the_arenas_are_allocated_once(store):
    with engine_of(store) as engine:
        engine(0, *stores.call(store, 0, 8, 6))
        places = [arena.data.data_ptr() for arena in engine._arenas], [t.data_ptr() for t in engine._lanes._rows]
        for i in range(100):
            engine(i % 2, *stores.call(store, i % 2, 8, 6, seed=i))
        assert places == ([a.data.data_ptr() for a in engine._arenas], [t.data_ptr() for t in engine._lanes._rows])


@pytest.mark.parametrize("lanes", LANES)
def test_7_unwritten_memory_is_never_read(store, lanes):
    call = stores.call(store, 0, 9, 6)
    call[1][3] = -1
    wanted = plain(store, 0, *call)
    with engine_of(store, lanes) as engine:
        engine(0, *stores.call(store, 0, 9, 6))
        poison(engine)
        for cache in engine._caches.values():
            cache.clear()
        assert torch.equal(engine(0, *call), wanted)


def test_8_an_expert_with_one_token_next_to_one_with_a_thousand(store):
    T = 1000
    ids = torch.zeros(T, 2, dtype=torch.int64)
    ids[:, 1] = torch.arange(T) % 3 + 1
    ids[0, 1], ids[1, 1] = 10, 11
    x, weights = torch.randn(T, 64).bfloat16(), torch.rand(T, 2)
    wanted = plain(store, 0, x, ids, weights)
    for lanes in LANES[1:]:
        with engine_of(store, lanes) as engine:
            assert torch.equal(engine(0, x, ids, weights), wanted)
    from goldsmith.experts import moe

    near = moe(x.float(), ids, weights, store.experts(0))
    assert float((wanted.float() - near).abs().max()) < 0.05 * float(near.abs().max())


def test_11_float16_does_not_overflow_between_its_ends(tmp_path):
    """h reaches 9e4 here, beyond float16's 65504; x and the sum do not."""
    from goldsmith.offload import ExpertStore

    source = stores.weights(E=2, H=32, I=32, dtype=torch.float32)
    source["gate_up"] = source["gate_up"] * 100
    store = ExpertStore.build({0: source}, tmp_path / "a.store")
    x = (torch.randn(4, 32) * 3).half()
    ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.full((4, 1), 1e-3)
    numbers = store.dequantize(0, 0)
    g, u = (x.float() @ numbers["gate_up"].T).chunk(2, -1)
    assert float((torch.nn.functional.silu(g) * u).abs().max()) > 9e4
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed") as engine:
        y = engine(0, x, ids, weights)
    assert y.dtype == torch.float16 and torch.isfinite(y).all()


def test_14_an_exception_in_a_worker_is_raised_by_the_call_and_the_next_call_is_right(store):
    call = stores.call(store, 0, 4, 6)
    wanted = plain(store, 0, *call)
    for lanes in ("copied", "cached", "mixed"):
        with engine_of(store, lanes) as engine:
            copy = engine._lanes._copy
            engine._lanes._copy = lambda *arguments: 1 / 0
            with pytest.raises(ZeroDivisionError):
                engine(0, *call)
            engine._lanes._copy = copy
            for _ in range(3):
                assert torch.equal(engine(0, *call), wanted)


def test_14_a_copy_that_fails_in_a_prompt_leaves_nothing_behind(store):
    call = stores.call(store, 0, 40, 6)
    wanted = plain(store, 0, *call)
    costs = stores.calibration(store)
    with engine_of(store, "auto", "4MiB", prefill="stream", calibration=costs) as engine:
        copy = engine._lanes._copy
        engine._lanes._copy = lambda *arguments: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine(0, *call)
        engine._lanes._copy = copy
        assert engine.spending.arenas == 2
        for _ in range(2):
            assert torch.equal(engine(0, *call), wanted)


def test_running_out_of_device_memory_says_what_to_do_and_the_engine_goes_on(store, monkeypatch):
    call = stores.call(store, 0, 4, 6)
    with engine_of(store) as engine:
        wanted = engine(0, *call)

        def full(_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(engine._lanes, "run", full)
            with pytest.raises(MemoryError, match="cpu ran out of memory in a call of 4 tokens .* lower gpu_budget"):
                engine(0, *call)
        assert torch.equal(engine(0, *call), wanted)


def test_14_a_program_that_closes_nothing_still_exits(store):
    program = f"""
        import torch
        from goldsmith.offload import ExpertStore
        from goldsmith.offload.engine import Engine
        store = ExpertStore.open({str(store.path)!r})
        engine = Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed")
        ids = torch.arange(12)[None]
        engine(0, torch.randn(1, 64).bfloat16(), ids, torch.rand(1, 12))
        print("done")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


def test_14_an_unreferenced_engine_ends_its_threads(store):
    import gc
    import threading

    engine = engine_of(store, "copied")
    engine(0, *stores.call(store, 0, 4, 6))
    mine = [t for t in threading.enumerate() if t.name == "goldsmith copies"]
    assert mine
    del engine
    gc.collect()
    for thread in mine:
        thread.join(10)
    assert not any(thread.is_alive() for thread in mine)


def test_16_two_engines_in_parallel_take_no_longer_than_in_sequence(store):
    """One thread pool: their calls queue instead of competing for cores."""
    import threading

    call = stores.call(store, 0, 256, 6)
    with engine_of(store, "cpu", threads=4) as one, engine_of(store, "cpu", threads=4) as two:

        def run(engine):
            for _ in range(30):
                engine(0, *call)

        def both(at_once):
            begin = time.perf_counter()
            threads = [threading.Thread(target=run, args=(engine,)) for engine in (one, two)]
            for thread in threads:
                thread.start()
                if not at_once:
                    thread.join()
            for thread in threads:
                thread.join()
            return time.perf_counter() - begin

        ratios = [both(True) / both(False) for _ in range(5)]
    assert min(ratios) <= 1.5, ratios
