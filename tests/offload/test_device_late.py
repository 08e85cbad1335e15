"""Hazards 1, 2, 3 and 5 without a GPU: the device lanes over streams that delay everything as long as events allow.

Copies and launches go into one queue per stream. A queue advances only when a thread waits for an event in it, or at
random moments. Code that reads a buffer before its copy, refills one before it is read, or lets a stream overtake
another then computes other numbers.
"""

import random
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from goldsmith.offload.lanes import cpu_beside_gpu, device_lanes
from goldsmith.offload.memory.budget import SPARE
from goldsmith.offload.memory.machine import SimulatedMachine, until_word
from goldsmith.offload.memory.streams import DONE
from offload import stores
from offload.processes import interpreter
from offload.test_device import Simulation
from turns import by_turns

LAUNCHED = ("panels_forward", "fetch", "gather")  # work for the current stream


class Queue:
    """A stream that does its work when it is waited for; `eager`: the chance that some work is done earlier."""

    def __init__(self, chance, eager, handle=None):
        self._todo, self._done, self._count = deque(), 0, 0
        self._chance, self._eager, self.stream = chance, eager, handle

    def run(self, work):
        self._todo.append(work)
        self._count += 1
        if self._chance.random() < self._eager:
            self.until(self._done + self._chance.randrange(len(self._todo) + 1))

    def wait(self, event):
        if event is not DONE:
            self.run(event.synchronize)

    def record(self):
        return Moment(self)

    def until(self, count):
        while self._done < count:
            self._todo.popleft()()
            self._done += 1

    def all(self):
        self.until(self._count)


class Moment:
    def __init__(self, queue=None):
        self._queue, self._count = queue, 0 if queue is None else queue._count

    def set(self, queue):
        self._queue, self._count = queue, queue._count

    def synchronize(self):
        if self._queue is not None:  # CUDA: an event that was never recorded has happened
            self._queue.until(self._count)


class Late(SimulatedMachine):
    """A slow GPU with as many caller streams as requested, used in turn."""

    def __init__(self, seed, eager, streams):
        chance = random.Random(seed)
        self.mode_and_reason = ("memory", "late")
        self.copies = Queue(chance, eager)
        self._streams, self._at = [Queue(chance, eager, i) for i in range(streams)], 0

    def compute(self):
        return self._streams[self._at]

    def next(self):
        self._at = (self._at + 1) % len(self._streams)

    def host(self, nbytes):
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8)  # large numbers, and invalid ids

    def move(self, source, into, stream):
        stream.run(lambda: into.copy_(source))

    def wait_for_word(self, word, number, stream):
        stream.run(lambda: until_word(word, number))

    def mark(self, stream):
        return stream.record()

    def wait(self, stream):
        stream.all()

    def new_mark(self):
        return Moment()

    def set(self, mark, stream):
        mark.set(stream)

    def seconds(self, begin, end):
        return 0.0

    def happened(self, mark):
        return True

    def time_of(self, mark):
        return 0.0

    def settle(self):
        self.copies.all()

    def close(self):
        self.settle()

    def launched(self, module):
        """The kernel module, with its launches in the current stream."""
        by_name = {name: getattr(module, name) for name in dir(module)}
        for name in LAUNCHED:
            if name in by_name:
                by_name[name] = lambda *of, launch=by_name[name], **named: self.compute().run(
                    lambda: launch(*of, **named)
                )
        if "merger" in by_name:
            merger = by_name["merger"]

            def ready(*of):
                out, launch = merger(*of)
                return out, lambda: self.compute().run(launch)

            by_name["merger"] = ready
        return SimpleNamespace(**by_name)


class LateEngine(Simulation):
    def _machine(self):
        self._deferred = True
        return self.late


def engine_of(store, late=None, **options):
    if interpreter() is not None:
        pytest.skip(f"a GPU's lanes are simulated by Triton's interpreter: {interpreter()}")
    slots = 6  # two for copies, and two in the cache of each layer, which has three experts
    budget = 4 * (SPARE + slots * store.expert_nbytes(0)) // 3 + 1000  # a quarter is for rows
    kind = Simulation if late is None else type("Engine", (LateEngine,), {"late": late})
    engine = kind(store, device="cpu", gpu_budget=budget, **options)
    engine._lanes.small.size = 3  # longer lists of tiles use another buffer
    return engine


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "a.store"
    return stores.build(path, layers=(0, 2), format="fp32", E=3, H=32, I=16)


