"""The fields that rows of layers and whole models share: the verdict, and the conditions of the run."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from goldsmith.cli.bench.rows import rounded
from goldsmith.cli.bench.session import Session
from goldsmith.core.device import machine

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """machine: GPU and CPU, because experts use both; load: the load average before the run, the work of others."""

    verified: bool | None = None
    verified_by: str = ""
    error: float | None = None
    note: str = ""
    threads: int | None = None
    machine: str = ""
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    load: float | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return {k: _rounded(v) for k, v in asdict(self).items() if k == "commit" or v not in (None, "", {})}

    def under(self, run: Session, versions: Mapping[str, str]) -> Self:
        """The row with the conditions of its run, and the versions of the peers."""
        here = run.conditions
        return replace(
            self, machine=named(here.device, here.machine), device=here.device,
            versions={**here.versions, **versions}, commit=here.commit, date=here.date, load=run.load,
        )  # fmt: skip


def named(device: str, name: str) -> str:
    """The machine's name, with its CPU where the conditions name a GPU only."""
    facts = machine()
    return name if device == "cpu" else f"{name}; {facts.cpu}, {facts.cores} cores"


def installed(packages: Sequence[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _rounded(value: object) -> object:
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else rounded(value)
