"""The Engine's interface: keywords, arguments of calls, and errors for invalid ones."""

import os
import signal
import threading

import pytest
import torch

from goldsmith.core.shapes import ShapeError
from goldsmith.offload import RoutingError
from goldsmith.offload.engine import Engine
from goldsmith.offload.settings import parse_budget
from offload import stores


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(1, 2))


@pytest.fixture(scope="module")
def engine(store):
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed") as engine:
        yield engine


@pytest.mark.parametrize("text, nbytes", [
    ("6GiB", 6 << 30), ("6GB", 6 * 10**9), ("500MiB", 500 << 20), ("1.5 GiB", 3 << 29), ("12", 12), (0, 0), (7, 7),
    ("auto", None), ("500mib", 500 << 20), ("2kB", 2000),
])  # fmt: skip
def test_valid_budgets_are_parsed(text, nbytes):
    assert parse_budget(text) == nbytes


@pytest.mark.parametrize(
    "value",
    ["", "six", "-1", "6 GiB more", "GiB", -1, 1.5, None, True, "1e9", "6Gi", "9" * 400, 2**63],
    ids=lambda value: str(value)[:20],
)
def test_invalid_budgets_are_refused(store, value):
    with pytest.raises(ValueError, match="gpu_budget=.* is not an amount of memory; give 'auto', bytes, or '6GiB'"):
        Engine(store, device="cpu", gpu_budget=value)


@pytest.mark.parametrize("options, error, text", [
    ({"device": "tpu"}, ValueError, "device='tpu' is not a device"),
    ({"device": "meta"}, ValueError, "device='meta': experts are computed only on 'cpu'"),
    ({"cache": "fifo"}, ValueError, "cache='fifo' is unknown; choose one of: 'lru'"),
    ({"guard": "quiet"}, ValueError, "guard='quiet' is unknown"),
    ({"lanes": "gpu"}, ValueError, "lanes='gpu' is unknown"),
    ({"prefill": "fast"}, ValueError, "prefill='fast' is unknown"),
    ({"prefill": 0}, ValueError, "prefill=0, expected at least 1"),
    ({"prefill": 1.5}, TypeError, "prefill=1.5"),
    ({"threads": 0}, ValueError, "threads=0, expected a number from 1"),
    ({"threads": "all"}, TypeError, "threads='all'"),
    ({"adaptive": 1}, TypeError, "adaptive=1, expected True or False"),
    ({"calibration": 3}, TypeError, "calibration=3, expected a Calibration, the path of one, or None"),
    ({"cache": "static"}, ValueError, "cache='static' needs profile="),
    ({"profile": {"counts": {}}}, ValueError, "profile= is only for cache='static'"),
    ({"cache": "static", "profile": {"counts": {"1": [1] * 6}}}, ValueError, "the profile lacks layer 2"),
    ({"cache": "static", "profile": {"counts": {"1": [1] * 8, "2": [1] * 6}}}, ValueError, "belongs to another model"),
    ({"cache": "static", "profile": {"counts": {"1": "abcdef", "2": [1] * 6}}}, ValueError, "not a list of 6 whole"),
    ({"exact": "no"}, TypeError, "exact='no', expected True or False"),
    ({"cache": "static", "profile": "/nowhere.json"}, ValueError, "profile='/nowhere.json' cannot be read"),
    ({"lanes": "copied", "gpu_budget": 0}, ValueError, "lanes='copied' cannot run: gpu_budget=0: everything is"),
    ({"lanes": "cached", "gpu_budget": "30kB"}, ValueError, "needs a slot in each of 2 layers and 2 for copies"),
    ({"lanes": "mixed", "gpu_budget": "20kB"}, ValueError, "20000 bytes are too little for two slots"),
])  # fmt: skip
def test_invalid_keywords_are_refused(store, options, error, text):
    with pytest.raises(error, match="offload.Engine") as raised:
        Engine(store, **{"device": "cpu"} | options)
    assert text in str(raised.value)


