"""How bytes of a store reach a device: the mode and its reason; no buffer is refilled before its copy has ended."""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from goldsmith.offload.memory import transport
from goldsmith.offload.memory.transport import Transport, TransportRing, free_memory
from offload.stores import build


@pytest.fixture
def store(tmp_path):
    with build(tmp_path / "s.experts", E=5) as opened:
        yield opened


def test_on_a_cpu_bytes_are_copied_from_memory_to_memory(store):
    way = Transport(store, "cpu")
    assert way.mode == "memory" and "from memory to memory" in way.why
    out = torch.zeros(2, store.blocks.stride, dtype=torch.uint8)
    way.copy(store.raw_layer(1)[1:3], out)
    assert torch.equal(out, store.raw_layer(1)[1:3])
    with pytest.raises(ValueError, match="expected contiguous tensors of the same size"):
        way.copy(store.raw(1, 0), out)
    way.close()
    way.close()


@pytest.mark.parametrize("mode", ["registered", "ring"])
def test_a_mode_that_needs_a_gpu_is_refused_without_one(store, mode):
    with pytest.raises(ValueError, match=f"force='{mode}' needs a CUDA device, not cpu"):
        Transport(store, "cpu", force=mode)
    with pytest.raises(ValueError, match="force='telepathy', expected one of registered, ring, memory"):
        Transport(store, "cpu", force="telepathy")


class TimeMark:
    """An event whose copy arrives when a thread waits for it; until then its buffer must not change."""

    def __init__(self, buffer):
        self.buffer, self.sent, self.arrived = buffer, buffer.clone(), False

    def synchronize(self):
        assert torch.equal(self.buffer, self.sent), "the buffer was filled again before its copy had arrived"
        self.arrived = True


def test_a_ring_buffer_is_refilled_only_after_its_copy_has_arrived():
    buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(3)]
    marks = []

    def mark():
        marks.append(TimeMark(buffers[len(marks) % 3]))
        return marks[-1]

    ring = TransportRing(buffers, mark)
    source = torch.randint(0, 256, (64 * 7 + 10,), dtype=torch.uint8)
    out = torch.zeros_like(source)
    ring.copy(source, out)
    assert torch.equal(out, source) and len(marks) == 8
    assert [m.arrived for m in marks] == [True] * 5 + [False] * 3
    ring.wait()
    assert all(m.arrived for m in marks)


class Runtime:
    """A fake CUDA runtime with scripted answers, which keeps an error until it is read."""

    def __init__(self, supported=1, status=0, unlocked=0):
        self.supported, self.status, self.unlocked = supported, status, unlocked
        self.pending, self.flags, self.released = 0, [], 0

    def cudaDeviceGetAttribute(self, out, attribute, device):
        assert attribute.value == 113
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = self.supported or 0
        self.pending = self.supported is None  # a driver that does not know the attribute
        return int(self.pending)

    def cudaHostRegister(self, at, size, flags):
        self.flags.append(flags.value)
        self.pending = self.status
        return self.status

    def cudaHostUnregister(self, at):
        self.released += 1
        self.pending = self.unlocked
        return self.unlocked

    def cudaGetLastError(self):
        result, self.pending = self.pending, 0
        return result

    def cudaGetErrorString(self, status):
        return b"invalid argument"


def test_pages_are_locked_read_only_and_shared_and_released(store):
    cuda = Runtime()
    first = transport.register(store.whole(), 0, cuda)
    second = transport.register(store.whole(), 0, cuda)
    assert first is second and cuda.flags == [8]  # a mapping is locked once, however many engines use it
    del first
    assert cuda.released == 0
    del second
    assert cuda.released == 1


def test_a_refused_registration_is_reported_and_leaves_no_error(store):
    cuda = Runtime(status=1)
    why = transport.register(store.whole(), 0, cuda)
    assert "invalid argument (error 1)" in why and cuda.pending == 0
    for supported in (0, None):
        old = Runtime(supported=supported)
        assert "cannot lock memory that is mapped read-only" in transport.register(store.whole(), 0, old)
        assert old.pending == 0 and not old.flags
    assert "was not found" in transport.register(store.whole(), 0, None)
    gone = Runtime(unlocked=1)  # the driver is shutting down
    assert transport.register(store.whole(), 0, gone) is not None
    assert (gone.released, gone.pending) == (1, 0)


@pytest.mark.parametrize("free, status, ring, wanted, why", [
    (1 << 40, 0, True, "registered", "the store's pages are page-locked where they are mapped"),
    (1 << 40, 1, True, "ring", "not registered: cudaHostRegister of 0.0 GB failed: invalid argument (error 1)"),
    (1 << 40, 1, False, "memory", "not ring: no page-locked buffers (out of them); the engine copies from page"),
    (1000, 0, True, "ring", "not registered: the store has 0.0 GB, but 0.0 GB of memory is available"),
    (None, 0, True, "registered", "page-locked"),
])  # fmt: skip
def test_the_mode_is_the_first_that_works_and_says_why(store, monkeypatch, free, status, ring, wanted, why):
    """Without a GPU: the CUDA calls get scripted answers."""
    cuda, plain = Runtime(status=status), torch.empty

    def empty(*size, pin_memory=False, **options):
        if pin_memory and not ring:
            raise RuntimeError("out of them\nand more")
        return plain(*size, **options)

    monkeypatch.setattr(transport, "free_memory", lambda: free)
    monkeypatch.setattr(transport, "runtime", lambda: cuda)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    way = Transport(store, "cuda:0")
    assert way.mode == wanted and why in way.why and cuda.pending == 0
    assert cuda.flags == ([8] if free != 1000 else [])
    if wanted != "registered":
        with pytest.raises(ValueError, match="force='registered' is impossible here: not registered: "):
            Transport(store, "cuda:0", force="registered")
    way.close()
    assert cuda.released == (wanted == "registered")


def test_the_memory_limit_of_a_control_group_counts(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert free_memory(tmp_path) == 50 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in (("max", "40960"), ("current", "30000"), ("stat", "anon 20000\nfile 10000\n")):
        (group / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path) == 40960 - 30000 + 10000
    (group / "memory.max").write_text("max")
    assert free_memory(tmp_path) == 50 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["registered", "ring", "memory"])
def test_every_mode_brings_the_same_bytes_to_a_gpu(store, mode):
    out = torch.zeros(4, store.blocks.stride, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    way = Transport(store, "cuda", force=mode)
    assert way.mode == mode
    stream.wait_stream(torch.cuda.current_stream())
    way.copy(store.raw_layer(0)[:4], out, stream)
    stream.synchronize()
    assert torch.equal(out.cpu(), store.raw_layer(0)[:4])
    way.close()
    assert torch.ones(3, device="cuda").sum().item() == 3  # no error is left for the next CUDA call