def calls_of(store, tokens):
    """One token, whose CPU rows begin early; a few, whose x comes with the ids; many, whose x is gathered."""
    for i, T in enumerate(tokens):
        x, ids, weights = stores.call(store, 0, T, 2, dtype=torch.float32, seed=i)
        ids[0, 0] = -1 if i % 3 == 1 else ids[0, 0]
        yield (0, 2)[i % 2], x, ids, weights


@pytest.fixture
def small(monkeypatch):
    """Every path of the lanes, with few tokens to keep Triton's interpreter quick."""
    monkeypatch.setattr(cpu_beside_gpu, "EARLY", 3)


def lately(monkeypatch, late):
    for module in (device_lanes, cpu_beside_gpu):
        plain = module.kernel_module
        monkeypatch.setattr(module, "kernel_module", lambda name, plain=plain: late.launched(plain(name)))


@pytest.mark.parametrize("lanes, eager", by_turns(["cpu", "copied", "cached", "mixed", "mixed 2 streams"], [0.0, 0.5]))
def test_a_delayed_gpu_gives_the_same_numbers(store, small, monkeypatch, lanes, eager):
    lanes, _, more = lanes.partition(" ")
    calls = list(calls_of(store, (1, 1, 3, 5, 5, 1, 40, 3)))
    with engine_of(store, lanes=lanes) as engine:
        assert engine.spending.staging == 2 and (lanes == "cpu" or set(engine.spending.cache.values()) <= {0, 2})
        wanted = [engine(*call) for call in calls]
    late = Late(len(lanes), eager, streams=2 if more else 1)
    lately(monkeypatch, late)
    with engine_of(store, late, lanes=lanes, guard="off") as engine:
        items = []
        for call in calls:
            items.append(engine(*call))
            late.next()
        for stream in late._streams:
            stream.all()
    for i, (value, out) in enumerate(zip(items, wanted)):
        assert torch.equal(value, out), f"call {i}"


@pytest.mark.parametrize("tokens, size", [(6, 1024), (33, 2)], ids=["short lists", "long lists"])
def test_each_waves_list_is_read_before_its_buffer_is_reused(tmp_path, monkeypatch, tokens, size):
    """Twelve waves of one expert, whose tiles are sent list by list through eight buffers."""
    with stores.build(tmp_path / "a.store", layers=(0,), format="fp32", E=12, H=32, I=16) as store:
        x, _, weights = stores.call(store, 0, tokens, 2, dtype=torch.float32)
        ids = torch.arange(2 * tokens).view(tokens, 2) % 12
        items = []
        for late in (None, Late(0, 0.0, 1)):
            if late is not None:
                lately(monkeypatch, late)
            with engine_of(store, late, lanes="copied", guard="off") as engine:
                engine._lanes.small.size = size
                assert engine._lanes.ring.wave == 1
                items.append(engine(0, x, ids, weights))
                engine.flush()
        assert torch.equal(*items)


def test_a_streamed_prompt_gives_the_same_numbers_with_any_delay(store, small, monkeypatch):
    costs = stores.calibration(store)
    calls = [call for _ in range(2) for call in calls_of(store, (20, 20))]
    options = dict(prefill="stream", calibration=costs, cache="none")
    with Simulation(store, device="cpu", gpu_budget="24MiB", **options) as engine:
        assert engine.spending.arenas == 2
        wanted = [engine(*call) for call in calls]
    late = Late(0, 0.3, 1)
    lately(monkeypatch, late)
    kind = type("Engine", (LateEngine,), {"late": late})
    with kind(store, device="cpu", gpu_budget="24MiB", **options) as engine:
        items = [engine(*call) for call in calls]
        engine.flush()
    assert all(torch.equal(*pair) for pair in zip(items, wanted))


def test_the_guard_reads_its_flags_only_after_they_arrive(store, small, monkeypatch):
    from goldsmith.offload.guard.report import NumericsError

    late = Late(0, 0.0, 1)
    lately(monkeypatch, late)
    calls = list(calls_of(store, (5, 5, 5)))
    with engine_of(store, late, lanes="mixed") as engine:
        engine(*calls[0])
        layer, x, ids, weights = calls[1]
        bad = x.clone()
        bad[2] = torch.nan
        engine(layer, bad, ids, weights)
        with pytest.raises(NumericsError) as error:
            engine(*calls[2])
        assert (error.value.report.layer, error.value.report.rows, error.value.report.call) == (2, (2,), 2)
        engine(*calls[2])
        engine.end_forward()
