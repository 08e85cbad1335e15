"""Processes that may die, for the tests of what they leave behind; and whether kernels run on this one's CPU."""

import os
import signal
import sys

import pytest

from goldsmith.core.device import interpreter_unavailable, triton_interpreted

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def in_a_child(work):
    """Its exit status; negative when a signal ended it. A fork: no interpreter has to start."""
    child = os.fork()
    if not child:
        signal.alarm(60)  # whoever waits for ever is ended, and seen as such
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the parent sees it in the status
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interpreter():
    """Why Triton's kernels cannot take tensors of the CPU in this process; None when they can."""
    return interpreter_unavailable() if triton_interpreted() else "TRITON_INTERPRET is not 1, as where there is a GPU"
