"""Faults and hosts as the files in faults/ declare them, and how a fault becomes an edited copy of its host.

A host is a file in faults/: where its module is for each backend, and whether it is held out (its faults are then
never used for fitting). A fault is an edit of one file of a host with the truth about it, which is written before the
fault is run. A host's own files are never changed: the copy is.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from . import native_library

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAULTS = HERE / "faults"
NATIVE, NATIVE_SOURCES = "native", "csrc"
_ID = re.compile(r"[MGSR]\d\d[a-z]?")
OURS = "goldsmith"
_HOST_KEYS = {"name", "about", "backends", "held_out", "package", "cases", "author"}
_FAULT_KEYS = {
    "id", "backend", "what", "file", "edit", "verdict", "stages", "causes", "params", "cases", "note", "equivalent",
    "amended", "dtype", "together",
}  # fmt: skip


class CatalogueError(ValueError):
    """A file in faults/ says something that cannot be; the text names file and fault."""


@dataclass(frozen=True)
class Host:
    """Something that faults are put into.

    backends  backend -> the module's file below the root of the checkout
    package   dotted name of an operator that we ship ("goldsmith.mhc.post"); "" for a specimen with `target()`
    cases     those of the operator's cases that are tried; a specimen's are all its own
    author    who wrote the kernel and its faults: "goldsmith", or "stranger" for one who had not read the rules
    """

    name: str
    about: str
    backends: dict[str, str]
    held_out: bool = False
    package: str = ""
    cases: tuple[str, ...] = ()
    author: str = OURS


@dataclass(frozen=True)
class Fault:
    """An edit with its truth.

    edits       (old text, new text): each old text occurs exactly once in the file
    verdict     what a check must say: "fail", "pass" (no fault at all), or "reference_fault"
    stages      any of these may be named as the first wrong one
    causes      any of these ids may stand first
    params      what the best right cause should say, index sets in the names of the case's sizes: [["32", "D"]]
    cases       names of the cases in which it shows; all of the host's without it
    note        id of the note that must be there instead of an accusation
    equivalent  why no golden can tell it from the right kernel; listed then, not counted
    amended     why the truth was changed after a run (only when it was demonstrably wrong)
    dtype       of the inputs, where it is not the host's own
    together    it shows only in a case after another one: all cases are examined in one row
    """

    id: str
    host: Host
    backend: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]
    verdict: str = "fail"
    stages: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    params: dict[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = ()
    note: str = ""
    equivalent: str = ""
    amended: str = ""
    dtype: str = ""
    together: bool = False

    @property
    def key(self) -> str:
        return f"{self.id} {self.host.name} {self.backend}"

    @property
    def counted(self) -> bool:
        """Whether detection, stage and cause are counted for it."""
        return self.verdict == "fail" and not self.equivalent


@cache
def hosts() -> dict[str, Host]:
    """Every host, by name."""
    return {host.name: host for host, _ in _files()}


@cache
def faults() -> tuple[Fault, ...]:
    """Every fault, in the order of the files."""
    found = tuple(fault for _, faults in _files() for fault in faults)
    keys = [f.key for f in found]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise CatalogueError(f"{twice[0]} is declared twice; add a letter to one id")
    return found


@cache
def _files() -> list[tuple[Host, list[Fault]]]:
    return [_file(path) for path in sorted(FAULTS.glob("*.toml"))]


def _file(path: Path) -> tuple[Host, list[Fault]]:
    said = tomllib.loads(path.read_text(encoding="utf-8"))
    _only(path.name, said, {"host", "fault"})
    _only(f"{path.name} [host]", said["host"], _HOST_KEYS)
    host = Host(**{**said["host"], "cases": tuple(said["host"].get("cases", ()))})
    return host, [_fault(path, host, entry) for entry in said.get("fault", ())]


def _fault(path: Path, host: Host, entry: dict[str, Any]) -> Fault:
    name = f"{path.name} {entry.get('id', '?')}"
    _only(name, entry, _FAULT_KEYS)
    if not _ID.fullmatch(entry["id"]):
        raise CatalogueError(f"{name}: an id is M, G, S or R, two digits, and a letter where a host has several")
    backend = entry.get("backend", next(iter(host.backends)))
    if backend not in host.backends:
        raise CatalogueError(f"{name}: backend {backend!r} is not among {', '.join(host.backends)}")
    edits = tuple((e["old"].strip("\n"), e["new"].strip("\n")) for e in entry["edit"])
    fault = Fault(
        id=entry["id"], host=host, backend=backend, what=entry["what"],
        file=entry.get("file", host.backends[backend]), edits=edits, verdict=entry.get("verdict", "fail"),
        params=entry.get("params", {}), together=entry.get("together", False),
        **{k: tuple(entry.get(k, ())) for k in ("stages", "causes", "cases")},
        **{k: entry.get(k, "") for k in ("note", "equivalent", "amended", "dtype")},
    )  # fmt: skip
    if fault.counted and not (fault.stages and fault.causes):
        raise CatalogueError(f"{name}: a fault that counts needs stages and causes")
    return fault


def _only(name: str, said: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(said) - known)
    if unknown:
        raise CatalogueError(f"{name}: unknown key {unknown[0]!r}; there are: {', '.join(sorted(known))}")


def select(
    fault: str | None = None, host: str | None = None, backend: str | None = None, author: str | None = None
) -> list[Fault]:
    """The faults of that id (M04 takes M04b along), host, backend and author; raises with what exists."""
    for what, asked, exist in (
        ("host", host, list(hosts())),
        ("backend", backend, sorted({b for h in hosts().values() for b in h.backends})),
        ("author", author, sorted({h.author for h in hosts().values()})),
        ("fault", fault, sorted({f.id[:3] for f in faults()} | {f.id for f in faults()})),
    ):
        if asked is not None and asked not in exist:
            raise CatalogueError(f"no {what} {asked!r}; there are: {', '.join(exist)}")
    return [
        f for f in faults()
        if (fault is None or fault in (f.id, f.id[:3])) and host in (None, f.host.name) and backend in (None, f.backend)
        and author in (None, f.host.author)
    ]  # fmt: skip


# copies


def applied(source: str, fault: Fault) -> str:
    """The file's text with the fault in it; raises when an old text does not occur exactly once."""
    for old, new in fault.edits:
        count = source.count(old)
        if count != 1:
            raise CatalogueError(f"{fault.key}: the text to replace occurs {count} times in {fault.file}: {old!r}")
        source = source.replace(old, new)
    return source


