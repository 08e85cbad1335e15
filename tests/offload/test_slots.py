"""Slots, buffers and streams: nothing is reused before its event."""

import threading
import time

import pytest
import torch

from goldsmith.offload.memory import slots
from goldsmith.offload.memory.pinned_buffers import Packets, PinnedBuffers
from goldsmith.offload.memory.slots import Slot, SlotRing, begin_reading, end_reading
from goldsmith.offload.memory.streams import DONE, HostEvent, Inline, Worker


@pytest.fixture
def worker():
    worker = Worker("copies of a test")
    yield worker
    worker.close()


def fill(slot, worker, value):
    slots.fill([slot], 0, [1], worker, lambda layer, experts, into: into[0].fill_(value))


def test_3_a_slot_is_not_written_before_its_last_reader_is_done(worker):
    slot = Slot(0, torch.zeros(4), None)
    slot.last_use = reader = HostEvent()
    fill(slot, worker, 1.0)
    time.sleep(0.02)
    early = bool(slot.data.any()), slot.owner, slot.generation
    reader.happened(None)  # before any assertion: the worker's end would wait for it
    begin_reading([slot], Inline())
    assert early == (False, (0, 1), 1) and slot.data.all()


def test_3_a_slot_is_not_read_before_its_writer_is_done(worker):
    slot, gate = Slot(0, torch.zeros(4), None), threading.Event()
    worker.run(gate.wait)
    fill(slot, worker, 2.0)
    threading.Timer(0.02, gate.set).start()
    begin_reading([slot], Inline())
    assert slot.data.eq(2).all() and slot.ready is DONE
    end_reading([slot], worker)
    assert slot.last_use is not DONE


def test_3_slots_that_are_filled_together_wait_for_every_reader_and_are_ready_together(worker):
    slot_list = [Slot(i, torch.zeros(4), None) for i in range(3)]
    readers = [HostEvent(), HostEvent()]
    slot_list[0].last_use = slot_list[1].last_use = readers[0]
    slot_list[2].last_use = readers[1]
    slots.fill(
        slot_list, 0, [4, 5, 6], worker, lambda layer, experts, into: [t.fill_(e) for e, t in zip(experts, into)]
    )
    readers[0].happened(None)
    time.sleep(0.02)
    early, together = any(bool(slot.data.any()) for slot in slot_list), slot_list[0].ready is slot_list[2].ready
    readers[1].happened(None)
    begin_reading(slot_list, Inline())
    assert (early, together, [float(slot.data[0]) for slot in slot_list]) == (False, True, [4, 5, 6])
    assert all(slot.ready is DONE for slot in slot_list)


def test_2_a_buffer_is_reused_only_after_its_event():
    transit = PinnedBuffers(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    first = transit.take((3,), torch.float32)
    busy = HostEvent()
    transit.release(busy)
    second = transit.take((3,), torch.float32)
    assert second.data_ptr() != first.data_ptr()
    begin = time.perf_counter()
    threading.Timer(0.02, busy.happened, [None]).start()
    assert transit.take((3,), torch.float32).data_ptr() == first.data_ptr()
    assert time.perf_counter() - begin > 0.01


def test_2_a_packet_is_reused_only_after_its_event():
    packets = Packets(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), "cpu", 2, 8)

    def send(*numbers):
        (there,) = packets.send([list(numbers)], lambda host, device, stream: device.copy_(host), None)
        return there

    first, busy = send(1, 2), HostEvent()
    packets.release(busy)
    second = send(3, 4)
    begin = time.perf_counter()
    threading.Timer(0.02, busy.happened, [None]).start()
    third = send(5, 6)
    assert time.perf_counter() - begin > 0.01 and third.data_ptr() == first.data_ptr()
    assert (second.tolist(), third.tolist()) == ([3, 4], [5, 6])


def test_12_buffers_hold_bytes_and_every_dtype_survives():
    transit = PinnedBuffers(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 1)
    for values in (
        torch.arange(1000),
        torch.arange(1000, dtype=torch.int32),
        torch.rand(7, 9),
        torch.rand(8).bfloat16(),
        *(torch.arange(8).to(dtype) for dtype in (torch.int16, torch.float16, torch.float32, torch.int32)),
    ):
        kept = transit.take(tuple(values.shape), values.dtype)
        kept.copy_(values)
        assert kept.dtype == values.dtype and torch.equal(kept, values)


def test_a_slightly_longer_prompt_fits_its_buffer():
    allocated = []
    transit = PinnedBuffers(lambda nbytes: allocated.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8), 1)
    for rows in (600, 601, 700, 1024, 599):
        assert transit.take((rows, 16), torch.float32).shape == (rows, 16)
    assert allocated == [65536]


def test_14_an_exception_reaches_the_waiting_thread_and_the_worker_goes_on(worker):
    worker.run(lambda: 1 / 0)
    worker.run(lambda: pytest.fail("what comes behind a failure is left out"))
    failed = worker.record()
    done = []
    worker.run(lambda: done.append(1))
    fine = worker.record()
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    fine.synchronize()
    assert done == [1]


def test_14_a_closed_worker_says_so():
    worker = Worker("copies of a test")
    done = []
    worker.run(lambda: (time.sleep(0.02), done.append(1)))
    worker.close()
    assert done and not worker._thread.is_alive()  # work under way has ended, and no thread is left
    worker.close()
    with pytest.raises(ValueError, match="copies of a test: is closed"):
        worker.run(print)


def test_the_ring_fills_one_half_while_the_other_is_read():
    ring = SlotRing([Slot(i, torch.empty(0), None) for i in range(5)])
    indices = [ring.take().index for _ in range(7)]
    assert ring.wave == 2 and indices == [0, 1, 2, 3, 4, 0, 1]
