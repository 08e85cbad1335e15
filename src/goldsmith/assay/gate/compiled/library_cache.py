"""The judge's cache of compiled libraries: a source is compiled once, whatever processes import it later.

The key is computed here, from what the compiler reads. The library comes from a process that has run the compiler on
this source and nothing else, so no candidate can put a library into the cache for the source of another one.
It is kept in memory only: a candidate could write to files where there are no namespaces.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from ..isolation.candidate_process import CandidateProcess

_MOST_BYTES = 256 << 20  # of all libraries together; one has 1 to 10 MB
_libraries: OrderedDict[str, bytes] = OrderedDict()


def library(process: Callable[[], CandidateProcess], arguments: dict[str, object]) -> bytes:
    """The library of a source, compiled in a new process if it is not known. CandidateEnded where that fails.

    process: a new one for each call, whose loader is a builder; arguments: of that builder
    """
    key = _key(arguments)
    if key not in _libraries:
        builder = process()
        try:
            new = builder.build()
        finally:
            builder.close()
        _libraries[key] = new
        while sum(map(len, _libraries.values())) > _MOST_BYTES and len(_libraries) > 1:
            _libraries.popitem(last=False)
    _libraries.move_to_end(key)
    return _libraries[key]


def _key(arguments: dict[str, object]) -> str:
    """Equal for equal sources, files, exported names and languages, compilers, torch and GPUs."""
    gpus = torch.cuda.device_count() if arguments["language"] == "cuda" else 0
    capabilities = [torch.cuda.get_device_capability(n) for n in range(gpus)]
    facts = [arguments, torch.__version__, torch.version.cuda, _compilers(), capabilities]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@cache
def _compilers() -> tuple[str, ...]:
    """The compilers' paths and what they say of themselves."""
    from torch.utils import cpp_extension

    tools = [cpp_extension.get_cxx_compiler()]
    if cpp_extension.CUDA_HOME is not None:
        tools.append(str(Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc"))
    paths = [path for path in map(shutil.which, tools) if path is not None]
    return tuple(f"{path} {_version(path)}" for path in paths)


def _version(path: str) -> str:
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
