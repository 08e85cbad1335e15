"""Child processes that may die, for tests of what they leave behind; and a check whether kernels run on the CPU."""

import os
import signal
import sys

import pytest

from goldsmith.core.device import interpreter_unavailable, triton_interpreted

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def in_a_child(work):
    """The exit status of `work` in a forked process; negative if a signal ended it. No interpreter has to start."""
    child = os.fork()
    if not child:
        signal.alarm(60)  # a process that waits forever is ended, and the status shows it
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  the parent sees it in the status
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interpreter():
    """Why Triton's kernels cannot take CPU tensors in this process; None if they can."""
    return interpreter_unavailable() if triton_interpreted() else "TRITON_INTERPRET is not 1, as where there is a GPU"