def test_a_path_is_refused_as_a_store(store):
    with pytest.raises(TypeError, match=r"store is a str, expected an ExpertStore: ExpertStore.open\(path\)"):
        Engine(str(store.path), device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_refused(store):
    with pytest.raises(ValueError, match="device='cuda', but torch sees no CUDA device; give 'cpu', or 'auto'"):
        Engine(store, device="cuda")


def test_a_lossy_store_needs_exact_false(tmp_path):
    lossy = stores.build(tmp_path / "a.store", format="int8", group_size=32)
    with pytest.raises(ValueError, match="format 'int8' does not hold .* exact=False, or .* cpu_format='auto'"):
        Engine(lossy, device="cpu")
    Engine(lossy, device="cpu", exact=False).close()


@pytest.mark.parametrize("budget", [0, "1kB", "20kB"])
def test_a_budget_below_two_slots_counts_as_none_and_says_so(store, budget):
    x, ids, weights = stores.call(store, 1, 4, 2)
    with Engine(store, device="cpu", gpu_budget=budget) as small, Engine(store, device="cpu", gpu_budget=0) as none:
        assert torch.equal(small(1, x, ids, weights), none(1, x, ids, weights))
        assert str(small.explain()).count("everything is computed on the CPU") == 1
        assert small.spending.total == 0


@pytest.mark.parametrize("budget", [30_000, 100_000, 1 << 20, 16 << 20])
def test_no_more_is_allocated_than_the_budget(store, budget):
    with Engine(store, device="cpu", gpu_budget=budget, calibration=stores.calibration(store)) as engine:
        allocated = sum(arena.data.nbytes for arena in engine._arenas)
        assert allocated == engine.spending.total <= budget


# -- arguments of a call


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("value", [-2, 7, 511, 2**31 - 1])
def test_an_id_out_of_range_is_named_before_any_lane_starts(engine, store, value, dtype):
    x, ids, weights = stores.call(store, 1, 4, 2)
    ids[2, 1] = value
    engine.reset_stats()
    with pytest.raises(
        RoutingError, match=rf"top_k_index\[2, 1\] of layer 1 is {value}, expected an expert in 0..5, or"
    ):
        engine(1, x, ids.to(dtype), weights)
    assert engine.stats().calls == 0 and engine.stats().bytes_h2d == 0


def test_an_id_beyond_32_bits_is_not_truncated(engine, store):
    x, ids, weights = stores.call(store, 1, 4, 2)
    ids[0, 0] = 2**32 + 1  # 1, if its upper half was lost
    with pytest.raises(RoutingError, match=rf"is {2**32 + 1}"):
        engine(1, x, ids, weights)


def test_skipped_routes_are_not_read(engine, store):
    x, ids, weights = stores.call(store, 1, 4, 2)
    wanted = engine(1, x, ids, torch.stack([weights[:, 0], torch.zeros(4)], 1))
    for skipped in (-1, 6):
        ids[:, 1], weights[:, 1] = skipped, float("nan")
        y = engine(1, x, ids, weights)
        assert torch.isfinite(y).all()
        assert torch.equal(y, engine(1, x, ids[:, :1], weights[:, :1]))
    assert y.shape == wanted.shape
    assert not engine(1, x, torch.full_like(ids, -1), weights).any()


@pytest.mark.parametrize("lanes", ["cpu", "mixed"])
def test_tensors_with_the_negative_bit_are_read_correctly(store, lanes):
    x, ids, weights = stores.call(store, 1, 5, 2)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes) as engine:
        wanted = engine(1, x, ids, weights)
        assert torch.equal(engine(1, torch._neg_view(-x), torch._neg_view(-ids), torch._neg_view(-weights)), wanted)


def test_a_weight_of_zero_is_computed(store):
    x, ids, weights = stores.call(store, 1, 3, 2)
    x[1] = float("inf")
    with Engine(store, device="cpu", guard="off") as engine:
        assert torch.isnan(engine(1, x, ids, weights * 0)[1]).all()


@pytest.mark.parametrize("change, error, text", [
    (lambda x, i, w: (x[:, :5], i, w), ShapeError, "x:             [4, 5], expected [T, 64]"),
    (lambda x, i, w: (x, i[:3], w), ShapeError, "top_k_index:   [3, 2], expected [T, k]"),
    (lambda x, i, w: (x, i, w[:, :1]), ShapeError, "top_k_weights: [4, 1], expected [T, k]"),
    (lambda x, i, w: (x[0], i, w), ShapeError, "x:             [64], expected"),
    (lambda x, i, w: (x.double(), i, w), TypeError, "x is float64"),
    (lambda x, i, w: (x, i.float(), w), TypeError, "top_k_index is float32"),
    (lambda x, i, w: (x, i, w.long()), TypeError, "top_k_weights is int64"),
    (lambda x, i, w: (x, i.tolist(), w), TypeError, "top_k_index is a list, expected a torch.Tensor"),
    (lambda x, i, w: (x.to("meta"), i, w), ValueError, "x is on meta, but the engine is on cpu; move it there"),
    (lambda x, i, w: (x.float().requires_grad_(), i, w), ValueError, "x requires grad, but the engine is for"),
    (lambda x, i, w: (x, i, w.requires_grad_()), ValueError, "top_k_weights requires grad"),
])  # fmt: skip
def test_invalid_arguments_are_refused(engine, store, change, error, text):
    with pytest.raises(error) as raised:
        engine(1, *change(*stores.call(store, 1, 4, 2)))
    assert text in str(raised.value) and "offload.Engine" in str(raised.value)


