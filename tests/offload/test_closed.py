"""After close(): what can be told is told, memory is given back, the rest is one sentence. And what is never sent."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from goldsmith.offload.engine import Engine
from offload import stores

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def store(tmp_path):
    return stores.build(tmp_path / "a.store")


def test_a_closed_engine_tells_what_it_did_and_computes_no_more(store, tmp_path):
    call = stores.call(store, 0, 5, 2)
    with Engine(store, device="cpu", gpu_budget="1MiB", lanes="mixed") as engine:
        engine(0, *call)
        stats, lines, profile = engine.stats(), str(engine.explain()).splitlines(), engine.profile()
    for _ in range(2):  # with the store open, and closed as well
        assert engine.closed and engine.explain().facts["closed"]
        assert engine.stats() == stats and engine.profile() == profile and sum(profile["counts"]["0"]) > 0
        *same, last = str(engine.explain()).splitlines()
        assert same == lines and "the engine was closed, and computes no more" in last
        assert engine.transport[0] == "memory"
        for use in (lambda: engine(0, *call), lambda: engine.trace(tmp_path / "t.json")):
            with pytest.raises(ValueError, match=r"^offload.Engine: it was closed; make a new one$"):
                use()
        store.close()
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("prefill", ["cpu", "stream"])
def test_a_closed_engine_that_somebody_keeps_holds_no_slots(store, prefill):
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
def test_an_engine_is_not_sent_anywhere_and_says_what_to_do(store, send, tmp_path):
    where = (tmp_path / "saved",) if send is torch.save else ()
    with Engine(store, device="cpu") as engine:
        with pytest.raises(TypeError, match="offload.Engine: it cannot be pickled") as told:
            send(engine, *where)
    for way in ("ExpertStore.open(path)", "offload.from_pretrained", "detach()"):
        assert way in str(told.value)
