"""Settings that a call leaves changed are seen, whatever the call: the process and the inputs stay as they were."""

import atexit
import copyreg
import ctypes
import decimal
import gc
import json
import locale
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import warnings

import numpy
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.serialization import LoadEndianness

from assay.gate.problems import candidate, problem
from goldsmith.assay import gate
from goldsmith.assay.judge import process_state
from goldsmith.assay.judge.process_state import ProcessState

_c_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)


def _signal():
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


CHANGES = [
    ("the working folder", lambda: os.chdir("/")),
    ("the environment has other values of HOME", lambda: os.environ.update(HOME="elsewhere")),
    ("the handler of SIGUSR2", _signal),
    ("the mask of file modes", lambda: os.umask(0o123)),
    ("Python's recursion limit", lambda: sys.setrecursionlimit(5432)),
    ("Python's garbage collection", gc.disable),
    ("sys.meta_path", lambda: sys.meta_path.insert(0, type("Finder", (), {"find_spec": lambda *a: None})())),
    ("NumPy's treatment of errors", lambda: numpy.seterr(all="ignore")),
    ("Python's garbage collection", lambda: gc.set_threshold(0)),
    ("Python's garbage collection", lambda: gc.callbacks.append(print)),
    ("the rounding of floating-point numbers", lambda: ctypes.CDLL("libm.so.6").fesetround(0xC00)),
    ("the handler of SIGALRM", lambda: ctypes.CDLL(None).signal(signal.SIGALRM, _c_handler)),
    ("the set of blocked signals", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})),
    ("the timer ITIMER_REAL", lambda: signal.alarm(30)),
    ("the file descriptor 1", lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1)),
    ("the list of functions that Python calls at its end", lambda: atexit.register(print)),
    ("the list of filters of warnings", lambda: warnings.filterwarnings("ignore", str(len(warnings.filters)))),
    ("the list of folders of sys.path", lambda: sys.path.insert(0, f"/{len(sys.path)}")),
    ("copyreg's table", lambda: copyreg.pickle(type("Kind", (), {}), print)),
    ("Python's time between switches", lambda: sys.setswitchinterval(1.0)),
    ("Python's limit on digits", lambda: sys.set_int_max_str_digits(640)),
    ("the limit RLIMIT_NOFILE", lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))),
    ("the priority of the process", lambda: os.setpriority(os.PRIO_PROCESS, 0, 19)),
    ("the stack size of new threads", lambda: threading.stack_size(1 << 20)),
    ("the locale", lambda: locale.setlocale(locale.LC_CTYPE, "C")),
    ("the time after which sockets", lambda: socket.setdefaulttimeout(0.001)),
    ("the context of decimal numbers", lambda: setattr(decimal.getcontext(), "prec", 3)),
    ("torch's flag multithreading_enabled", lambda: torch.autograd.set_multithreading_enabled(False)),
    ("torch's flag autocast_cache_enabled", lambda: torch.set_autocast_cache_enabled(False)),
    ("torch's dtype of autocast on cpu", lambda: torch.set_autocast_dtype("cpu", torch.float16)),
    ("torch.__future__._overwrite", lambda: torch.__future__.set_overwrite_module_params_on_conversion(True)),
    ("torch's order of bytes", lambda: torch.serialization.set_default_load_endianness(LoadEndianness.BIG)),
    ("threading's trace function", lambda: threading.settrace(lambda *a: None)),
    ("the level below which nothing is logged", lambda: logging.disable(50)),
    ("torch's flag flash_sdp_enabled", lambda: torch.backends.cuda.enable_flash_sdp(False)),
    ("torch's flag cudnn_benchmark", lambda: setattr(torch.backends.cudnn, "benchmark", True)),
    ("autograd's list of hooks", lambda: saved_tensors_hooks(print, print).__enter__()),
    ("Python's random generator", lambda: random.seed(1)),
    ("Python's random generator", lambda: random.seed(os.urandom(8))),
    ("NumPy's random generator", lambda: numpy.random.seed(int.from_bytes(os.urandom(4), "little"))),
    ("NumPy's random generator", lambda: numpy.random.seed(1)),
]


