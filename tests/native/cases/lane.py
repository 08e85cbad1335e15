"""A lane: calls in a thread of the library's own, woken before them or not, and a word that others wait for."""

import time
from ctypes import byref, c_double, c_int32, c_uint32, c_void_p

import torch

from goldsmith import experts
from goldsmith.core import native
from goldsmith.offload.kernel import Kernels
from goldsmith.offload.lane import Lane

OPTIONS = {"activation": "silu", "alpha": 1.702, "limit": None}
BASE = experts.pack(torch.randn(6, 64, 48), torch.randn(6, 48, 32), format="fp32")
X, IDS = torch.randn(3, 48), torch.tensor([[0, 5], [2, -1], [5, 1]])


def made():
    return torch.full((6, 48), 9.0), torch.full((6,), 9, dtype=torch.uint8)


def wanted():
    rows, flags = made()
    Kernels(OPTIONS, 1).rows(X, IDS, BASE, rows, flags)
    return rows, flags


def calls_are_made_in_turn_and_tell_the_word():
    word = torch.zeros(1, dtype=torch.int32)
    lane, (rows, flags) = Lane(OPTIONS, 3, word), wanted()
    there = word.numpy()
    for turn in range(200):
        if turn % 3:
            lane.ready()
        if turn % 3 == 2:
            time.sleep(2e-4 * (turn % 2))  # longer than anybody looks out
        mine, flagged = made()
        lane.begin(X, IDS, BASE, mine, flagged)
        if turn % 5 == 0:
            lane.ready()  # of a call that was begun already: nothing
        if turn % 2:
            while there[0] != turn + 1:
                time.sleep(0)
            assert torch.equal(mine, rows) and torch.equal(flagged, flags)
        begin, end = lane.end()
        assert there[0] == turn + 1 == lane.number and begin < end
        assert torch.equal(mine, rows) and torch.equal(flagged, flags)
    lane.ready()
    lane.close()


def a_call_that_fails_tells_the_word_too():
    library, lane, word = native.library(), c_void_p(), torch.zeros(1, dtype=torch.int32)
    mine, flagged = made()
    call = Kernels(OPTIONS, 1).call(X, IDS, BASE, mine, flagged)
    call.args.threads = 0
    Lane(OPTIONS, 1).close()  # says what arguments the calls have
    native.check(library.gs_lane_new(byref(lane)))
    for number in (7, 0xFFFFFFFF, 0):  # it goes round
        native.check(library.gs_lane_begin(lane, byref(call.args), word.data_ptr(), number))
        try:
            native.check(library.gs_lane_end(lane, (c_double * 2)()))
        except ValueError as error:
            assert "threads is 0" in str(error)
        else:
            raise AssertionError("no error")
        assert c_uint32(int(word[0])).value == number
    for ask in (lambda: library.gs_lane_end(lane, (c_double * 2)()),):
        try:
            native.check(ask())
        except ValueError as error:
            assert "no call was begun" in str(error)
        else:
            raise AssertionError("no error")
    native.check(library.gs_lane_ready(lane, c_int32(2)))
    library.gs_lane_free(lane)


calls_are_made_in_turn_and_tell_the_word()
a_call_that_fails_tells_the_word_too()
