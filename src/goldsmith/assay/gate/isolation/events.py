"""EventLog: what a candidate does besides computing, noted in its own process: files, frames, patches.

It is evidence and no protection: code in the same process can undo what this module does. That a result is right or
wrong is decided elsewhere.

    ["frames", call]          it looked through frames or through all objects
    ["file", path, mode]      it opened a file that is no part of Python or of a package
    ["folder", path]              it listed a folder that is neither its own nor part of Python or of a package
    ["import", module]        it imported a module of the judge; the source shows statements that import a loaded one
    ["process", call]         it started a process
    ["thread"]                it started threads, or has some that run
    ["traced", call]          it asked Python to call it at the lines or calls of others
    ["patched", name]         it replaced a function or an operator of torch, a function of Python or of the judge
    ["left", sentence]        a call left a setting of torch or of the process changed, or a generator with another seed
    ["remark", sentence]      what its author wants to know where it is wrong, such as a parameter that gets no weight
"""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import ClassVar

import torch

from ...judge.known_functions import KnownFunctions
from ...judge.known_modules import KnownModules
from ...judge.process_state import ProcessState
from ...support.known_operators import KnownOperators

_FRAMES = ("sys._getframe", "gc.get_objects", "gc.get_referrers", "sys._current_frames")
_HELD_FRAMES = ("tb_frame", "gi_frame", "cr_frame", "ag_frame")  # attributes
_LISTS = ("os.listdir", "os.scandir")
_PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect")
_TRACES = ("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback")
_MOST = 50
_JUDGE = "goldsmith"
_LAWFUL = ("goldsmith.core.tracing",)  # `stage` and `tracing`, which candidates may call
_IMPORTLIB = os.path.join("importlib", "__init__.py")
_STATEMENT = dis.opmap["IMPORT_NAME"]
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", f"{os.sep}torch{os.sep}")
_METADATA = (".dist-info", ".egg-info")  # of packages anywhere on sys.path, such as their entry points
_COMPILERS = tuple(
    os.sep + os.path.join(*name.split("/"))
    for name in ("triton/", "torch/_inductor/", "torch/_dynamo/", "torch/utils/cpp_extension.py", "numba/")
)
_MODULE_HOOKS = tuple(n for n in vars(torch.nn.modules.module) if n.startswith("_global_") and n.endswith("_hooks"))
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/", "/usr/")