def test_grad_mode_is_fine_if_no_input_requires_grad(engine, store):
    x, ids, weights = stores.call(store, 1, 4, 2)
    with torch.no_grad():
        y = engine(1, x.float().requires_grad_(), ids, weights)
    assert not y.requires_grad
    with torch.inference_mode():
        inside = engine(1, x.float(), ids, weights)
    assert torch.equal(inside, y) and torch.equal(engine(1, x.float(), ids, weights), y)


def test_an_unknown_layer_is_refused(engine, store):
    with pytest.raises(KeyError, match="there is no layer 0; the layers are 1, 2"):
        engine(0, *stores.call(store, 1, 4, 2))


def test_integer_ids_and_float32_weights_keep_every_bit(store):
    """Hazard 12: ids up to 511 in both widths, weights of 24 bits beside an x of 8."""
    from goldsmith.offload import ExpertStore

    wide = ExpertStore.build({0: stores.weights(E=512, H=16, I=16)}, store.path.with_name("wide.store"))
    x = torch.randn(512, 16).bfloat16()
    ids, weights = torch.arange(512)[:, None], torch.rand(512, 1) + 2**-20
    with Engine(wide, device="cpu", gpu_budget="16MiB", lanes="mixed") as engine:
        y = engine(0, x, ids, weights)
        assert torch.equal(engine(0, x, ids.int(), weights), y)
    from goldsmith.experts import slots

    rows = slots(x, ids, wide.experts(0))[:, 0]
    assert torch.equal(y, (rows * weights).bfloat16())


# -- lifetime


def test_a_closed_engine_says_so_and_may_be_closed_twice(store):
    engine = Engine(store, device="cpu", gpu_budget="1MiB", lanes="copied")
    engine(1, *stores.call(store, 1, 4, 2))
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="it was closed; make a new one"):
        engine(1, *stores.call(store, 1, 4, 2))
    assert engine.closed and store.raw(1, 0).numel()


def test_two_engines_share_a_store(store):
    call = stores.call(store, 1, 4, 2)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="copied") as one:
        with Engine(store, device="cpu", gpu_budget="1MiB", lanes="cached") as two:
            assert torch.equal(one(1, *call), two(1, *call))
        assert torch.isfinite(one(1, *call)).all()


def test_calls_from_many_threads_run_one_at_a_time(store):
    calls = [stores.call(store, 1, 8, 2, seed=i) for i in range(8)]
    with Engine(store, device="cpu", gpu_budget="100kB", lanes="mixed") as engine:
        wanted = [engine(1, *call) for call in calls]
        outputs = [None] * len(calls)

        def work(i):
            for _ in range(5):
                outputs[i] = engine(1, *calls[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_gets_an_error_that_says_so(store):
    call = stores.call(store, 1, 4, 2)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="copied") as engine:
        engine(1, *call)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            text = "nothing"
            signal.alarm(20)  # it would wait for a thread that the fork does not have, and its parent would wait for it
            try:
                engine(1, *call)
            except BaseException as error:  # noqa: BLE001  the parent reads it
                text = str(error)
            finally:
                os.write(writing, text.encode())
                os._exit(0)
        os.waitpid(child, 0)
        text = os.read(reading, 1000).decode()
    assert "is a fork of it" in text and "make an Engine in this process" in text


def test_the_dense_part_around_a_call_can_be_compiled(store):
    _, ids, weights = stores.call(store, 1, 4, 2)
    x = torch.randn(4, 64)
    with Engine(store, device="cpu") as engine:

        def block(x):
            return engine(1, torch.nn.functional.rms_norm(x, (64,)), ids, weights) + x

        compiled = torch.compile(block, backend="eager")
        with torch.no_grad():
            assert torch.equal(compiled(x), block(x))
        assert len(torch._dynamo.explain(block)(x).break_reasons) == 1


@pytest.mark.parametrize("lanes", ["cpu", "mixed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, None], ids=str)
def test_default_dtype_and_device_change_nothing(store, lanes, dtype):
    call = stores.call(store, 1, T=9, k=3)

    def run():
        with Engine(store, device="cpu", gpu_budget="1MiB", lanes=lanes) as engine:
            return engine(1, *call)

    usual, before = run(), torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device("cpu" if dtype else "meta"):
            assert torch.equal(run(), usual)
    finally:
        torch.set_default_dtype(before)


def test_the_old_name_of_an_argument_still_works_with_a_warning(engine):
    with pytest.warns(DeprecationWarning, match="end_forward: the argument 'made' is now called 'output'"):
        engine.end_forward(made=None)
    with pytest.raises(TypeError, match="made"):
        engine.end_forward(made=None, output=None)
