"""The thread pool, errors and arena of a debug build, called from Python."""

import os
import sys
import threading
import time
from ctypes import c_int32, c_int64, c_void_p

import torch

from goldsmith.core import BackendUnavailable, native

LIBRARY = native.library()
LIBRARY.gs_selftest_pool.argtypes = [c_int32, c_int64, c_int64, c_void_p]
LIBRARY.gs_selftest_meet.argtypes = [c_int32, c_int32]
LIBRARY.gs_selftest_throw.argtypes = [c_int32, c_int32]
LIBRARY.gs_selftest_arena.argtypes = [c_int64, c_int64]


def work(threads, items, bad=-1):
    counts = torch.zeros(items, dtype=torch.int64)
    native.check(LIBRARY.gs_selftest_pool(threads, items, bad, counts.data_ptr()))
    assert (counts == 101).all(), f"{threads} threads, {items} items: {counts.unique().tolist()}"


def refused(kind, text, call, *arguments):
    try:
        native.check(call(*arguments))
    except kind as error:
        assert type(error) is kind and str(error) == text, repr(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def every_item_is_done_once():
    for threads in (1, 2, 3, 8, 3, 1):
        for items in (0, 1, 2, 7, 1000):
            work(threads, items)
        native.check(LIBRARY.gs_selftest_meet(threads, False))
    for _ in range(300):  # regions in quick succession: some workers come late or are not parked yet
        work(3, 4)


def errors_are_raised_and_the_pool_keeps_working():
    for threads in (1, 2, 8):
        for bad in (0, 3, 99):
            counts = torch.zeros(100, dtype=torch.int64)
            call = (LIBRARY.gs_selftest_pool, threads, 100, bad, counts.data_ptr())
            refused(ValueError, f"item {bad} is bad", *call)
            assert counts[bad] == 0
        work(threads, 100)
    for threads in (1, 4):
        memory = "the native library could not allocate the memory for this call"
        refused(MemoryError, memory, LIBRARY.gs_selftest_throw, threads, 0)
        refused(RuntimeError, "the words of a standard exception", LIBRARY.gs_selftest_throw, threads, 1)
        refused(BackendUnavailable, "this machine has no such thing", LIBRARY.gs_selftest_throw, threads, 2)
        unknown = "an exception of unknown type in the native library"
        refused(RuntimeError, unknown, LIBRARY.gs_selftest_throw, threads, 3)
    for threads in (0, -1, 1025):
        wanted = f"threads is {threads}, expected a number from 1 to 1024"
        refused(ValueError, wanted, LIBRARY.gs_selftest_throw, threads, 0)


def several_python_threads_at_once():
    failed = []

    def caller(threads):
        try:
            for _ in range(50):
                work(threads, 20)
                refused(ValueError, "item 5 is bad", LIBRARY.gs_selftest_pool, threads, 20, 5, spare.data_ptr())
        except AssertionError as error:
            failed.append(error)

    spare = torch.zeros(20, dtype=torch.int64)
    callers = [threading.Thread(target=caller, args=(threads,)) for threads in (2, 3)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not failed, failed


def a_forked_child_has_its_own_pool():
    child = os.fork()
    if child == 0:
        status = 1
        try:
            native.check(LIBRARY.gs_selftest_meet(3, False))
            work(8, 100)
            status = 0
        finally:
            os._exit(status)
    work(3, 100)
    assert os.waitpid(child, 0)[1] == 0


def idle_workers_are_parked():
    work(8, 100)
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def writing_up_to_the_end_of_a_region_is_allowed():
    native.check(LIBRARY.gs_selftest_arena(0, 100))


def race():
    native.check(LIBRARY.gs_selftest_meet(2, True))


def overrun():
    for first, count in ((90, 13), (100, 1), (120, 2)):
        try:
            native.check(LIBRARY.gs_selftest_arena(first, count))
        except RuntimeError as error:
            print(error)


if sys.argv[1:]:
    globals()[sys.argv[1]]()
else:
    every_item_is_done_once()
    errors_are_raised_and_the_pool_keeps_working()
    several_python_threads_at_once()
    a_forked_child_has_its_own_pool()
    idle_workers_are_parked()
    writing_up_to_the_end_of_a_region_is_allowed()
