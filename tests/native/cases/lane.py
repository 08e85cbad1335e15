"""Lanes: calls in a thread of the library, with and without waking it in advance, and the word that others wait for."""

import time
from ctypes import byref, c_double, c_int32, c_uint32, c_void_p

import torch
from goldsmith.offload.kernel import Kernels

from goldsmith import experts
from goldsmith.core import native
from goldsmith.offload.lanes.cpu_lane import CpuLane

OPTIONS = {"activation": "silu", "alpha": 1.702, "limit": None}
BASE = experts.pack(torch.randn(6, 64, 48), torch.randn(6, 48, 32), format="fp32")
X, IDS = torch.randn(3, 48), torch.tensor([[0, 5], [2, -1], [5, 1]])


def empty_results():
    return torch.full((6, 48), 9.0), torch.full((6,), 9, dtype=torch.uint8)


def wanted():
    rows, flags = empty_results()
    Kernels(OPTIONS, 1).rows(X, IDS, BASE, rows, flags)
    return rows, flags


def refused(text, call, *arguments):
    try:
        native.check(call(*arguments))
    except ValueError as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError("no error")


def calls_run_in_turn_and_set_the_word():
    word = torch.zeros(1, dtype=torch.int32)
    lane, (rows, flags) = CpuLane(OPTIONS, 3, word), wanted()
    there = word.numpy()
    for turn in range(200):
        if turn % 3:
            lane.ready()
        if turn % 3 == 2:
            time.sleep(2e-4 * (turn % 2))  # longer than any thread polls
        mine, flagged = empty_results()
        lane.begin(X, IDS, BASE, mine, flagged)
        if turn % 5 == 0:
            lane.ready()  # no effect after begin
        if turn % 2:
            while there[0] != turn + 1:
                time.sleep(0)
            assert torch.equal(mine, rows) and torch.equal(flagged, flags)
        begin, end = lane.end()
        assert there[0] == turn + 1 == lane.number and begin < end
        assert torch.equal(mine, rows) and torch.equal(flagged, flags)
    lane.ready()
    lane.close()


def the_word_is_set_after_the_rows_are_written():
    """With calls of some ms, so that polling starts before the word is set."""
    word, T = torch.zeros(1, dtype=torch.int32), 400
    x, ids = torch.randn(T, 48), torch.arange(6).expand(T, 6).contiguous()
    rows, flags = torch.empty(T * 6, 48), torch.empty(T * 6, dtype=torch.uint8)
    Kernels(OPTIONS, 1).rows(x, ids, BASE, rows, flags)
    lane, there = CpuLane(OPTIONS, 1, word), word.numpy()
    mine = torch.empty_like(rows)
    last = mine.numpy().reshape(-1)
    for _ in range(20):
        mine.fill_(float("nan"))
        lane.begin(x, ids, BASE, mine, flags)
        while there[0] != lane.number:
            pass
        seen = last[-1]  # at once
        assert seen == rows[-1, -1] and torch.equal(mine, rows)
        lane.end()
    lane.close()


def a_thread_woken_without_a_call_sleeps_again():
    lane = CpuLane(OPTIONS, 3)
    for _ in range(5):
        lane.ready()
        time.sleep(0.02)
    before = time.process_time()
    lane.ready()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # one thread that polls all the time would use 0.3
    lane.close()


def a_call_runs_even_if_no_thread_polls_any_more():
    lane = CpuLane(OPTIONS, 2)
    for turn in range(2000):
        lane.ready()
        until = time.perf_counter() + 3e-5 + 2e-8 * turn  # around the 50 us
        while time.perf_counter() < until:
            pass
        mine, flagged = empty_results()
        lane.begin(X, IDS, BASE, mine, flagged)
        lane.end()
    lane.close()


def a_failed_call_sets_the_word_too():
    library, lane, word = native.library(), c_void_p(), torch.zeros(1, dtype=torch.int32)
    mine, flagged = empty_results()
    call = Kernels(OPTIONS, 1).call(X, IDS, BASE, mine, flagged)
    call.args.threads = 0
    CpuLane(OPTIONS, 1).close()  # declares the argument types of the lane functions
    native.check(library.gs_lane_new(byref(lane)))
    for number in (7, 0xFFFFFFFF, 0):  # the number wraps around
        native.check(library.gs_lane_begin(lane, byref(call.args), word.data_ptr(), number))
        refused("threads is 0", library.gs_lane_end, lane, (c_double * 2)())
        assert c_uint32(int(word[0])).value == number
    refused("no call was begun", library.gs_lane_end, lane, (c_double * 2)())
    native.check(library.gs_lane_ready(lane, c_int32(2)))
    library.gs_lane_free(lane)


calls_run_in_turn_and_set_the_word()
the_word_is_set_after_the_rows_are_written()
a_thread_woken_without_a_call_sleeps_again()
a_call_runs_even_if_no_thread_polls_any_more()
a_failed_call_sets_the_word_too()
