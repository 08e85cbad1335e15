"""Output of `goldsmith serve`: progress while it loads, memory, and where it listens."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from ..generate.display import GenerateDisplay, memory_text, needs_text
from ..terminal import count, size

if TYPE_CHECKING:
    from ...hf.offload.memory_needs import MemoryNeeds
    from ...hf.serving.batcher import Served, ServingLimits
    from ...offload.memory.host_memory import ProcessMemory

LABEL, WIDTH = 9, 80


class ServeDisplay(GenerateDisplay):
    """Prints everything to `err`."""

    def __init__(self, err: Console, *, as_json: bool) -> None:
        super().__init__(err, stream=False, as_json=as_json)

    def needs(self, needs: MemoryNeeds, tokens: int, prompt: int) -> None:
        """What the server will take, before anything is read."""
        self._lines("needs", needs_text(needs, tokens, prompt))
        rest = needs.dense + tokens * needs.token
        if rest <= needs.available < rest + needs.store:
            self.note("The store does not fit in memory as well: experts will be read from the disk again and again.")

    def listens(
        self, url: str, names: Sequence[str], limits: ServingLimits, memory: ProcessMemory, gpu: int | None, chat: bool
    ) -> None:
        """The server is ready: memory as measured, the address, and a command to try."""
        device = "" if gpu is None else f", and {size(gpu)} of the GPU"
        self._lines("takes", f"{memory_text(memory)}{device}")
        self._lines("models", ", ".join(names))
        self._lines(
            "requests",
            f"{limits.parallel} at once, {limits.queue} waiting; {limits.context:,} tokens each, "
            f"{limits.tokens:,} together",
        )
        self._lines("listens", f"[bold green]{escape(url)}/v1[/]   (Ctrl-C ends it)", markup=True)
        path, key = ("chat/completions", "messages") if chat else ("completions", "prompt")
        value: object = [{"role": "user", "content": "Hello"}] if chat else "Hello"
        body = json.dumps({"model": names[0], key: value, "max_tokens": 32})
        self._lines("try", f"curl {url}/v1/{path} \\", markup=True)
        self.err.print(f"{'':{LABEL}}  -H 'Content-Type: application/json' \\", soft_wrap=True, markup=False)
        self.err.print(f"{'':{LABEL}}  -d '{body}'", soft_wrap=True, markup=False)

    def ended(self, served: Served) -> None:
        failed = f", {served.failed:,} failed" if served.failed else ""
        answers = "answer" if served.answered == 1 else "answers"
        self.err.print(f"Stopped after {served.answered:,} {answers} with {count(served.tokens, 'token')}{failed}.")

    def _lines(self, label: str, text: str, *, markup: bool = False) -> None:
        lines = [text] if markup else textwrap.wrap(text, WIDTH - LABEL, break_long_words=False, break_on_hyphens=False)
        for number, line in enumerate(lines):
            head = label if not number else ""
            shown = line if markup else escape(line)
            self.err.print(f"[dim]{head:{LABEL}}[/]{shown}", soft_wrap=True)
