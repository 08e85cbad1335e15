"""Too little memory: how it is told from other errors, and what is said of it."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from ..options import Options
from ..records import checkpoints
from .session import CHECKPOINTS, again

# torch has a class for a GPU's memory alone; of the CPU's it says these, the last of more bytes than can be counted
SIGNS = ("DefaultCPUAllocator", "std::bad_alloc", "Storage size calculation overflowed")


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that memory, of the CPU or a GPU, does not suffice."""
    from torch import OutOfMemoryError

    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    return said or isinstance(error, (MemoryError, OutOfMemoryError))


def paragraph(error: BaseException, options: Options, *, begun: bool) -> str:
    """What was too much, what takes less, and which command goes on from where.

    Before a run has `begun`, what lies in its folder is its own only if it is to go on from there.
    """
    wanted = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
    less = "a smaller --batch-size (with a larger --grad-accum), a smaller --seq-len or --rank"
    if not options.checkpointing:
        less = f"--checkpointing, {less}"
    if options.device == "cpu" and options.format in ("auto", "fp32", "bf16", "int8"):
        less += ", or --format int4"
    said = f"--device {options.device} has too little memory{f' for {_size(wanted[1])} more' if wanted else ''}."
    output = Path(options.output)
    done = checkpoints.steps(output / CHECKPOINTS) if begun or options.resume == "auto" else []
    if not done:
        return f"{said} Less takes {less}."
    or_with, but_for = ("", "") if options.checkpointing else (", or with --checkpointing", "but for --checkpointing ")
    return (
        f"{said} The checkpoint of step {done[-1]:,} is whole: when more memory is free{or_with}, "
        f"{again(output, options.resume)} goes on from there. Less takes {less}; {but_for}that is another run, with "
        "another --output or --resume never."
    )


def _size(said: str) -> str:
    """torch gives plain bytes for a CPU, and units for a GPU."""
    number = re.fullmatch(r"(\d+) ?bytes", said)
    if number is None:
        return said
    unit, name = (2**30, "GiB") if int(number[1]) >= 2**30 else (2**20, "MiB")
    return f"{int(number[1]) / unit:,.1f} {name}"
