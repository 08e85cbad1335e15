"""How long torch's own threads look out for their next operation before they sleep."""

from __future__ import annotations

import os
import sys

SAID_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SHORT = {"GOMP_SPINCOUNT": 10_000, "KMP_BLOCKTIME": 1}  # GNU's: turns of a loop, some 0.4 ms; Intel's: milliseconds


def spins_for_long() -> bool:
    """Whether it is for long, as far as the environment says: some 12 ms by default."""
    said = {name: os.environ.get(name, "").strip().lower() for name in SAID_BY}
    if any(said[name].isdigit() and int(said[name]) <= most for name, most in SHORT.items()):
        return False
    return said["OMP_WAIT_POLICY"] != "passive" or bool(said["GOMP_SPINCOUNT"])


def spin_briefly() -> None:
    """Has it be short, unless the environment says something else

    By default OpenMP's threads stay awake for some 12 ms after an operation, on the cores that the experts' kernels are
    about to use. 30 steps of fine-tuning examples/shakespeare-moe on 2 cores took 8.1 s, and beside four busy programs
    91; with 10,000 turns 8.3 and 30, asleep at once 9.1 and 27. OpenMP reads the variables when torch is loaded;
    afterwards this does nothing.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in SAID_BY):
        os.environ.update({name: str(value) for name, value in SHORT.items()})
