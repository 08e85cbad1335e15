"""The faults that faults.toml declares: edits of copies of the right specimens, with the truth about each."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from goldsmith.assay.ranks import RankTarget
from goldsmith.assay.ranks.causes import CAUSES

HERE = Path(__file__).resolve().parent


class RankCatalogueError(ValueError):
    """A mistake in faults.toml; the message names the specimen."""


@dataclass(frozen=True)
class RankFault:
    """An edit of a specimen. source: the public report of the bug; cause: the id that is right as the first cause."""

    specimen: str
    source: str
    what: str
    cause: str
    edits: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        repository, _, number = self.source.partition("#")
        return f"https://github.com/{repository}/issues/{number}"


@cache
def faults() -> tuple[RankFault, ...]:
    """Every fault, in the order of the file."""
    declared = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))["fault"]
    found = []
    for entry in declared:
        edits = tuple((e["old"].strip("\n"), e["new"].strip("\n")) for e in entry.pop("edit"))
        fault = RankFault(**entry, edits=edits)
        if fault.cause not in CAUSES:
            raise RankCatalogueError(f"{fault.specimen}: no cause {fault.cause!r}; there are: {', '.join(CAUSES)}")
        found.append(fault)
    return tuple(found)


def source_of(fault: RankFault, *, faulty: bool) -> str:
    """The specimen's source, with the fault in it if `faulty`; each old text must occur exactly once."""
    text = (HERE / "specimens" / f"{fault.specimen}.py").read_text(encoding="utf-8")
    for old, new in fault.edits if faulty else ():
        if text.count(old) != 1:
            raise RankCatalogueError(f"{fault.specimen}: the text to replace occurs {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    return text


def target(fault: RankFault, folder: Path, *, faulty: bool) -> RankTarget:
    """The target of a copy in `folder`, which ranks load from there."""
    path = folder / f"{fault.specimen}_{'wrong' if faulty else 'right'}.py"
    path.write_text(source_of(fault, faulty=faulty), encoding="utf-8")
    return replace(loaded(str(path)), load=partial(loaded, str(path)))


def loaded(path: str) -> RankTarget:
    """The target of a copy; also called on ranks."""
    name = f"rank_specimen_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RankCatalogueError(f"Python cannot import {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.target()
