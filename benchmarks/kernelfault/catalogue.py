"""Hosts and faults as the files in faults/ declare them, and the edited copies of hosts.

A host is a kernel that faults are put into. Its file in faults/ names its module for each backend, and says whether its
faults are held out, that is, never used for fitting. A fault is an edit of one file of a host, with the truth about it,
which is written before the fault is run. Edits change a copy of the host, never the host.
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
    """A mistake in a file of faults/, or a name that does not exist; the message names file and fault."""


@dataclass(frozen=True)
class Host:
    """A kernel that faults are put into.

    backends  backend -> the module's file, relative to the checkout
    package   dotted name of an operator of goldsmith ("goldsmith.mhc.post"); "" for a specimen with `target()`
    cases     the operator's cases to try; a specimen is tried in all of its cases
    author    who wrote the kernel and its faults: "goldsmith", or "stranger" for somebody who had not read the rules
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
    """An edit, with the truth about it.

    edits       (old text, new text): each old text occurs exactly once in the file
    verdict     the right verdict: "fail", "pass" (not a fault), or "reference_fault"
    stages      the stages that are right as the first wrong one
    causes      the ids that are right as the first cause
    params      the right details of the cause; index sets use the names of the case's sizes: [["32", "D"]]
    cases       the cases in which the fault shows; empty: all cases of the host
    note        id of the note that the report must have instead of a finding
    equivalent  why no golden can tell the edit from the right kernel; such a fault is listed, but not counted
    amended     why the truth was changed after a run (only where it was demonstrably wrong)
    dtype       of the inputs, where it differs from the host's
    together    the fault shows only when one case follows another: one row examines all cases
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
        """Whether the rates of detection, stage and cause count this fault."""
        return self.verdict == "fail" and not self.equivalent


@cache
def hosts() -> dict[str, Host]:
    """Every host, by name."""
    return {host.name: host for host, _ in _files()}


@cache
def faults() -> tuple[Fault, ...]:
    """Every fault, in the order of the files."""
    everything = tuple(fault for _, faults in _files() for fault in faults)
    keys = [f.key for f in everything]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise CatalogueError(f"{twice[0]} is declared twice; add a letter to one id")
    return everything


@cache
def _files() -> list[tuple[Host, list[Fault]]]:
    return [_file(path) for path in sorted(FAULTS.glob("*.toml"))]


def _file(path: Path) -> tuple[Host, list[Fault]]:
    declared = tomllib.loads(path.read_text(encoding="utf-8"))
    _only(path.name, declared, {"host", "fault"})
    _only(f"{path.name} [host]", declared["host"], _HOST_KEYS)
    host = Host(**{**declared["host"], "cases": tuple(declared["host"].get("cases", ()))})
    return host, [_fault(path, host, entry) for entry in declared.get("fault", ())]


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


def _only(name: str, declared: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(declared) - known)
    if unknown:
        raise CatalogueError(f"{name}: unknown key {unknown[0]!r}; there are: {', '.join(sorted(known))}")


def select(
    fault: str | None = None, host: str | None = None, backend: str | None = None, author: str | None = None
) -> list[Fault]:
    """The faults with this id (M04 includes M04b), host, backend and author.

    Raises CatalogueError, with the names that exist, for an unknown name.
    """
    for kind, name, known in (
        ("host", host, list(hosts())),
        ("backend", backend, sorted({b for h in hosts().values() for b in h.backends})),
        ("author", author, sorted({h.author for h in hosts().values()})),
        ("fault", fault, sorted({f.id[:3] for f in faults()} | {f.id for f in faults()})),
    ):
        if name is not None and name not in known:
            raise CatalogueError(f"no {kind} {name!r}; there are: {', '.join(known)}")
    return [
        f for f in faults()
        if (fault is None or fault in (f.id, f.id[:3])) and host in (None, f.host.name) and backend in (None, f.backend)
        and author in (None, f.host.author)
    ]  # fmt: skip


# copies


def applied(source: str, fault: Fault) -> str:
    """The file's text with the fault in it; raises CatalogueError unless each old text occurs exactly once."""
    for old, new in fault.edits:
        count = source.count(old)
        if count != 1:
            raise CatalogueError(f"{fault.key}: the text to replace occurs {count} times in {fault.file}: {old!r}")
        source = source.replace(old, new)
    return source


def unfit(faults: Iterable[Fault]) -> list[str]:
    """A message per fault whose edit no longer fits its file."""
    messages = []
    for fault in faults:
        try:
            applied((ROOT / fault.file).read_text(encoding="utf-8"), fault)
        except (CatalogueError, OSError) as error:
            messages.append(str(error))
    return messages


def copy(host: Host, backend: str, fault: Fault | None, folder: Path) -> Path:
    """Copy the host to `folder`, with the fault in it; returns the module's file, or the folder to import from.

    A specimen is one file. An operator of goldsmith imports its siblings, so the whole package is copied, and the copy
    must be imported before any other. The library of a native backend is built from a copy of its sources.
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
