"""goldsmith.offload over the file of this run."""

from __future__ import annotations

import inspect
from typing import Any

from .plain import DTYPES, TransformersEngine


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
        """The experts' part divided into kernels and what the engine does around them."""
        self.offloaded.reset_stats()
        seconds = super().parts(ids, count)
        stats = self.offloaded.stats()
        if "experts" in seconds and stats.t_wall and self.options["device"] == "cpu":
            # the share of its kernel in the time of a call, by all calls, the prompt's among them
            kernels = seconds["experts"] * min(1.0, stats.t_cpu / stats.t_wall)
            seconds["experts: kernels"] = kernels
            seconds["experts: engine around them"] = seconds.pop("experts") - kernels
        return seconds

    def close(self) -> None:
        if self.model is not None:
            self.offloaded.close()


def keywords() -> set[str]:
    """The keywords that this version's loading functions take."""
    from goldsmith.hf.offload.loading import load
    from goldsmith.offload.engine import Engine

    return {*inspect.signature(load).parameters, *inspect.signature(Engine).parameters}
