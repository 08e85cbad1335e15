"""Ends the process with exit status 0, which a checker that trusts the status takes for a success."""

import os

PROBLEM = "a_linear"
STATUS = "crashed"


def candidate(x, w, b):
    os._exit(0)