def unfit(faults: Iterable[Fault]) -> list[str]:
    """What is wrong with the edits that their files no longer take."""
    said = []
    for fault in faults:
        try:
            applied((ROOT / fault.file).read_text(encoding="utf-8"), fault)
        except (CatalogueError, OSError) as error:
            said.append(str(error))
    return said


def copy(host: Host, backend: str, fault: Fault | None, folder: Path) -> Path:
    """Copy the host to `folder`, with the fault in it; returns the module's file, or the folder to import from.

    A specimen is one file. An operator that we ship imports its siblings, so that the whole package is copied; the
    edited one is then imported before any other. A native backend's library is built from a copy of its sources.
    """
    if host.package:
        shutil.copytree(ROOT / "src" / "goldsmith", folder / "goldsmith", ignore=shutil.ignore_patterns("__pycache__"))
        if backend == NATIVE:
            shutil.copytree(ROOT / NATIVE_SOURCES, folder / NATIVE_SOURCES)
        if fault is not None:
            path = Path(fault.file)
            path = folder / (path.relative_to("src") if path.parts[0] == "src" else path)
            path.write_text(applied(path.read_text(encoding="utf-8"), fault), encoding="utf-8")
        if backend == NATIVE:
            native_library.put_into(folder / "goldsmith", folder / NATIVE_SOURCES, ROOT / "build" / "kernelfault")
        return folder
    source = ROOT / host.backends[backend]
    text = source.read_text(encoding="utf-8")
    path = folder / f"{source.stem}.py"
    path.write_text(text if fault is None else applied(text, fault), encoding="utf-8")
    return path
