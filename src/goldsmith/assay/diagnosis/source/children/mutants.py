"""Mutants: edited copies of the candidate's files, tried by the hundred in a child process.

An edit that crashes its process, never ends or eats the memory costs one restart, and is an outcome like any other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ....gate.isolation.encoding import receive, send
from ....gate.isolation.protocol import Closed, Connection, Malformed
from ..edits.edits import Edit
from ..reading.candidate_source import CandidateSource, NoSource
from .child import Child, NoAnswer
from .forked_outcome import WAIT
from .launches import Launch
from .parallel_makers import alternating

T = TypeVar("T")
CRASHED = "crashed"
_BATCH = 40
_BEGIN = 90.0  # seconds for the files as they are
_LEAST, _TIMES = 0.5, 8.0  # processor seconds for one edit: at least, and times what the files as they are take
_LARGER = 4.0  # times as many for a further problem, which may have larger sizes
_LATE = 1.0  # seconds of the clock more until the process is ended, since an alarm interrupts no C code


@dataclass(frozen=True)
class EditOutcome:
    """What an edited copy did. state: "right", "wrong", "raised", "slow" or "crashed".

    wrong: names of the wrong results of the problem that decided; share: of wrong elements, summed over them.
    changed: names of results that are others than those of the files as they are; moved: one of these is wrong there.
    stages: of a right edit, those that differ from the golden.
    """

    state: str
    wrong: tuple[str, ...] = ()
    share: float = 1.0
    problem: int = 0
    seconds: float = 0.0
    moved: bool = True
    changed: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


class Mutants:
    """The child process, started anew whenever an edit ended it."""

    def __init__(
        self, source: CandidateSource, problems: Sequence[Mapping[str, object]], *, on_cuda: bool = False,
        boxed: bool = False, known: dict[str, object] | None = None, processes: int = 1,
    ):  # fmt: skip
        """boxed: run the edits in a sandbox, because a program of the user's wrote them.

        known: what another process found out about the files as they are; processes: 1 or 2
        """
        self.second: Mutants | None = None
        self.source, self.problems, self.on_cuda, self.boxed = source, problems, on_cuda, boxed
        self.child: Child | None = None
        self.number = 0
        self.restarts = 0
        self.ends = False  # the files as they are end their process
        self.extra: list[Mapping[str, object]] = []
        self.kinds: dict[str, dict[str, str]] = {}
        self.known = known  # what the first process found out about the files as they are
        self.original = self._begin()
        if processes > 1 and not on_cuda and not self.ends:
            with contextlib.suppress(NoSource):  # one process does as well
                self.second = Mutants(source, problems, boxed=boxed, known=self.known)

    def tried(self, edits: Sequence[Edit]) -> Iterator[tuple[Edit, EditOutcome]]:
        """Each edit with its outcome; with a second process, as the outcomes come."""
        if self.second is None:
            yield from self._in_order(edits)
            return
        yield from alternating([self._in_order, self.second._in_order], edits)

    def _in_order(self, edits: Sequence[Edit]) -> Iterator[tuple[Edit, EditOutcome]]:
        left = list(edits)
        while left:
            batch, left = left[:_BATCH], left[_BATCH:]
            loads = self.source.loads(batch)
            yield from ((e, EditOutcome("raised")) for e, load in zip(batch, loads, strict=True) if load is None)
            ready = [(e, load) for e, load in zip(batch, loads, strict=True) if load is not None]
            while ready:
                done = 0
                for outcome in self._batch([load for _, load in ready]):
                    yield ready[done][0], outcome
                    done += 1
                ready = ready[done:]

    def _batch(self, texts: Sequence[Mapping[str, str]]) -> Iterator[EditOutcome]:
        """Outcomes until the process ends."""
        if self.child is None:
            self._again()
        seconds = self.seconds
        try:
            self.number += 1
            send(self._connection, self.number, {"do": "try", "edits": list(texts), "seconds": seconds}, pickled=True)
            for _ in texts:
                yield _outcome(self._receive(WAIT * seconds + _LATE))
        except TimeoutError:
            self._end()
            self.restarts += 1
            yield EditOutcome("slow")
        except (Closed, Malformed, OSError):
            self._end()
            self.restarts += 1
            yield EditOutcome(CRASHED)

    def further(self, problem: Mapping[str, object]) -> EditOutcome | None:
        """Add a further problem for `confirmed`; the outcome of the files as they are, None if the process ended."""
        outcome = self._asked({"do": "further", "problem": problem}, self.seconds, _outcome)
        if outcome is not None and outcome.state in ("right", "wrong"):
            self.extra.append(problem)
        return outcome

    def confirmed(self, texts: Mapping[str, str]) -> list[EditOutcome] | None:
        """The outcomes of the further problems, in which only that is wrong for which the edit is to blame."""
        seconds = _LARGER * self.seconds
        message = {"do": "confirm", "edited": dict(texts), "seconds": seconds}
        return self._asked(message, seconds * max(1, len(self.extra)), lambda reply: [_outcome(r) for r in reply])

    def more_work(self, texts: Mapping[str, str]) -> float:
        """The largest ratio of the work with the edit to that without, among the further problems; 1 if unknown."""
        seconds = self.seconds * max(1, len(self.extra))
        message = {"do": "work", "edited": dict(texts), "seconds": seconds}
        ratios = self._asked(message, seconds, lambda reply: [float(ratio) for ratio in reply])
        return max(ratios or (), default=1.0)

    def depends_on_layouts(self) -> bool:
        """Whether the files as they are give other results for equal values in another layout."""
        return bool(self._asked({"do": "layouts"}, 10 * self.seconds, bool))

    def launches(self, texts: Mapping[str, str]) -> list[Launch | None]:
        """The launches of Triton kernels with an edit, as a compiler needs them."""
        message = {"do": "launches", "edited": dict(texts), "seconds": _LARGER * self.seconds}
        return self._asked(message, _LARGER * self.seconds, list) or []

    @property
    def seconds(self) -> float:
        """For one edit and one problem."""
        return max(_LEAST, _TIMES * self.original.seconds)

    def _again(self) -> None:
        """Another process, with the further problems that the last one had."""
        self._begin()
        for problem in self.extra:
            self._asked({"do": "further", "problem": problem, "known": True}, _BEGIN / WAIT, _outcome)

    def _asked(self, message: Mapping[str, object], seconds: float, read: Callable[[Any], T]) -> T | None:
        if self.child is None:
            self._again()
        try:
            self.number += 1
            send(self._connection, self.number, message, pickled=True)
            return read(self._receive(WAIT * seconds + _LATE))
        except (TimeoutError, Closed, Malformed, OSError):
            self._end()
            self.restarts += 1
            return None

    def texts(self, edit: Edit) -> dict[str, str]:
        return self.source.texts(edit)

    @property
    def _connection(self) -> Connection:
        if self.child is None:
            raise Closed
        return self.child.connection

    def _receive(self, seconds: float) -> object:
        """The next reply to the last request; replies to earlier ones were given up."""
        until = time.monotonic() + seconds
        while True:
            number, reply = receive(self._connection, until)
            if number == self.number:
                return reply

    def _begin(self) -> EditOutcome:
        try:
            main = f"{__package__}.mutant_process:serve"
            self.child = Child.start(main, self.source, boxed=self.boxed, on_cuda=self.on_cuda)
        except NoAnswer as error:
            raise NoSource(str(error)) from error
        self.number = 0
        message = {
            "do": "begin",
            **self.source.to_arguments(),
            "problems": list(self.problems),
            "edited": self.source.edited_texts(),
            "unseen": self.ends,
            "known": self.known,
        }
        try:
            send(self._connection, 0, message, pickled=True)
            reply: Any = self._receive(_BEGIN)
            self.kinds = reply.get("kinds", {}) or self.kinds
            self.known = self.known or reply.get("known")
            return _outcome(reply)
        except (TimeoutError, Closed, Malformed, OSError) as error:
            self._end()
            if not self.ends:
                self.ends = True
                return self._begin()
            raise NoSource(
                f"the candidate could not be run again in a child process ({type(error).__name__})"
            ) from error

    def close(self) -> None:
        if self.second is not None:
            self.second.close()
        self._end()

    def _end(self) -> None:
        """Ends the own process alone: the second one may be busy in another thread."""
        if self.child is not None:
            self.child.close()
            self.child = None

    def __enter__(self) -> Mutants:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _outcome(reply: Any) -> EditOutcome:
    """An outcome from what a child process says; Malformed for anything else."""
    try:
        return EditOutcome(
            str(reply["state"]), tuple(str(n) for n in reply["wrong"]), float(reply["share"]), int(reply["problem"]),
            float(reply["seconds"]), bool(reply["moved"]), tuple(str(n) for n in reply["changed"]),
            tuple(str(n) for n in reply["stages"]),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError) as error:
        raise Malformed("an outcome that is none") from error
