"""Never returns, and ignores the polite signals."""

import signal

PROBLEM = "a_linear"
STATUS = "timed_out"


def candidate(x, w, b):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass
