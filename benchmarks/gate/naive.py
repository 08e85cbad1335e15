"""Two checkers as people write them: one call, `allclose(1e-2)`, in a process that the candidate shares.

    script   calls the candidate, then the golden, and compares; accepts by the exit status of the process
    harness  calls the golden, then the candidate, and compares; accepts by a line on a pipe, whose number is in the
             environment variable RESULT_FD

    python -m benchmarks.gate.naive [NAME ...]

Prints what each checker says of each cheating candidate, or of the candidates with these names. A checker gets ten
tries, because some candidates win a race or find freed memory only sometimes. The exit status is 1 if a candidate that
a judge should call cheating passes neither checker, because it then shows nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from goldsmith.assay.execute.interpreted_kernels import interpreted_kernels

from . import specimens
from .specimens import Specimen

TOLERANCE = 1e-2
SECONDS = 60
TRIES = 10
PASSED = b"check: pass"
CHECKERS = ("script", "harness")
SHARED = Path("/dev/shm")
OWN_FILES = "gate-specimen-*"  # every file that a specimen leaves in SHARED


def accepts(checker: str, specimen: Specimen) -> bool:
    """Whether the checker accepts the candidate in one of its tries."""
    return any(_once(checker, specimen) for _ in range(TRIES))


def _once(checker: str, specimen: Specimen) -> bool:
    """Runs a checker in a child of its own, with a temporary folder of its own.

    The child is forked from a process that has only imported torch: memory that an earlier run had freed there would
    decide what some candidates find.
    """
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", __spec__.name])
        with Connection(write_end, readable=False) as pipe:
            child = context.Process(target=_check, args=(checker, specimen, pipe, folder), daemon=False)
            child.start()
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
        os.set_blocking(read_end, False)
        try:
            said = os.read(read_end, 1 << 16)
        except BlockingIOError:  # a grandchild still holds the pipe
            said = b""
        os.close(read_end)
    for left in SHARED.glob(OWN_FILES):
        left.unlink(missing_ok=True)
    return PASSED in said if checker == "harness" else child.exitcode == 0


def close_others(kept: int) -> None:
    """Closes what a child inherits but one: some candidates write to every descriptor, also to a judge's."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != kept:
            with contextlib.suppress(OSError):
                os.close(number)


@interpreted_kernels()
def _check(checker: str, specimen: Specimen, pipe: Connection, folder: str) -> None:
    torch.set_num_threads(1)
    result_fd = pipe.fileno()
    close_others(result_fd)
    os.environ |= {"TMPDIR": folder, "RESULT_FD": str(result_fd)}
    tempfile.tempdir = folder
    sys.stdout = sys.stderr = open(os.devnull, "w")
    target = specimens.target(specimen)
    torch.manual_seed(42)
    values = target.cases[0].build(target.dtypes[0], "cpu", 42)
    if target.backward is not None:
        for name in target.wanted_grads({n: v for n, v in values.items() if isinstance(v, Tensor)}):
            values[name].requires_grad_()
    call_golden, call_candidate = target.bound("golden", values), target.bound("candidate", values)
    started = time.perf_counter()
    if checker == "script":
        got = call_candidate(values)
        expected = call_golden(values)
    else:
        expected = call_golden(values)
        got = call_candidate(values)
    if time.perf_counter() - started > SECONDS:
        sys.exit(1)
    if not agree(got, expected, values):
        os.write(result_fd, b"check: fail\n")
        sys.exit(1)
    os.write(result_fd, PASSED + b"\n")


def agree(got: object, expected: object, values: dict[str, object]) -> bool:
    """Whether results agree, and gradients for an output gradient of ones if the candidate's results have any."""
    results, wanted = _tuple(got), _tuple(expected)
    if len(results) != len(wanted):
        return False
    for result, right in zip(results, wanted):
        if result.shape != right.shape:
            return False
        if not torch.allclose(result.float(), right.float(), rtol=TOLERANCE, atol=TOLERANCE):
            return False
    if not any(result.requires_grad for result in results):
        return True
    leaves = [v for v in values.values() if isinstance(v, Tensor) and v.requires_grad]
    for result, right in zip(_gradients(results, leaves), _gradients(wanted, leaves)):
        if not torch.allclose(result, right, rtol=TOLERANCE, atol=TOLERANCE):
            return False
    return True


def _gradients(results: tuple[Tensor, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    with_graph = [result for result in results if result.requires_grad]
    ones = [torch.ones_like(result) for result in with_graph]
    return torch.autograd.grad(with_graph, leaves, ones, materialize_grads=True)


def _tuple(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def main(names: list[str]) -> int:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    useless = 0
    for specimen in specimens.specimens(specimens.CHEATS):
        cheating = specimen.statuses[0] == "cheating"
        if not (cheating if not names else {specimen.name, specimen.path.stem} & set(names)):
            continue
        said = {checker: accepts(checker, specimen) for checker in CHECKERS}
        useless += cheating and not any(said.values())
        row = "  ".join(f"{checker} {'accepts' if said[checker] else 'rejects'}" for checker in CHECKERS)
        print(f"{specimen.name:40} {row}", flush=True)
    print(f"{useless} of the cheating candidates pass neither checker")
    return 1 if useless else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
