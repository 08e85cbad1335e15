"""SharedGenerators: Python's and NumPy's random generators, which all code shares, and whether a call has seeded them.

A call may draw from them. Numbers that it draws lead from one state to the next; a seed leads to a state that does not
depend on the one before. Both are Mersenne Twisters: 624 words and a position in them.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_WORDS = 624
_FIRST_OF_AN_ARRAY = 0x80000000  # the first word after a seed that is hashed, as Python's are
_FACTOR = 1812433253  # of the recurrence that makes the words from a seed of one word


class _Twister(NamedTuple):
    """words: of its state; position: of the word that is drawn next, `_WORDS` where new ones are made first."""

    words: tuple[int, ...]
    position: int

    @property
    def fresh(self) -> bool:
        """Whether it is a state that a seed gives, before any number is drawn."""
        if self.position != _WORDS:
            return False
        return self.words[0] == _FIRST_OF_AN_ARRAY or all(
            later == (_FACTOR * (word ^ word >> 30) + number + 1) & 0xFFFFFFFF
            for number, (word, later) in enumerate(zip(self.words, self.words[1:], strict=False))
        )


class SharedGenerators:
    """Looked at before and after calls."""

    def __init__(self) -> None:
        self.states: dict[str, set[_Twister]] = {}  # after calls which changed them
        self.given: dict[str, _Twister] = {}

    def begin(self) -> None:
        """Gives them states that they never had, and that no seed gives: one number is drawn."""
        for name, seed, draw, state in _generators():
            seed(int.from_bytes(os.urandom(4), "little"))
            draw()
            self.given[name] = state()

    def seeded(self) -> list[str]:
        """Sentences about those that have a seed of the candidate's."""
        sentences = []
        for name, _, _, state in _generators():
            now, known = state(), self.states.setdefault(name, set())
            if name not in self.given or now == self.given[name]:
                continue
            given = self.given[name]
            backward = now.words == given.words and now.position < given.position
            if now in known or now.fresh or backward:  # after draws, the state depends on the one before
                sentences.append(f"{name} has a seed of the candidate's")
            known.add(now)
        return sentences


def _generators() -> Iterator[tuple[str, Callable[[int], object], Callable[[], object], Callable[[], _Twister]]]:
    """(what, how to seed it, how to draw, its state)."""
    yield "Python's random generator", random.seed, random.random, _of_python
    if "numpy" in sys.modules:
        numpy: Any = importlib.import_module("numpy.random")  # NumPy imports it when it is first used
        yield "NumPy's random generator", numpy.seed, numpy.random_sample, lambda: _of_numpy(numpy)


def _of_python() -> _Twister:
    words = random.getstate()[1]
    return _Twister(words[:-1], words[-1])


def _of_numpy(numpy: Any) -> _Twister:
    _, words, position, *_ = numpy.get_state()
    return _Twister(tuple(words.tolist()), int(position))
