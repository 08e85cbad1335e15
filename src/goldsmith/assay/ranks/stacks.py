"""Where ranks stand when time is up: each writes its stack to a file on a signal, even while it waits in C++."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

WRITE = signal.SIGUSR2
SERVES = "_serve"  # the function in pool.py that calls the user's
PATIENCE_S = 2.0  # a rank writes its stack at once; this is for a machine under load
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}distributed_c10d.py"


@dataclass(frozen=True)
class Standing:
    """A rank's place: the innermost frame of the user's code, and the collective that it called there, if any."""

    place: str
    collective: str = ""


def path(store: str, rank: int) -> str:
    return f"{store}.stack{rank}"


def write_on_signal(store: str, rank: int) -> None:
    """In a rank: from now on, WRITE appends the main thread's stack to the rank's file."""
    file = open(path(store, rank), "w")  # faulthandler keeps it open
    faulthandler.register(WRITE, file=file, all_threads=True)


def written(processes: Mapping[int, int | None], store: str) -> dict[int, Standing]:
    """{rank: where it stands}, for the ranks that still run."""
    for process in processes.values():
        if process is not None:
            try:
                os.kill(process, WRITE)
            except ProcessLookupError:
                continue
    until = time.monotonic() + PATIENCE_S
    standing: dict[int, Standing] = {}
    while len(standing) < len(processes) and time.monotonic() < until:
        time.sleep(0.1)
        for rank in processes:
            if os.path.exists(path(store, rank)):
                with open(path(store, rank), encoding="utf-8", errors="replace") as file:
                    text = file.read()
                if (place := _standing(text)) is not None:
                    standing[rank] = place
    return standing


def _standing(text: str) -> Standing | None:
    """Of the stack of the thread that runs the user's function, the innermost frame first."""
    threads = [t for t in re.split(r"(?:Current thread|Thread) 0x", text) if f" in {SERVES}" in t]
    if not threads:
        return None
    frames = [(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(threads[-1])]
    called = [function for file, _, function in frames if file.endswith(_COLLECTIVES)]
    collective = called[-1] if called else ""  # the outermost: others are its helpers
    file, line, function = next((f for f in frames if not of_torch(f[0])), frames[0])
    return Standing(f"{function} ({os.path.basename(file)}:{line})", collective)


def of_torch(file: str) -> bool:
    """Whether a file belongs to torch or to the standard library."""
    return f"{os.sep}torch{os.sep}" in file or f"{os.sep}lib{os.sep}python" in file and "site-packages" not in file


def explained(standing: Mapping[int, Standing], answered: Collection[int], limit_s: float) -> str:
    """One sentence that names the missing rank, and where the others wait for it."""
    waiting = {rank: s for rank, s in standing.items() if s.collective}
    missing = {rank: s for rank, s in standing.items() if not s.collective}
    after = f"in {limit_s:.0f} s"
    if waiting and (missing or answered):
        waits = _list(f"rank {rank} waits in {s.collective}, called in {s.place}" for rank, s in waiting.items())
        here = [f"rank {rank} did not answer {after}: it is in {s.place}" for rank, s in missing.items()]
        here += [f"rank {rank} has returned without that call" for rank in sorted(answered)]
        return f"a rank is missing: {_list(here)}; {waits}"
    if waiting:
        waits = _list(f"rank {rank} in {s.collective}, called in {s.place}" for rank, s in waiting.items())
        return f"the ranks did not answer {after}, because they wait for each other in different calls: {waits}"
    places = _list(f"rank {rank} did not answer {after}: it is in {s.place}" for rank, s in missing.items())
    return places or f"the ranks did not answer {after}, and wrote no stack"


def _list(phrases: Iterable[str]) -> str:
    return "; ".join(phrases)
