"""Rounds of timing: every engine computes a prompt and decodes in each, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .processes import EngineError, EngineProcess

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
    """Fill the results. `keep` has the loaded engines; None: each is started for its turn and ended after it.

    before() comes before each round, done() after each turn.
    """
    for _ in range(number):
        before()
        for name, start in engines.items():
            measured = results[name]
            if not measured.failed:
                process = None
                try:
                    process = keep[name] if keep is not None else start()
                    if keep is None:
                        warm(process, prompt, count)
                    one_turn(process, measured, prompt, count)
                except EngineError as error:
                    measured.failed = str(error)
                finally:
                    if keep is None and process is not None:
                        process.close()
            done()
