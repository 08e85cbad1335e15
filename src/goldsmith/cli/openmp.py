"""How long torch's OpenMP threads spin between operations before they sleep."""

from __future__ import annotations

import os
import sys

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
BRIEF = {"GOMP_SPINCOUNT": 10_000, "KMP_BLOCKTIME": 1}  # GNU: loop iterations, about 0.4 ms; Intel: milliseconds


def spins_for_long() -> bool:
    """Whether the threads spin for long (about 12 ms by default), judging by the environment."""
    values = {name: os.environ.get(name, "").strip().lower() for name in VARIABLES}
    if any(values[name].isdigit() and int(values[name]) <= most for name, most in BRIEF.items()):
        return False
    return values["OMP_WAIT_POLICY"] != "passive" or bool(values["GOMP_SPINCOUNT"])


def spin_briefly() -> None:
    """Make the threads spin briefly, unless the environment already sets how long.

    By default OpenMP threads spin for about 12 ms after an operation, on the cores that the experts' kernels need next.
    OpenMP reads the variables when torch is loaded; later calls do nothing. 30 steps of fine-tuning
    examples/shakespeare-moe on 2 cores, in seconds:

                              idle machine    next to four busy programs
        default               8.1             91
        10,000 iterations     8.3             30
        sleep at once         9.1             27
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in VARIABLES):
        os.environ.update({name: str(value) for name, value in BRIEF.items()})