class EventLog:
    """Notes events while the candidate's code runs; made before its source is imported."""

    def __init__(self, functions: KnownFunctions, modules: KnownModules) -> None:
        """functions, modules: as they were before."""
        self.seen: list[list[object]] = []
        self.on = False
        self.importing = self.inside = False
        self.own = os.getcwd() + os.sep
        prefixes = (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))
        self.places = tuple({os.path.realpath(p) + os.sep for p in prefixes})
        self.packages = {os.path.realpath(folder) for folder in sys.path}
        self.functions, self.modules = functions, modules
        self.operators, self.state = KnownOperators(), ProcessState()
        sys.addaudithook(self._hook)
        _WatchedSpec.log = self
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == _JUDGE and type(getattr(module, "__spec__", None)) is ModuleSpec:
                module.__spec__.__class__ = _WatchedSpec

    @contextmanager
    def listening(self, *, thorough: bool = True, importing: bool = False) -> Iterator[None]:
        """Context in which the candidate's code runs.

        thorough: looks for patches afterwards, which costs 2 ms. importing: files in its own folder, which is empty
        before, are those of a compiler.
        """
        before = _left_running()
        looks = thorough and not importing  # a source may change the settings of its process when it is imported
        if looks:
            self.state.begin()
        self.on, self.importing = True, importing
        try:
            yield
        finally:
            self.on = False
            for name, now in _left_running().items():
                if now != before[name]:
                    self._note("patched", name)
            self.left(self.state.changed() if looks else ())
            for name in self.functions.replaced() if thorough else ():
                self._note("patched", name)
            for name in self.operators.replaced() if thorough else ():
                self._note("patched", f"the kernel of torch's operator {name}")

    def look_at_modules(self) -> None:
        """Notes what is replaced in any module or class, which is looked at once, after the last call."""
        for name in self.modules.replaced(self.own):
            self._note("patched", name)

    def left(self, sentences: Sequence[str]) -> None:
        """Notes settings that a call left changed."""
        for sentence in sentences:
            self._note("left", sentence)

    def threads(self, count: int) -> None:
        """Notes threads that the candidate has left running."""
        if count:
            self._note("thread")

    def judge_imported(self, name: str) -> None:
        """Notes that the candidate imported a module of the judge."""
        if not name.startswith(_LAWFUL):
            self._note("import", name)

    def report(self) -> list[list[object]]:
        """What was noted since the last report."""
        seen, self.seen = self.seen, []
        return seen

    def _note(self, *event: object) -> None:
        if len(self.seen) < _MOST and list(event) not in self.seen:
            self.seen.append(list(event))

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self.on or self.inside:
            return
        if event == "open":
            if isinstance(arguments[0], str):
                self._file(arguments[0], str(arguments[1] or ""))
        elif event in _LISTS:
            if isinstance(arguments[0], str) and self._called_by_candidate(deep=True):
                full = os.path.join(os.path.abspath(arguments[0]), "")
                if not full.startswith((self.own, *self.places, *_SYSTEM)) and not any(p in full for p in _LIBRARIES):
                    self._note("folder", full)
        elif event in _FRAMES:
            if self._called_by_candidate():
                self._note("frames", event)
        elif event == "object.__getattr__":
            if arguments[1] in _HELD_FRAMES and self._called_by_candidate(itself=True):
                self._note("frames", arguments[1])
        elif event == "import":
            name = str(arguments[0])
            if name.partition(".")[0] == _JUDGE and (self._called_by_candidate() or self._imported_by_candidate()):
                self.judge_imported(name)
        elif event in _TRACES and self._called_by_candidate(deep=True):
            self._note("traced", event)
        elif event in _PROCESSES and self._called_by_candidate(deep=True):
            self._note("process", event)

    def _file(self, path: str, mode: str) -> None:
        full = os.path.abspath(path)
        if full.startswith((*self.places, *_SYSTEM)) or any(part in full for part in _LIBRARIES):
            return
        folder = os.path.dirname(full)
        if folder.endswith(_METADATA) and os.path.realpath(os.path.dirname(folder)) in self.packages:
            return
        if (full + os.sep).startswith(self.own) and (self.importing or self._called_by_compiler()):
            return
        if not full.endswith((".py", ".pyc", ".so")) and "__pycache__" not in full:
            self._note("file", full, mode)

    def _called_by_compiler(self) -> bool:
        """Whether a compiler makes the call: sources, caches and temporary files of kernels are written at a call."""
        frame = self._caller()
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.own):
                return False
            if any(part in name for part in _COMPILERS):
                return True
            frame = frame.f_back
        return False

    def _called_by_candidate(self, *, deep: bool = False, itself: bool = False) -> bool:
        """Whether the candidate's file makes the call, by itself or through `inspect`; deep: through anything."""
        frame = self._caller()
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.own):
                return True
            if (
                itself
                or not deep
                and not name.endswith(("inspect.py", "traceback.py"))
                and not name.startswith("<frozen")
            ):
                return False
            if "goldsmith" in name or name.startswith("<frozen importlib"):
                return False
            frame = frame.f_back
        return False

    def _imported_by_candidate(self) -> bool:
        """Whether the candidate's file imports by a call or by code in a text, which its source does not show."""
        frame = self._caller()
        while frame is not None and _imports_for_others(frame.f_code):
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(self.own):
            return False
        return frame.f_code.co_code[frame.f_lasti] != _STATEMENT

    def _caller(self) -> types.FrameType | None:
        """The frame that called the hook or the property, without a note about that look at frames."""
        self.inside = True
        try:
            return sys._getframe(3)
        finally:
            self.inside = False


class _WatchedSpec(ModuleSpec):
    """The spec of a loaded module of the judge. Every import reads `_initializing`, and raises no audit event."""

    log: ClassVar[EventLog]

    @property
    def _initializing(self) -> bool:
        if self.log.on and not self.log.inside and self.log._imported_by_candidate():
            self.log.judge_imported(self.name)
        return bool(vars(self).get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value


def _imports_for_others(code: types.CodeType) -> bool:
    """Whether this is Python's own import, code in a text, or a module of the judge while it is imported."""
    if code.co_filename.endswith((_IMPORTLIB, ">")):  # "<frozen importlib._bootstrap>", "<string>"
        return True
    return code.co_name == "<module>" and f"{os.sep}{_JUDGE}{os.sep}" in code.co_filename


def _left_running() -> dict[str, object]:
    """What sees every later call: modes of torch, and functions that Python calls at each line or call."""
    hooks = vars(torch.nn.modules.module)
    return {
        "the hooks of all modules": sum(len(hooks[name]) for name in _MODULE_HOOKS),
        "torch's stack of function modes": torch._C._len_torch_function_stack(),
        "torch's stack of dispatch modes": torch._C._len_torch_dispatch_stack(),
        "sys.settrace": sys.gettrace(),
        "sys.setprofile": sys.getprofile(),
    }
