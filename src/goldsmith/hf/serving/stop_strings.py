"""StopStrings: a text that grows, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the end of a text as long as it may be the beginning of a stop string.

    found   whether a stop string has appeared; it and what follows are not part of the text
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, piece: str) -> str:
        """The characters that are final once `piece` has been added."""
        if self.found:
            return ""
        text, self._held = self._held + piece, ""
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if places:
            self.found = True
            return text[: min(places)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """The characters held back, at the end of the text."""
        text, self._held = self._held, ""
        return "" if self.found else text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
