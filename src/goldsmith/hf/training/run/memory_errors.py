"""Out-of-memory errors of a run: which options take less memory."""

from __future__ import annotations

import re
from pathlib import Path

from ..options import Options
from ..records import checkpoints
from .session import CHECKPOINTS, again


def paragraph(error: BaseException, options: Options, *, begun: bool) -> str:
    """What needed too much memory, what needs less, and which command resumes the run.

    Before the run has `begun`, checkpoints in its folder belong to it only if it is to resume from them.
    """
    amount = re.search(r"tried to allocate ([\d.]+ ?\w+)", str(error), re.IGNORECASE)
    less = "a smaller --batch-size (with a larger --grad-accum), a smaller --seq-len or --rank"
    if not options.checkpointing:
        less = f"--checkpointing, {less}"
    if options.device == "cpu" and options.format in ("auto", "fp32", "bf16", "int8"):
        less += ", or --format int4"
    problem = f"--device {options.device} has too little memory{f' for {_size(amount[1])} more' if amount else ''}."
    output = Path(options.output)
    saved_steps = checkpoints.steps(output / CHECKPOINTS) if begun or options.resume == "auto" else []
    if not saved_steps:
        return f"{problem} These take less: {less}."
    or_with, but_for = ("", "") if options.checkpointing else (", or with --checkpointing", "but for --checkpointing ")
    return (
        f"{problem} The checkpoint of step {saved_steps[-1]:,} is complete: when more memory is free{or_with}, "
        f"{again(output, options.resume)} resumes from there. These take less: {less}; {but_for}that is another run, "
        "with another --output or --resume never."
    )


def _size(amount: str) -> str:
    """The amount in readable units; torch gives plain bytes for a CPU, and units for a GPU."""
    number = re.fullmatch(r"(\d+) ?bytes", amount)
    if number is None:
        return amount
    unit, name = (2**30, "GiB") if int(number[1]) >= 2**30 else (2**20, "MiB")
    return f"{int(number[1]) / unit:,.1f} {name}"
