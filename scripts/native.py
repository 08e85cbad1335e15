"""Builds the native library where the content of its sources has changed.

    python scripts/native.py            into src/goldsmith/lib, where the package looks for it
    python scripts/native.py address    into build/native-address, with AddressSanitizer and UBSan, for the tests
    python scripts/native.py thread     into build/native-thread, with ThreadSanitizer, AMX's tiles in plain C++
    python scripts/native.py tiles      into build/native-tiles, with AMX's tiles computed in plain C++

Prints the path of the library. Needs only the standard library; cmake and ninja come from .venv or from the system.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = {
    "release": [],
    "address": ["-DGOLDSMITH_SANITIZE=address;undefined"],
    "thread": ["-DGOLDSMITH_SANITIZE=thread", "-DGOLDSMITH_SOFTWARE_TILES=ON"],  # races of tiles on any avx512_bf16
    "tiles": ["-DGOLDSMITH_SOFTWARE_TILES=ON"],
}


class Failed(Exception):
    """The build failed; the message says what to do."""


def supported() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def sources() -> dict[str, str]:
    """Hashes of the library's sources, and the checkout's path, because a build folder cannot move."""
    paths = [ROOT / "CMakeLists.txt", *sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cpp"))]
    by_name = {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return {"": str(ROOT)} | by_name


def folder(variant: str) -> Path:
    return ROOT / "build" / ("native" if variant == "release" else f"native-{variant}")


def place(variant: str) -> Path:
    base = ROOT / "src" if variant == "release" else folder(variant)
    return base / "goldsmith" / "lib" / "libgoldsmith.so"


def built_from(variant: str) -> dict[str, str]:
    try:
        return json.loads((folder(variant) / "sources.json").read_text())
    except (OSError, ValueError):
        return {}


def fresh(variant: str = "release") -> bool:
    return place(variant).exists() and built_from(variant) == sources()


def under_way() -> bool:
    """Whether another process is building the library now. If that build fails, that process says so."""
    try:
        with open(f"{folder('release')}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def build(variant: str = "release") -> Path:
    build_folder, at = folder(variant), place(variant)
    build_folder.parent.mkdir(exist_ok=True)
    with open(f"{build_folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two builds at once, the second waits and finds the work done
        if fresh(variant):
            return at
        now, before = sources(), built_from(variant)
        if before.get("") != now[""]:
            shutil.rmtree(build_folder, ignore_errors=True)
        for name, content in now.items():
            if name and before.get(name) != content:  # ninja compares dates, so changed files get a new one
                os.utime(ROOT / name)
        ninja = tool_path("ninja")  # given each time: the one of the last build may have been a temporary one of pip's
        run("cmake", "-S", ROOT, "-B", build_folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *VARIANTS[variant])
        run("cmake", "--build", build_folder)
        run("cmake", "--install", build_folder, "--prefix", at.parents[2])
        (build_folder / "sources.json").write_text(json.dumps(now))
    return at


def search_path() -> str:
    return os.pathsep.join([str(ROOT / ".venv/bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def tool_path(tool: str) -> str:
    """The path of a tool in .venv or the system."""
    path = shutil.which(tool, path=search_path())
    if path is None:
        raise Failed(f"{tool} is missing. It builds the native library: pip install cmake ninja.")
    return path


def run(tool: str, *arguments: object) -> None:
    """Run a tool from .venv or the system, and show its output where it fails."""
    command = [tool_path(tool), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | {"PATH": search_path()}, capture_output=True, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        raise Failed(
            "the native library could not be built; the lines above say why. It needs g++ 11 or newer. "
            "Put it right and run make again."
        )


def main(variant: str = "release") -> int:
    if variant not in VARIANTS:
        sys.exit(f"goldsmith: no variant {variant!r}; choose one of: {', '.join(VARIANTS)}")
    try:
        print(build(variant))
    except Failed as error:
        sys.exit(f"\ngoldsmith: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
