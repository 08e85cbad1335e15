"""`calibrate`: the measurement of the scheduler's costs, with the Engine whose calls it times."""

from __future__ import annotations

import torch

from .calibration.calibration import Calibration, kept_or_measured
from .engine import Engine
from .store.expert_store import ExpertStore


def calibrate(
    store: ExpertStore, *, device: torch.device | str = "auto", threads: int | None = None, force: bool = False
) -> Calibration:
    """The costs of this store's experts on this machine: measured, or as they were kept

    (Some 4.5 seconds beside an H100; the first time in a process 6 to 22, with what it compiles and imports: the rows
    offload.calibrate of `goldsmith bench offload`.)

    The CPU's kernel at 1 to 240 tokens an expert, copies, the device's kernel at 1 to 512, the CPU's kernel with copies
    running, and latencies: all that a call of the engine takes beside a lane's own work, and what one takes at least
    that has experts on the CPU and on the device. Kept as JSON in the cache folder ($GOLDSMITH_CACHE) under version,
    machine, torch, format, sizes, threads and device; a file of another key or a damaged one is made anew, and so is
    any with force=True. One that was made while others used the processors says so (`busy`, and a RuntimeWarning), and
    is made anew as soon as it is asked for on a quiet machine.

    device    "auto" (a GPU if there is one), or a torch.device; on "cpu" copies go from memory to memory and the
              device's kernel is the CPU's
    threads   of the CPU's kernel; None: one less than can run with a GPU, all without
    """
    return kept_or_measured(store, Engine, device=device, threads=threads, force=force)
