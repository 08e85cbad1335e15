"""ProcessorLoad: the share of the processors' time that other programs take during a measurement."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from ...core.processors import allowed

BUSY = 0.05  # if other programs take a larger share of the processors' time, the machine counts as busy
_WORK = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal: columns of /proc/stat


class ProcessorLoad:
    """`with ProcessorLoad() as load:` ..., then `load.share`

    share   the share of the time that other programs took, on the processors that this process may use; None if the
            system does not report it. Children that this process waited for are not other programs.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self.share: float | None = None

    def __enter__(self) -> ProcessorLoad:
        self._start = self._times()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        start, end = self._start, self._times()
        if start is None or end is None or end[1] <= start[1]:
            return
        work, total, own = (after - before for before, after in zip(start, end))
        self.share = min(1.0, max(0.0, (work - own) / total))

    def _times(self) -> tuple[float, float, float] | None:
        """Counters in seconds: the allowed processors busy, the same in total, and this process with its children."""
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
    """Whether other programs use more than BUSY of the processors now."""
    with ProcessorLoad() as load:
        time.sleep(seconds)
    return (load.share or 0.0) > BUSY
