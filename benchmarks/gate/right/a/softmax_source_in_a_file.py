"""Right: writes a generated module to a temporary file, imports it and removes the file, as a kernel cache does."""

import importlib.util
import tempfile
from pathlib import Path

PROBLEM = "a_softmax"
STATUS = "accepted"


SOURCE = """
def softmax(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)
"""
_MODULES = []


def _module():
    if not _MODULES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "generated_softmax.py"
            path.write_text(SOURCE)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        _MODULES.append(module)
    return _MODULES[0]


def candidate(x):
    return _module().softmax(x)
