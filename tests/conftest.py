"""What every test gets: one thread, a seed of its own, and the Triton interpreter where there is no GPU."""

import atexit
import datetime
import gc
import hashlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
from functools import partial

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # xdist runs a process per core; more threads only fight each other

# Tests start some hundred processes: where Python may keep no bytecode, each would compile all of goldsmith anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A runner in the background ignores Ctrl-C, and every process started by a test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until pytest has collected

import pytest
import torch

import interpreted_products
import one_card

atexit.register(gc.freeze)  # otherwise the interpreter's end searches torch and transformers for garbage

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so it must be set before


def _has_amx() -> bool:
    try:
        with open("/proc/cpuinfo") as text:
            return "amx_tile" in text.read()
    except OSError:
        return False


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow, and all parts of the sweeps")
    parser.addoption(
        "--day",
        type=int,
        help="which part of each sweep to run: parts take turns by day (default: today's number)",
    )


def pytest_configure(config):
    if config.option.day is None:  # decided once: xdist's workers get it with the other options
        config.option.day = datetime.date.today().toordinal()
    config.addinivalue_line(
        "markers",
        "forks: children of a fork use autograd, which torch refuses once it knows a card: then a process without one",
    )


def pytest_report_header(config):
    kernels = "on the GPU" if HAS_GPU else "through the interpreter (no CUDA device here)"
    sweeps = "whole sweeps" if config.option.slow else f"sweeps: --day {config.option.day}"
    return f"goldsmith: torch {torch.__version__}, Triton kernels {kernels}, {sweeps}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Collecting imports everything: the collector would search those objects over and over, and none is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # pytest collects five times at its end
        gc.enable()


# What takes longest by itself comes first: at the end a worker has nothing to do while another is at such a test.
FIRST = ("native", "repo", "examples")


def _in_todays_part(item, day: int) -> bool:
    """Parts take turns. A test's part is given by its marker, or by its name, so that new tests move no others."""
    sweep = item.get_closest_marker("sweep")
    if sweep is None:
        return True
    parts = sweep.args[0]
    part = sweep.kwargs.get("part", int.from_bytes(hashlib.sha256(item.nodeid.encode()).digest()[:4], "big"))
    return part % parts == day % parts


def pytest_collection_modifyitems(config, items):
    if not config.option.slow:
        today = [_in_todays_part(item, config.option.day) for item in items]
        config.hook.pytest_deselected(items=[item for item, runs in zip(items, today) if not runs])
        items[:] = [item for item, runs in zip(items, today) if runs]
    items.sort(key=lambda item: item.path.parent.name not in FIRST)
    reasons = {}
    if not HAS_GPU:
        reasons["gpu"] = "needs a CUDA device, and this machine has none"
    if not _has_amx():
        reasons["amx"] = "needs a CPU with AMX, and this one has none"
    if not config.getoption("--slow"):
        reasons["slow"] = "takes minutes: run it with --slow"
    for item in items:
        for name, reason in reasons.items():
            if name in item.keywords:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    """Kernels that a test launches by itself run as quickly as those in the assay, whose changes show in no bit."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    from goldsmith.assay.execute.interpreter_launch import speed_up

    undo = speed_up(interpreter)
    yield
    undo()


@pytest.fixture(autouse=True)
def _turn_at_the_card(request, tmp_path_factory):
    """Workers share the card; a test that times has it alone, because the clock sees the kernels of all processes."""
    if not HAS_GPU:
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with one_card.turn(shared, alone=request.node.get_closest_marker("alone") is not None):
        yield


@pytest.fixture
def products_by_element():
    """Interpreted products sum every element alike, so that a token has the same bits wherever it is."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    with interpreted_products.by_element():
        yield


def _roomy(test, **arguments):
    return test(**arguments)


# CPython maps its frames in pieces of 16 KiB, and gives one back whenever the last call in it returns: a loop at such
# a border does little else. A frame as large as this has a piece of 1 MiB, with room behind it for what a test calls.
_roomy.__code__ = _roomy.__code__.replace(co_stacksize=1 << 16)


def _without_a_card(item, **arguments):
    """The test once more, in a process of its own that sees no card; its verdict is the test's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    slow = ["--slow"] if item.config.getoption("--slow") else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *slow, item.nodeid],
        cwd=item.config.rootpath, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(done.stdout + done.stderr, pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    test = pyfuncitem.obj
    elsewhere = HAS_GPU and "forks" in pyfuncitem.keywords
    pyfuncitem.obj = partial(_without_a_card, pyfuncitem) if elsewhere else partial(_roomy, test)
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test


@pytest.fixture
def seed(request) -> int:
    """A seed that belongs to this test and its parameters, the same on every machine and in every order."""
    return int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "big")


@pytest.fixture(autouse=True)
def _seeded(seed):
    random.seed(seed)
    if HAS_GPU:
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats stack traces for a GPU: 1 ms a test


if importlib.util.find_spec("hypothesis"):  # the GPU machine runs the kernels' tests without it
    from hypothesis import settings

    settings.register_profile("goldsmith", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("goldsmith")
