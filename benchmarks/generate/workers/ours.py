"""goldsmith.offload over the file of this run."""

from __future__ import annotations

import inspect
from typing import Any

from .plain import DTYPES, TransformersEngine

BETWEEN = "between two steps"


class GoldsmithEngine(TransformersEngine):
    """goldsmith.offload over the file of this run, in the precision that the options ask for."""

    inference = False  # generate enters it itself

    def __init__(self, options: dict[str, Any]) -> None:
        from goldsmith.hf import offload  # noqa: F401
        from goldsmith.offload import from_pretrained  # noqa: F401

        super().__init__(options)

    def load(self) -> str:
        from goldsmith.offload import from_pretrained

        wanted = {name: self.options.get(name) for name in ("dense_format", "compute")}
        known = keywords()
        notes = []
        if wanted["dense_format"] and "dense_format" not in known:
            notes.append(f"dense part in {self.options['dtype']}: no --dense-format in this version")
        given = {name: value for name, value in wanted.items() if value and name in known}
        self.offloaded = from_pretrained(
            self.options["path"], dtype=DTYPES[self.options["dtype"]], device=self.options["device"],
            gpu_budget=self.options["budget"], threads=self.options["threads"],
            max_length=self.options["context"], **given,
            **{name: self.options[name] for name in ("lanes", "prefill", "cache") if name in self.options},
        )  # fmt: skip
        self.model = self.offloaded.model
        format = self.offloaded.engine.store.format
        if format != self.options["format"]:
            notes.append(f"experts in {format}")
        return "; ".join(notes)

    def parts(self, ids: list[int], count: int) -> dict[str, float]:
        """Seconds of a token in each part of the native step, by its own counters, and between two steps."""
        self._generate(ids, 3)  # its first step prepares the arguments, and with them the counters
        forward, before = self.model.forward, self.model.forward.seconds
        if before is None:
            raise RuntimeError(f"no native step: {forward.why_not}")
        times, _ = self._generate(ids, count + 1)
        parts = {name: (after - before[name]) / count for name, after in forward.seconds.items()}
        return parts | {BETWEEN: sum(times[1:]) / count - sum(parts.values())}

    def close(self) -> None:
        if self.model is not None:
            self.offloaded.close()


def keywords() -> set[str]:
    """The keywords that this version's loading functions take."""
    from goldsmith.hf.offload.loading import load
    from goldsmith.offload.engine import Engine

    return {*inspect.signature(load).parameters, *inspect.signature(Engine).parameters}
