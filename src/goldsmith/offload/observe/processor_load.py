"""The share of the processors' time that other programs take during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from ...core.processors import allowed

BUSY = 0.05  # of the processors' time; if other programs take more, the machine counts as busy
_WORK = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: columns of /proc/stat


class ProcessorLoad:
    """`with ProcessorLoad() as load:` ..., then `load.share`

    share   of the time of the processors that this process may use: the part that was neither idle nor spent by this
            process and the children it waited for; None where the system does not say
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self.share: float | None = None

    def __enter__(self) -> ProcessorLoad:
        self._began = self._now()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        began, ended = self._began, self._now()
        if began is None or ended is None or ended[1] <= began[1]:
            return
        work, all_of_it, own = (after - before for before, after in zip(began, ended))
        self.share = min(1.0, max(0.0, (work - own) / all_of_it))

    def _now(self) -> tuple[float, float, float] | None:
        """Seconds of the allowed processors: busy and total; and seconds that this process used."""
        try:
            lines = self._stat.read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        mine = {f"cpu{i}" for i in allowed()}
        rows = [[int(n) for n in words[1:9]] for words in map(str.split, lines) if words and words[0] in mine]
        if not rows or any(len(row) < 8 for row in rows):
            return None
        tick = os.sysconf("SC_CLK_TCK")
        return sum(row[i] for row in rows for i in _WORK) / tick, sum(map(sum, rows)) / tick, sum(os.times()[:4])


def busy(seconds: float = 0.1) -> bool:
    """Whether other programs use the processors now."""
    with ProcessorLoad() as others:
        time.sleep(seconds)
    return (others.share or 0.0) > BUSY