def test_state_that_a_call_leaves_for_other_code_is_seen():
    """In a child, because it changes what all tests share."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        changes = []
        for _, change in CHANGES:
            state = ProcessState()
            state.keep()
            for _ in range(2):  # a generator's state shows a seed when it comes again
                state.begin()
                change()
                sentences = state.changed()
            changes.append(sentences)
        os.write(writing, json.dumps(changes).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        changes = json.load(pipe)
    os.waitpid(child, 0)
    for (name, _), sentences in zip(CHANGES, changes, strict=True):
        assert len(sentences) == 1 and sentences[0].startswith(name), (name, sentences)


def test_a_handler_of_a_package_is_no_change_of_the_candidates():
    """Triton's first compilation has LLVM handle signals; a handler that Python sets after it is a change."""
    pytest.importorskip("triton")
    program = """
        import ctypes, importlib, signal
        from goldsmith.assay.judge.process_state import ProcessState
        state = ProcessState()
        state.keep()
        address = ctypes.cast(ctypes.CDLL(importlib.import_module("triton._C.libtriton").__file__).PyInit_libtriton,
                              ctypes.c_void_p)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGXFSZ):
            ctypes.CDLL(None).signal(number, address)
        print(state.changed())
        signal.signal(signal.SIGHUP, print)
        print(state.changed())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "['the handler of SIGHUP is another one than before']"], done.stderr


def test_no_flag_is_read_that_looks_for_a_gpu(monkeypatch):
    """After a look for a GPU, forked processes cannot use it."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: pytest.fail("a look for a GPU"))
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: pytest.fail("a look for a GPU"), raising=False)
    process_state._flags.cache_clear()
    names = [name for name, _ in process_state._flags()]
    process_state._flags.cache_clear()
    assert {"torch's flag cudnn_enabled", "torch's flag flash_sdp_enabled"} <= set(names)


def test_numbers_that_a_call_draws_are_no_seed():
    state = ProcessState()
    for _ in range(3):
        state.begin()
        random.random(), numpy.random.random()
        assert not state.changed()


RETURN = "return x.softmax(-1) * w"
LEFT = {
    "from the first call on": ("gc.disable()", "Python's garbage collection"),
    "torch's generator": ("torch.manual_seed(torch.initial_seed())", "is back at its seed"),
    "an input": (
        "if not torch.is_inference_mode_enabled(): w.requires_grad_()",
        "input w has another requires_grad",
    ),
    "an attribute of an input": ("x.mark = 1", "the input x has another list of attributes"),
    "a hook of an input": (
        "x.register_hook(lambda grad: grad) if x.requires_grad else 0",
        "the input x has another list of hooks",
    ),
    "the version of an input": (
        "x.mul_(1) if x.is_leaf and not x.requires_grad else 0",
        "the input x has another _version",
    ),
    "the default dtype, in which others then draw": ("torch.set_default_dtype(torch.float16)", "default dtype"),
    "flushing of subnormals": ("torch.set_flush_denormal(True)", "flushing of subnormals"),
    "the number of threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", "torch's number of threads"),
    "the deterministic mode": ("torch.use_deterministic_algorithms(True)", "torch's deterministic mode"),
    "a timer": ("signal.setitimer(signal.ITIMER_REAL, 100)", "the timer ITIMER_REAL"),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("body, sentence", LEFT.values(), ids=LEFT.keys())
def test_a_call_that_leaves_a_setting_changed_is_wrong(body, sentence):
    verdict = gate.judge(candidate(f"{body}\n{RETURN}", head="import gc, signal"), problem(), seed=1)
    assert (verdict.status, verdict.reason) == ("wrong", "settings"), verdict
    assert sentence in verdict.evidence[0]


def test_a_source_may_change_settings_when_it_is_imported_and_a_library_when_a_call_imports_it():
    head = "import os, gc\nos.environ['A'] = '1'\ngc.disable()\ntorch.set_default_dtype(torch.float16)"
    with_library = f"from torch.utils.checkpoint import checkpoint\ntorch.vmap(torch.sin)(x)\n{RETURN}"
    verdict = gate.judge(candidate(with_library, head=head), problem(), seed=1)
    assert verdict.ok, verdict


WRITES_AT_COLLECTION = """
import gc, torch, weakref
known = []


def wipe(phase, facts):
    if phase == "start" and facts["generation"] == 2:
        for tensor in known:
            if tensor() is not None:
                tensor().data.zero_()


gc.callbacks.append(wipe)


def candidate(x, w):
    y = x.softmax(-1) * w
    known.append(weakref.ref(y))
    return y
"""


def test_a_result_that_the_next_garbage_collection_overwrites_is_a_late_write():
    verdict = gate.judge(gate.Candidate("late", WRITES_AT_COLLECTION), problem(), seed=1)
    assert (verdict.status, verdict.reason) == ("cheating", "late_write"), verdict
