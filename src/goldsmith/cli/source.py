"""Which code runs: a digest of the installed package's sources and native library."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


@functools.cache
def digest() -> str:
    """SHA-256 over names and bytes of every Python file and library of the package, in order of names."""
    total = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".so")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(PACKAGE).as_posix()} {content}\n".encode())
    return total.hexdigest()
