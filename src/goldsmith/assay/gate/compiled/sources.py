"""C++ and CUDA C++ sources: `build` compiles one with `torch.utils.cpp_extension`, `function` imports the library.

They run in two processes. The process of `build` ends before any code of the candidate runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..isolation.loading import Refusal
from ..source_files import write_below

LANGUAGES = ("cuda", "cpp")
HEADERS = (".h", ".hpp", ".cuh")
OWN_BINDINGS = ("PYBIND11_MODULE", "TORCH_LIBRARY")
BUILDER = f"{__name__}:build"  # runs in a process of its own


def build(source: str, files: Mapping[str, str], names: Sequence[str], language: str) -> bytes:
    """The library of a source, which exports the first of these functions that it defines. It is not loaded."""
    from torch.utils import cpp_extension

    if language == "cuda" and cpp_extension.CUDA_HOME is None:
        raise Refusal("no_compiler", "CUDA C++ needs nvcc, which this machine lacks; install the CUDA toolkit")
    _ninja_on_path()
    folder = Path.cwd()
    place = folder / "build"
    place.mkdir(parents=True, exist_ok=True)
    name, module = exported_name(source, names), module_name(source)
    sources = [str(write_below(folder, f"{module}.{'cu' if language == 'cuda' else 'cpp'}", source))]
    for path, text in files.items():
        written = str(write_below(folder, path, text))
        if Path(path).suffix not in HEADERS:
            sources.append(written)
    common: dict[str, Any] = {"build_directory": str(place), "extra_include_paths": [str(folder)], "verbose": False}
    # torch builds a library and imports it; an import runs code of the candidate
    cpp_extension._import_module_from_library = lambda *_: None
    try:
        if _has_bindings(source) or files:
            cpp_extension.load(module, sources, with_cuda=language == "cuda", **common)
        elif language == "cuda":
            cpp_extension.load_inline(
                module, cpp_sources=prototype(source, name), cuda_sources=source, functions=[name], **common
            )
        else:
            cpp_extension.load_inline(module, cpp_sources=source, functions=[name], **common)
    except RuntimeError as error:
        raise Refusal("does_not_compile", _errors(str(error))) from None
    return (place / f"{module}{cpp_extension.LIB_EXT}").read_bytes()


def function(library: bytes, source: str, names: Sequence[str], folder: Path) -> Callable[..., object]:
    """The function that the library of a source exports; it takes its arguments by position."""
    name, module = exported_name(source, names), module_name(source)
    file = folder / f"{module}.so"
    file.write_bytes(library)
    spec = importlib.util.spec_from_file_location(module, file)
    if spec is None or spec.loader is None:
        raise Refusal("no_entry", "Python cannot import its library")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    if not hasattr(extension, name):
        raise Refusal("no_entry", f"the source exports no {name!r}")
    return getattr(extension, name)


def module_name(source: str) -> str:
    return f"candidate_{hashlib.sha256(source.encode(errors='surrogateescape')).hexdigest()[:12]}"


def exported_name(source: str, names: Sequence[str]) -> str:
    """The first of these functions that a source defines; one with bindings of its own exports the first."""
    name = names[0] if _has_bindings(source) else next((n for n in names if prototype(source, n)), "")
    if not name:
        raise Refusal("no_entry", f"it defines no function {' and no '.join(names)} that returns tensors")
    return name


def _has_bindings(source: str) -> bool:
    return any(word in source for word in OWN_BINDINGS)


def prototype(source: str, name: str) -> str:
    """The declaration of a function that the source defines, for bindings that are compiled separately; "" if none."""
    code = _COMMENTS.sub(" ", source)
    match = re.search(rf"^([\w:<>,&*\s]+?\b{re.escape(name)}\s*\([^{{}};]*\))\s*\{{", code, re.M)
    return "" if match is None else re.sub(r"\s+", " ", match[1]).strip() + ";"


_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def _ninja_on_path() -> None:
    """torch calls `ninja`, which a virtual environment that is not activated does not have on its path."""
    folder = str(Path(sys.executable).parent)
    if shutil.which("ninja") is None and (Path(folder) / "ninja").exists():
        os.environ.update(PATH=os.pathsep.join([folder, *os.get_exec_path()]))


def _errors(text: str) -> str:
    """The compiler's first errors, without the paths of this machine."""
    lines = [
        line for line in text.splitlines() if re.search(r"\berror\b", line) and not line.startswith("Error building")
    ]
    shown = [re.sub(r"^\S*/", "", line.strip()) for line in lines[:3]]
    return "; ".join(shown)[:500] or text.splitlines()[0][:300]
