"""Never ends to import."""

import time

PROBLEM = "a_linear"
STATUS = "timed_out"
ALSO = {"refused"}


while True:
    time.sleep(0.01)
