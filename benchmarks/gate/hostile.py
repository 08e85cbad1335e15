"""A batch of hostile candidates: does every one get a verdict, and is anything left afterwards?"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from goldsmith.assay.gate import Candidate, GateOptions, Judges, ProblemSource
from goldsmith.assay.gate.isolation.limits import children, resident_bytes

_HEAD = "import ctypes\nimport os\nimport sys\nimport threading\nimport time\n\nimport torch\n\nNUMBER = {number}\n"
_RIGHT = "x.softmax(-1) * w"


def _body(*lines: str) -> str:
    """These lines in a function that then returns the right result."""
    return "\n    ".join([*lines, f"return {_RIGHT}"])


# kind -> (code at import, body of the candidate, statuses that are right)
KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "right": ("", f"return {_RIGHT}", ("accepted",)),
    "also_right": ("", "return w * torch.softmax(x, -1)", ("accepted",)),
    "wrong": ("", "return x.softmax(-1) * w * 2", ("wrong", "cheating")),
    "zeros": ("", "return torch.zeros_like(x * w)", ("wrong", "cheating")),
    "raises": ("", "raise ValueError('no')", ("crashed",)),
    "no_such_function": ("candidate_ = None\n", "", ("refused",)),
    "syntax_error": ("def (:\n", "", ("refused",)),
    "missing_package": ("import a_package_that_nobody_has\n", f"return {_RIGHT}", ("refused",)),
    "segfault": ("", "ctypes.string_at(0)", ("crashed",)),
    "abort": ("", "os.abort()", ("crashed",)),
    "os_exit": ("", "os._exit(0)", ("crashed", "cheating")),
    "os_exit_at_import": ("os._exit(0)\n", f"return {_RIGHT}", ("crashed", "refused", "cheating")),
    "sys_exit": ("", "sys.exit(0)", ("crashed", "wrong")),
    "kills_itself": ("", "os.kill(os.getpid(), 9)", ("crashed",)),
    "kills_its_group": ("", "os.killpg(0, 9)", ("crashed",)),
    "stack_overflow": ("def down(n):\n    return down(n + 1)\n", "return down(0)", ("crashed",)),
    "endless_loop": ("", "while True:\n        pass", ("timed_out",)),
    "endless_import": ("while True:\n    pass\n", f"return {_RIGHT}", ("timed_out",)),
    "sleeps": ("", "time.sleep(1000)", ("timed_out",)),
    "ignores_signals": (
        "import signal\nfor n in (1, 2, 3, 10, 12, 15):\n    signal.signal(n, signal.SIG_IGN)\n",
        "while True:\n        pass",
        ("timed_out",),
    ),
    "memory_hog": ("", "return torch.ones(1 << 33)", ("over_memory",)),
    "list_hog": (
        "",
        "a = []\n    while True:\n        a.append(bytearray(1 << 24))",
        ("over_memory", "crashed", "timed_out"),
    ),
    "huge_output": ("", "return torch.ones(1 << 27)", ("wrong", "over_memory", "crashed", "timed_out")),
    "output_flood": ("", "while True:\n        os.write(1, b'x' * 65536)", ("crashed", "timed_out")),
    "stderr_flood": ("", "while True:\n        print('x' * 1000, file=sys.stderr)", ("crashed", "timed_out")),
    "fork_bomb": ("", "while True:\n        os.fork()", ("crashed", "timed_out", "cheating", "over_memory")),
    "orphan": (
        "",
        _body(
            "if os.fork() == 0:",
            "    os.setsid()",
            "    if os.fork() == 0:",
            "        time.sleep(1000)",
            "    os._exit(0)",
        ),
        ("accepted", "cheating", "crashed", "over_memory"),
    ),
    "thread_that_stays": (
        "",
        f"threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n    return {_RIGHT}",
        ("accepted", "cheating", "crashed", "wrong"),
    ),
    "many_threads": (
        "",
        _body("for _ in range(5000):", "    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"),
        ("crashed", "over_memory", "timed_out"),
    ),
    "files": (
        "for n in range(50):\n    open(os.path.join(os.environ['TMPDIR'], f'left_{n}'), 'w').write('x' * 10000)\n",
        f"return {_RIGHT}",
        ("accepted", "cheating"),
    ),
    "open_files": ("", "a = [open('/dev/null') for _ in range(100000)]", ("crashed",)),
    "large_file": (
        "",
        "f = open('large', 'wb')\n    while True:\n        f.write(bytes(1 << 24))",
        ("crashed", "over_memory", "timed_out", "cheating"),
    ),
    "closes_descriptors": ("", "os.closerange(0, 256)\n    return x", ("crashed", "wrong", "cheating")),
    "writes_to_descriptors": (
        "",
        _body(
            "for n in range(3, 64):",
            "    try:",
            "        os.write(n, b'GSM1' + bytes(64))",
            "    except OSError:",
            "        pass",
        ),
        ("crashed", "cheating"),
    ),
    "patches_torch": ("", "torch.equal = lambda *a: True\n    return x", ("wrong", "cheating")),
}


def candidate(number: int) -> tuple[str, Candidate]:
    kind = list(KINDS)[number % len(KINDS)]
    top, body, _ = KINDS[kind]
    function = f"\n\ndef candidate(x, w):\n    {body}\n" if body else ""
    return kind, Candidate(f"{kind}_{number}", _HEAD.format(number=number) + top + function)


def run(problem: ProblemSource, count: int, jobs: int, options: GateOptions) -> dict[str, Any]:
    """All verdicts, and what is left of processes, files and the judges' memory."""
    made, load, mark = [candidate(number) for number in range(count)], os.getloadavg(), uuid.uuid4().hex
    memory: dict[str, int] = {}
    unexpected: list[str] = []
    judged, slowest, began = Counter[str](), (0.0, ""), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _environment(TMPDIR=folder, GOLDSMITH_BENCHMARK=mark):
        with Judges(jobs, options) as judges:
            for number, verdict in judges.run([(problem, each) for _, each in made]):
                judged[verdict.status] += 1
                kind, seen = made[number][0], judged.total()
                if verdict.status not in KINDS[kind][2]:
                    unexpected.append(f"{verdict.candidate}: {verdict.status} {verdict.reason}: {verdict.evidence[:1]}")
                slowest = max(slowest, (verdict.seconds, verdict.candidate))
                if seen in (10, 100, 500, 1000) or seen == count:
                    memory[str(seen)] = sum(_own_bytes(p.pid) for p in judges.processes)
            running = len(_processes(mark))
        took = time.monotonic() - began
        time.sleep(1.0)
        left = [str(file.relative_to(folder)) for file in Path(folder).rglob("*")]
    return {
        "candidates": count,
        "kinds": len(KINDS),
        "jobs": jobs,
        "limit_seconds": options.limits.seconds,
        "seconds": round(took, 1),
        "missing": count - judged.total(),
        "statuses": dict(judged),
        "unexpected": unexpected,
        "slowest": [round(slowest[0], 1), slowest[1]],
        "processes_before_the_end": running,
        "left_processes": _processes(mark),
        "left_files": left,
        "judges_mib": {seen: size >> 20 for seen, size in memory.items()},
        "load": [round(load[0], 1), round(os.getloadavg()[0], 1)],
    }


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Context with these variables, which judges and all below them inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    tempfile.tempdir = None  # it is read anew
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None


def lines(row: dict[str, Any]) -> list[str]:
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(row["statuses"].items()))
    found = [
        f"{row['candidates']} candidates of {row['kinds']} kinds in {row['seconds']} s with {row['jobs']} judges",
        f"{statuses}; {row['missing']} without a verdict",
        f"left afterwards: {len(row['left_processes'])} processes, {len(row['left_files'])} files",
        f"memory of the judges: {', '.join(f'{size} MiB after {seen}' for seen, size in row['judges_mib'].items())}",
        f"slowest: {row['slowest'][1]}, {row['slowest'][0]} s; load {row['load'][0]} before, {row['load'][1]} after",
    ]
    return found + [f"unexpected: {each}" for each in row["unexpected"]]


def _own_bytes(pid: int) -> int:
    """Resident bytes of a judge without its zygote and candidates, which are its children."""
    return resident_bytes(pid) - sum(resident_bytes(child) for child in children(pid))


def _processes(mark: str) -> list[str]:
    """Processes that were started with the mark in their environment, or forked from one that was."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {command[:100]}")
        except OSError:  # it has just ended
            continue
    return found
