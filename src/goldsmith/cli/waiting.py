"""What torch's own threads do while they have nothing to do."""

from __future__ import annotations

import os
import sys

SAID_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def awake() -> bool:
    """Whether they look out for the next operation instead, as far as the environment says: OpenMP's own default."""
    policy, spins, blocktime = (os.environ.get(name, "").strip().lower() for name in SAID_BY)
    return not (spins == "0" or blocktime == "0" or policy == "passive" and not spins)


def asleep() -> None:
    """Has them sleep, unless the environment says something else

    By default OpenMP's threads stay awake for some 10 ms after an operation, on the cores that the experts' kernels are
    about to use: 30 steps of fine-tuning examples/shakespeare-moe took 57 s of processor time, and asleep 12.6 (2 cores
    with other work on them: 155 s of wall time, and 35). OpenMP reads the variable when torch is loaded; afterwards
    this does nothing.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in SAID_BY):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
