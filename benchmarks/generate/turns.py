"""Rounds of timing: every engine computes a prompt and decodes in each, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .engines.processes import EngineError, EngineProcess

PAUSE = 0.05  # seconds before a turn, so that the threads of the last engine go to sleep
BEFORE = 16  # tokens before those that are decoded


@dataclass
class Measured:
    """What one engine has shown so far; `failed` ends its rounds."""

    prompt: list[float] = field(default_factory=list)  # tokens per second, of each round
    decode: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    def watch(self, process: EngineProcess) -> None:
        for name, value in process.memory().items():
            self.memory[name] = max(value, self.memory.get(name, 0)) if name == "peak" else value


def warm(process: EngineProcess, prompt: Sequence[int], count: int) -> None:
    """Untimed: what an engine compiles, packs or allocates once."""
    process.ask("prompt", "-", prompt)
    process.ask("decode", min(count, 8), prompt[:BEFORE])


def one_turn(process: EngineProcess, measured: Measured, prompt: Sequence[int], count: int) -> None:
    time.sleep(PAUSE)
    measured.prompt.append(len(prompt) / float(process.ask("prompt", "-", prompt)["seconds"]))
    answer: dict[str, Any] = process.ask("decode", count, prompt[:BEFORE])
    measured.decode.append(len(answer["seconds"]) / sum(answer["seconds"]))
    measured.watch(process)


def rounds(
    engines: Mapping[str, Callable[[], EngineProcess]], results: Mapping[str, Measured], number: int,
    prompt: Sequence[int], count: int, done: Callable[[], None], before: Callable[[], None],
    *, keep: Mapping[str, EngineProcess] | None,
) -> None:  # fmt: skip
    """Fill the results. `keep` has the loaded engines, which take turns; None: one after another is started and ended,
    because they do not fit into memory together, and loading each for every turn would take most of the time.

    before() comes before each round, done() after each turn.
    """
    if keep is not None:
        for _ in range(number):
            before()
            for name in engines:
                if not results[name].failed:
                    _turn(keep[name], results[name], prompt, count)
                done()
        return
    for name, start in engines.items():
        measured, process = results[name], None
        try:
            process = start()
            warm(process, prompt, count)
            for _ in range(number):
                before()
                one_turn(process, measured, prompt, count)
                done()
        except EngineError as error:
            measured.failed = str(error)
        finally:
            if process is not None:
                process.close()


def _turn(process: EngineProcess, measured: Measured, prompt: Sequence[int], count: int) -> None:
    try:
        one_turn(process, measured, prompt, count)
    except EngineError as error:
        measured.failed = str(error)
