"""Builds the native library of an edited copy, once per text of its sources, and keeps it in build/kernelfault/.

Only the level `scalar` is compiled: every machine runs it, and it defines the results of all others. GS_DEBUG puts
guard words around scratch memory and NaN into it, as somebody who looks for a fault would do.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# as in goldsmith.core.native, which must not be imported before the edited copy
LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
LEVEL = LEVELS[0]
FLAGS = (
    "-std=c++20 -O1 -shared -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-DGS_DEBUG"
).split()


class NotBuilt(RuntimeError):
    """There is no compiler, or the edit does not compile; the message is the compiler's."""


def build(sources: Path, cache: Path) -> Path:
    """The library of the sources in this folder."""
    files = sorted(p for p in sources.rglob("*") if p.suffix in (".h", ".cpp"))
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in files:
        digest.update(f"{path.relative_to(sources)} {path.stat().st_size}\n".encode() + path.read_bytes())
    library = cache / f"libgoldsmith-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    units = [p for p in files if p.suffix == ".cpp" and p.name != "selftest.cpp"]
    units = [p for p in units if p.parent.name != "isa" or p.stem == LEVEL]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        nothing = Path(folder) / "levels.cpp"
        fills = "".join(f"namespace {level} {{ void fill(Table&) {{}} }}\n" for level in LEVELS if level != LEVEL)
        nothing.write_text(f'#include "{sources / "table.h"}"\nnamespace gs {{\n{fills}}}\n', encoding="utf-8")
        output = Path(folder) / "libgoldsmith.so"
        words = [os.environ.get("CXX", "c++"), *FLAGS, *map(str, units), str(nothing), "-o", str(output)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise NotBuilt(f"faults of the native library need a C++ compiler: {error}") from error
        if done.returncode:
            raise NotBuilt(done.stderr[-2000:])
        os.replace(output, library)
    return library


def put_into(package: Path, sources: Path, cache: Path) -> None:
    """Build the library of these sources, and put it into this copy of the package."""
    (package / "lib").mkdir(exist_ok=True)
    to = package / "lib" / "libgoldsmith.so"
    to.unlink(missing_ok=True)
    shutil.copyfile(build(sources, cache), to)
