"""The native library of an edited copy: built once for each text of its sources, and kept in build/kernelfault/.

The level `scalar` alone is compiled, which every machine runs and which is the meaning of all others, with guard words
around scratch and NaN in it (GS_DEBUG): what somebody who looks for a fault would build.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# as goldsmith.core.native has them, which must not be imported before the copy that is edited
LEVELS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
LEVEL = LEVELS[0]
FLAGS = (
    "-std=c++20 -O1 -shared -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-DGS_DEBUG"
).split()


class NotBuilt(RuntimeError):
    """There is no compiler, or an edit is no C++; the text is what the compiler said."""


def build(sources: Path, kept: Path) -> Path:
    """The library of the sources in that folder."""
    files = sorted(p for p in sources.rglob("*") if p.suffix in (".h", ".cpp"))
    said = hashlib.sha256(" ".join(FLAGS).encode())
    for path in files:
        said.update(f"{path.relative_to(sources)} {path.stat().st_size}\n".encode() + path.read_bytes())
    library = kept / f"libgoldsmith-{said.hexdigest()[:16]}.so"
    if library.exists():
        return library
    units = [p for p in files if p.suffix == ".cpp" and p.name != "selftest.cpp"]
    units = [p for p in units if p.parent.name != "isa" or p.stem == LEVEL]
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        nothing = Path(folder) / "levels.cpp"
        fills = "".join(f"namespace {level} {{ void fill(Table&) {{}} }}\n" for level in LEVELS if level != LEVEL)
        nothing.write_text(f'#include "{sources / "table.h"}"\nnamespace gs {{\n{fills}}}\n', encoding="utf-8")
        made = Path(folder) / "libgoldsmith.so"
        words = [os.environ.get("CXX", "c++"), *FLAGS, *map(str, units), str(nothing), "-o", str(made)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise NotBuilt(f"the native library's faults need a C++ compiler: {error}") from error
        if done.returncode:
            raise NotBuilt(done.stderr[-2000:])
        os.replace(made, library)
    return library


def put_into(package: Path, sources: Path, kept: Path) -> None:
    """The library of these sources as that copy of the package has it by default."""
    (package / "lib").mkdir(exist_ok=True)
    to = package / "lib" / "libgoldsmith.so"
    to.unlink(missing_ok=True)
    shutil.copyfile(build(sources, kept), to)
