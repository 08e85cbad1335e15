"""Events inside a call: a signal handler that closes the engine, a fork, code that shows warnings."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest
import torch

from goldsmith.offload.guard.report import NumericsError, NumericsWarning
from goldsmith.offload.testing import inject
from offload import stores
from offload.processes import in_a_child
from offload.test_device import engine_of as simulated
from offload.test_guard_pieces import on_a_cpu
from repo.tree import ROOT


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stores.build(tmp_path_factory.mktemp("stores") / "a.store", layers=(0, 2), format="fp32")


@pytest.fixture(params=[on_a_cpu, simulated], ids=["on a CPU", "simulated"])
def make(request, store):
    return lambda **options: (request.param(store, **options), stores.call(store, 0, 3, 3, dtype=torch.float32))


def within(engine, monkeypatch, work):
    """Runs `work()` in the middle of the engine's next call, as a signal handler would."""
    sort = engine._lanes.run

    def interrupted(call):
        monkeypatch.undo()
        work()
        return sort(call)

    monkeypatch.setattr(engine._lanes, "run", interrupted)


def test_closing_inside_a_call_takes_effect_when_the_call_ends(make, monkeypatch):
    engine, call = make()
    clean = engine(0, *call)
    engine.flush()
    within(engine, monkeypatch, lambda: (engine.close(), engine.flush(), engine.stats(), engine.close()))
    assert torch.equal(engine(0, *call), clean)
    assert engine.closed and not hasattr(engine, "_lanes") and engine.stats().calls == 2
    with pytest.raises(ValueError, match="it was closed; make a new one"):
        engine(0, *call)


@pytest.mark.parametrize("ended", [SystemExit(0), KeyboardInterrupt(), ZeroDivisionError()], ids=repr)
def test_an_exception_that_ends_the_closing_call_passes_through(make, monkeypatch, ended):
    engine, call = make()
    engine(0, *call)

    def stop():
        engine.close()
        raise ended

    within(engine, monkeypatch, stop)
    with pytest.raises(type(ended)) as raised:
        engine(0, *call)
    assert raised.value is ended and engine.closed and not hasattr(engine, "_lanes")


def test_code_that_shows_a_warning_may_close_the_engine(make, monkeypatch):
    engine, call = make(guard="warn")
    with warnings.catch_warnings(), inject(engine, "down", layer=0):
        warnings.simplefilter("always", NumericsWarning)
        monkeypatch.setattr(warnings, "showwarning", lambda *arguments, **more: engine.close())
        assert torch.isnan(engine(0, *call)).any()
        engine.flush()
    assert engine.closed and not hasattr(engine, "_lanes")


def test_a_handler_of_sigterm_that_closes_and_exits_ends_the_program_with_its_status(store):
    program = f"""
        import os, signal, sys, threading, torch
        from goldsmith.offload import Engine, ExpertStore
        engine = Engine(ExpertStore.open({str(store.path)!r}), device="cpu", gpu_budget="24MiB", lanes="mixed")
        def stop(*_):
            engine.close()
            sys.exit(3)
        signal.signal(signal.SIGTERM, stop)
        x, ids, weights = torch.randn(400, 64), torch.arange(4).expand(400, 4), torch.rand(400, 4)
        engine(0, x, ids, weights)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while True:
            engine(0, x, ids, weights)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (3, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("in_a_call", [False, True], ids=["between calls", "while a thread has its turn"])
def test_a_fork_answers_or_raises_and_never_blocks(make, monkeypatch, in_a_call):
    engine, call = make()
    engine(0, *call)
    calls = engine.stats().calls

    def check_refused(work):
        with pytest.raises(RuntimeError, match="this is a fork of it, .* make an Engine in this process"):
            work()

    def child():
        signal.alarm(20)
        assert engine.stats().calls == calls and engine.explain().facts["achieved"]["calls"] == calls
        assert sum(engine.profile()["counts"]["0"]) > 0
        for work in (engine.flush, engine.end_forward, lambda: engine(0, *call), lambda: engine.trace("t.json")):
            check_refused(work)
        engine.reset_stats()
        assert engine.stats().calls == 0
        engine.close()
        assert engine.closed

    if not in_a_call:
        assert in_a_child(child) == 0
    else:
        there, on = threading.Event(), threading.Event()
        within(engine, monkeypatch, lambda: (there.set(), on.wait(60)))
        thread = threading.Thread(target=engine, args=(0, *call))
        thread.start()
        assert there.wait(60)
        status = in_a_child(child)
        on.set()
        thread.join()
        assert status == 0
    engine(0, *call)
    engine.close()


def test_a_nan_of_the_closing_call_is_raised(make, monkeypatch):
    engine, (x, ids, weights) = make()
    x[1] = torch.nan
    within(engine, monkeypatch, engine.close)
    with pytest.raises(NumericsError, match="layer 0, stage 'input'"):
        engine(0, x, ids, weights)
    assert engine.closed
