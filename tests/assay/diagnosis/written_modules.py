"""Modules of kernels that a test writes, as an import of the user's would make them."""

import importlib.util
import itertools
import os
import sys
import textwrap

PREFIX = "written_kernel_"
_NUMBER = itertools.count()


def load(folder, text):
    """The module of a text in a file."""
    name = f"{PREFIX}{os.getpid()}_{next(_NUMBER)}"
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(text))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forget():
    """Takes these modules out of sys.modules."""
    for name in [n for n in sys.modules if n.startswith(PREFIX)]:
        del sys.modules[name]
