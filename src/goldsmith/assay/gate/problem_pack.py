"""A problem's files as bytes, for judges on machines that do not have them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .bad_problem import BadProblem
from .formats import flashinfer
from .formats.problem_source import ProblemSource, known_format, split

MOST_BYTES = 4 << 30


def packed(problem: ProblemSource) -> dict[str, object]:
    """{"files": {path: bytes}, "where": ..., "options": ...}; paths are relative to a folder of the judge's."""
    path, wanted = split(problem.where)
    path, options = path.resolve(), dict(problem.to_json()["options"])
    name = path.name
    if known_format(problem.where) == "flashinfer":
        root = flashinfer.root_of(path)
        name = _below(path, root)
        if options.get("workloads"):
            options["workloads"] = _below(Path(options["workloads"]).resolve(), root)
    files = {key: _read(file) for key, file in files_of(problem)}
    if sum(map(len, files.values())) > MOST_BYTES:
        raise BadProblem(f"{path.name}: the problem's files are too large to send to other machines")
    return {"files": files, "where": f"{name}:{wanted}" if wanted else name, "options": options}


def files_of(problem: ProblemSource) -> Iterator[tuple[str, Path]]:
    """(its name for a judge elsewhere, file) of all files that a problem may read."""
    path = split(problem.where)[0].resolve()
    if known_format(problem.where) == "flashinfer":
        workloads = problem.options.get("workloads")
        for file in _data_set(path, Path(workloads) if workloads else None):
            yield _below(file, flashinfer.root_of(path)), file
    else:
        yield from ((file.name, file) for file in sorted(path.parent.glob("*.py")))  # it may import its neighbours


def unpacked(pack: Mapping[str, Any]) -> ProblemSource:
    """The problem, whose files are in a folder of this machine; written once for equal content."""
    key = hashlib.sha256(json.dumps([pack["where"], pack["options"]]).encode())
    for path, content in pack["files"].items():
        key.update(path.encode() + b"\0" + content)
    folder = Path(tempfile.gettempdir()) / f"goldsmith-problem-{os.getuid()}-{key.hexdigest()[:20]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            for path, content in pack["files"].items():
                file = Path(temporary) / "problem" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            try:
                (Path(temporary) / "problem").rename(folder)
            except OSError:  # another judge was first
                if not folder.is_dir():
                    raise
    options = dict(pack["options"])
    if options.get("workloads"):
        options["workloads"] = str(folder / options["workloads"])
    return ProblemSource.from_json({"where": str(folder / pack["where"]), "options": options})


def _data_set(definition: Path, workloads: Path | None) -> Iterator[Path]:
    """A definition, its workloads, and the tensors that they name."""
    yield definition
    data = json.loads(definition.read_text(encoding="utf-8"))
    lines = workloads or flashinfer.beside(definition, str(data.get("name") or definition.stem))
    if lines is None:
        return
    yield lines.resolve()
    root = flashinfer.root_of(lines)
    named = set()
    for line in lines.read_text(encoding="utf-8").splitlines():
        inputs = json.loads(line).get("workload", {}).get("inputs", {}) if line.strip() else {}
        named |= {source["path"] for source in inputs.values() if source.get("type") == "safetensors"}
    yield from ((root / name).resolve() for name in sorted(named))


def _below(file: Path, root: Path) -> str:
    resolved, base = file.resolve(), root.resolve()
    return str(resolved.relative_to(base)) if resolved.is_relative_to(base) else f"elsewhere/{resolved.name}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadProblem(f"{file.name} cannot be read: {error.strerror or error}") from error
