"""Where ranks stand when time is up: each writes its stack to a pipe on a signal, even while it waits in C++."""

from __future__ import annotations

import faulthandler
import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

from ..support.deadline import WRITE_STACK

SERVES = "run_on_rank"  # the function in pool.py that calls the user's
PATIENCE_S = 2.0  # a rank writes its stack at once; this is for a machine under load
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_COLLECTIVES = f"{os.sep}torch{os.sep}distributed{os.sep}distributed_c10d.py"


@dataclass(frozen=True)
class Standing:
    """A rank's place: the innermost frame of the user's code, and the collective that it called there, if any."""

    place: str
    collective: str = ""


def write_on_signal(pipe: int) -> None:
    """In a rank: from now on, WRITE_STACK writes all threads' stacks to this end of a pipe, which must stay open."""
    faulthandler.register(WRITE_STACK, file=pipe, all_threads=True)


def written(processes: Mapping[int, int | None], pipes: Mapping[int, Connection]) -> dict[int, Standing]:
    """{rank: where it stands}, for the ranks that still run; `pipes` are the other ends."""
    for process in processes.values():
        if process is not None:
            try:
                os.kill(process, WRITE_STACK)
            except ProcessLookupError:
                continue
    until = time.monotonic() + PATIENCE_S
    texts: dict[int, str] = {}
    standing: dict[int, Standing] = {}
    while waiting := [rank for rank in processes if rank not in standing]:
        ready = wait([pipes[rank] for rank in waiting], max(0.0, until - time.monotonic()))
        if not ready:
            break
        for rank in (rank for rank in waiting if pipes[rank] in ready):
            text = os.read(pipes[rank].fileno(), 1 << 16).decode(errors="replace")
            if not text:  # the rank has ended
                return standing
            texts[rank] = texts.get(rank, "") + text
            if (place := of_text(texts[rank])) is not None:
                standing[rank] = place
    return standing


def own_text() -> str:
    """The stacks of all threads of this process, as WRITE would write them."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def of_text(text: str) -> Standing | None:
    """Of the stack of the thread that runs the user's function, the innermost frame first."""
    threads = [t for t in re.split(r"(?:Current thread|Thread) 0x", text) if f" in {SERVES}\n" in t]
    if not threads:
        return None
    frames = [(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(threads[-1])]
    called = [function for file, _, function in frames if file.endswith(_COLLECTIVES)]
    collective = called[-1] if called else ""  # the outermost: others are its helpers
    file, line, function = next((f for f in frames if not of_torch(f[0])), frames[0])
    return Standing(f"{function} ({os.path.basename(file)}:{line})", collective)


def of_torch(file: str) -> bool:
    """Whether a file belongs to torch or to the standard library."""
    if file.startswith("<frozen ") or f"{os.sep}torch{os.sep}" in file:
        return True
    return f"{os.sep}lib{os.sep}python" in file and "site-packages" not in file


def explained(
    standing: Mapping[int, Standing], answered: Collection[int], limit_s: float, silent: Collection[int] = ()
) -> str:
    """One sentence that names the missing rank, and where the others wait for it.

    silent   ranks that neither answered nor wrote a stack
    """
    waiting = {rank: s for rank, s in standing.items() if s.collective}
    missing = {rank: s for rank, s in standing.items() if not s.collective}
    after = f"in {limit_s:.0f} s"
    mute = [f"rank {rank} did not answer {after}, and wrote no stack" for rank in sorted(silent)]
    if waiting and (missing or answered or mute):
        waits = _list(f"rank {rank} waits in {s.collective}, called in {s.place}" for rank, s in waiting.items())
        here = [f"rank {rank} did not answer {after}: it is in {s.place}" for rank, s in missing.items()]
        here += [f"rank {rank} has returned without that call" for rank in sorted(answered)] + mute
        return f"a rank is missing: {_list(here)}; {waits}"
    if waiting:
        waits = _list(f"rank {rank} in {s.collective}, called in {s.place}" for rank, s in waiting.items())
        return f"the ranks did not answer {after}, because they wait for each other in different calls: {waits}"
    places = [f"rank {rank} did not answer {after}: it is in {s.place}" for rank, s in missing.items()]
    return _list([*places, *mute]) or f"the ranks did not answer {after}, and wrote no stack"


def _list(phrases: Iterable[str]) -> str:
    return "; ".join(phrases)
