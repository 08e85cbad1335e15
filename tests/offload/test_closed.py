"""After close(): reports still work, memory is freed, anything else raises one sentence. And pickling is refused."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

from goldsmith.offload.engine import Engine
from goldsmith.offload.guard.report import NumericsError, NumericsWarning
from offload import stores
from offload.test_device import engine_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def store(tmp_path):
    return stores.build(tmp_path / "a.store")


def test_a_closed_engine_reports_its_past_and_computes_no_more(store, tmp_path):
    call = stores.call(store, 0, 5, 2)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed") as engine:
        engine(0, *call)
        stats, lines, profile = engine.stats(), str(engine.explain()).splitlines(), engine.profile()
    for _ in range(2):  # with the store open, and closed too
        assert engine.closed and engine.explain().facts["closed"]
        assert engine.stats() == stats and engine.profile() == profile and sum(profile["counts"]["0"]) > 0
        *same, last = str(engine.explain()).splitlines()
        assert same == lines and "the engine was closed and computes no more" in last
        assert engine.transport[0] == "memory"
        for use in (lambda: engine(0, *call), lambda: engine.trace(tmp_path / "t.json")):
            with pytest.raises(ValueError, match=r"^offload.Engine: it was closed; make a new one$"):
                use()
        store.close()
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("prefill", ["cpu", "stream"])
def test_a_closed_engine_that_is_still_referenced_holds_no_slots(store, prefill):
    calibration = stores.calibration(store)
    engine = Engine(store, device="cpu", gpu_budget="1MiB", prefill=prefill, calibration=calibration)
    engine(0, *stores.call(store, 0, 1, 2))
    engine(0, *stores.call(store, 0, 30, 2))
    arenas = [weakref.ref(arena.data) for arena in engine._arenas]
    assert len(arenas) == (3 if prefill == "stream" else 1)
    engine.close()
    gc.collect()
    assert [arena() for arena in arenas] == [None] * len(arenas)


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy, torch.save])
def test_pickling_an_engine_fails_and_says_what_to_do(store, send, tmp_path):
    where = (tmp_path / "saved",) if send is torch.save else ()
    with Engine(store, device="cpu") as engine:
        with pytest.raises(TypeError, match="offload.Engine: it cannot be pickled") as error:
            send(engine, *where)
    for way in ("ExpertStore.open(path)", "offload.from_pretrained", "detach()"):
        assert way in str(error.value)


def with_a_nan(tmp_path, guard):
    """An engine with a GPU's lanes after a call with a NaN that was not raised yet."""
    store = stores.build(tmp_path / f"{guard}.store", layers=(0,), format="fp32")
    x, ids, weights = stores.call(store, 0, 3, 2, dtype=torch.float32)
    x[1] = torch.nan
    engine = engine_of(store, guard=guard)
    assert torch.isnan(engine(0, x, ids, weights)[1]).all()
    return engine


def ended(engine, how):
    if how == "close":
        engine.close()
    else:
        with engine:
            pass


@pytest.mark.parametrize("how", ["close", "block"])
def test_a_nan_of_the_last_call_is_raised_at_the_end(tmp_path, how):
    engine = with_a_nan(tmp_path, "raise")
    with pytest.raises(NumericsError, match="NaN in layer 0, stage 'input'"):
        ended(engine, how)
    assert engine.closed and not hasattr(engine, "_lanes")
    engine.close()
    engine = with_a_nan(tmp_path, "warn")
    with pytest.warns(NumericsWarning, match="NaN in layer 0, stage 'input'"):
        ended(engine, how)
    engine = with_a_nan(tmp_path, "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ended(engine, how)


def test_the_blocks_own_exception_wins_and_a_nan_at_the_end_is_its_note(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised, with_a_nan(tmp_path, "raise") as engine:
        raise ZeroDivisionError
    assert engine.closed and "NaN in layer 0, stage 'input'" in raised.value.__notes__[0]


def test_an_exception_under_way_at_close_is_the_context_of_a_nan(tmp_path):
    engine = with_a_nan(tmp_path, "raise")
    with pytest.raises(NumericsError) as raised:
        try:
            raise ZeroDivisionError
        finally:
            engine.close()
    assert isinstance(raised.value.__context__, ZeroDivisionError)
