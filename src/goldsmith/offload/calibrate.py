"""`calibrate`: measures the scheduler's costs, with the Engine whose calls are timed."""

from __future__ import annotations

import torch

from .calibration.calibration import Calibration, kept_or_measured
from .engine import Engine
from .store.expert_store import ExpertStore


def calibrate(
    store: ExpertStore, *, device: torch.device | str = "auto", threads: int | None = None, force: bool = False
) -> Calibration:
    """The costs of this store's experts on this machine: cached, or measured now

    Measuring takes about 4.5 seconds with an H100, and 6 to 22 the first time in a process, because of compilation and
    imports (rows offload.calibrate of `python -m benchmarks.offload`).

    Measures the CPU's kernel at 1 to 240 tokens per expert, copies, the device's kernel at 1 to 512 tokens, the CPU's
    kernel while copies run, and latencies: the overhead of a call on each lane, and the shortest time of a call that
    uses both CPU and device. The result is cached as JSON in the cache folder ($GOLDSMITH_CACHE), under version,
    machine, torch, format, sizes, threads and device. A damaged file, or one with another key, makes it measure again;
    so does force=True. A calibration from a busy machine says so (`busy`, and a RuntimeWarning); it is measured again
    by the next request on a quiet machine.

    device    "auto" (a GPU if there is one), or a torch.device; on "cpu" copies go from memory to memory, and the
              device's kernel is the CPU's
    threads   of the CPU's kernel; None: all that can run, or one less with a GPU
    """
    return kept_or_measured(store, Engine, device=device, threads=threads, force=force)
