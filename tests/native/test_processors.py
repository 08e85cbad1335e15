"""Native threads run on the processors that the process may use, and there are no more threads than can run at once."""

import json
import os
import subprocess
import sys

import pytest
import torch

from goldsmith.core import native, processors
from native.test_native import built, pytestmark  # noqa: F401
from native.variants import library

ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.fixture(autouse=True)
def without_caches():
    """Clear the per-process caches before and after a test."""
    for function in (processors.worth, processors.allowed):
        function.cache_clear()
    yield
    for function in (processors.worth, processors.allowed):
        function.cache_clear()


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


GROUPS = {
    "no_groups": ({}, None),
    "no_limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
    "one_and_a_half": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
    "of_a_parent": (
        {
            "proc/self/cgroup": "0::/a/b",
            "sys/fs/cgroup/a/cpu.max": "50000 100000",
            "sys/fs/cgroup/a/b/cpu.max": "max 1",
        },
        0.5,
    ),
    "the_path_is_the_hosts": (
        {"proc/self/cgroup": "0::/../../pod/box", "sys/fs/cgroup/cpu.max": "300000 100000"},
        3.0,
    ),
    "version_1": (
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x",
            "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        2.5,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "many 0"}, None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_limit_of_a_control_group_is_read(name, tmp_path):
    files, wanted = GROUPS[name]
    write(tmp_path, files)
    assert processors.quota(tmp_path) == wanted


@pytest.mark.parametrize(("paid", "wanted"), [(None, 8), (0.3, 1), (1.5, 2), (6.0, 6), (99.0, 8)])
def test_the_number_of_threads_is_limited_by_the_cpu_quota(paid, wanted, monkeypatch):
    monkeypatch.setattr(processors, "quota", lambda: paid)
    monkeypatch.setattr(processors, "allowed", lambda: tuple(range(8)))
    assert processors.worth.__wrapped__() == wanted


def test_a_call_uses_torchs_number_of_threads_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(processors, "worth", lambda: 4)
    for number, wanted in ((1, 1), (3, 3), (4, 4), (64, 4), (100_000, 4)):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        assert native.threads() == wanted


def test_processors_are_taken_from_all_nodes_in_turn(monkeypatch, tmp_path):
    write(tmp_path, {"has_cpu": "0-1", "node0/cpulist": "0-3", "node1/cpulist": "4-5,8"})
    monkeypatch.setattr(processors, "NODES", tmp_path)
    monkeypatch.setattr(processors, "allowed", lambda: (1, 2, 3, 5, 8, 11))
    assert processors.places() == [(1, 0), (5, 1), (11, -1), (2, 0), (8, 1), (3, 0)]


def test_a_machine_without_node_information_is_one_node(monkeypatch, tmp_path):
    monkeypatch.setattr(processors, "NODES", tmp_path / "none")
    monkeypatch.setattr(processors, "allowed", lambda: (0, 1))
    assert processors.places() == [(0, -1), (1, -1)]


def test_a_processor_number_out_of_range_is_refused():
    library()
    one = (native.c_int32 * 1)(4096)
    with pytest.raises(ValueError, match="processor 4096, expected 0 to 1023"):
        native.check(native.library().gs_workers_on(one, one, 1))


# -- the workers of a process -----------------------------------------------------------------------------------------

WORKERS = """
import json, os, resource, sys, time
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # like OpenMP for its first thread, or taskset for the process
import torch
from goldsmith import experts
from goldsmith.core import native, processors

def workers():
    tasks = {int(task.name): task for task in Path("/proc/self/task").iterdir()}
    return {n: task for n, task in tasks.items() if (task / "comm").read_text().strip() == "goldsmith"}

def count(wanted):
    until = time.monotonic() + 20
    while len(workers()) < wanted and time.monotonic() < until:  # a worker has no name before it runs
        time.sleep(0.01)
    time.sleep(0.05)  # time for surplus workers to appear
    return len(workers())

def naps():
    texts = [(task / "status").read_text() for task in workers().values()]
    return [int(text.split("nonvoluntary")[0].rpartition("voluntary_ctxt_switches:")[2]) for text in texts]

report = {"allowed": processors.allowed(), "worth": processors.worth()}
torch.set_num_threads(64)
base, T = experts.pack(torch.randn(2, 1024, 512), torch.randn(2, 512, 512), format="bf16"), 16 * report["worth"]
experts.moe(torch.randn(T, 512), torch.randint(2, (T, 1)), torch.rand(T, 1), base, backend="native")  # work for all
report["of_a_call"] = count(report["worth"] - 1)
native.measure("fma", threads=5, seconds=0.001)
report["of_five"], report["on"] = count(4), sorted({tuple(sorted(os.sched_getaffinity(n))) for n in workers()})
places = processors.places()  # worker n belongs to the node of place n
homes = {node: tuple(sorted(p for p, other in places if other == node)) for _, node in places}
report["homes"] = sorted({homes[places[n % len(places)][1]] for n in range(1, report["of_five"] + 1)})
time.sleep(0.05)
before = naps()
for _ in range(50):
    native.measure("fma", threads=2, seconds=0.0001)
    time.sleep(0.0005)  # the workers park
report["woken"] = sum(a != b for a, b in zip(before, naps()))
before, begin = time.process_time(), time.perf_counter()
time.sleep(0.3)
report["busy"] = (time.process_time() - before) / (time.perf_counter() - begin)
resource.setrlimit(resource.RLIMIT_AS, (int(Path("/proc/self/statm").read_text().split()[0]) * 4096 + (200 << 20),) * 2)
report["when_threads_are_short"] = native.measure("fma", threads=900, seconds=0.001) > 0
print(json.dumps(report))
"""


def run_workers(**variables):
    environment = {name: value for name, value in os.environ.items() if name not in processors.TIES}
    environment |= {"GOLDSMITH_LIBRARY": str(library())} | variables
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(len(ALL) < 2, reason="this process may use only one processor")
@pytest.mark.parametrize("tied", [False, True], ids=["by_the_user", "by_openmp"])
def test_workers_run_on_the_processors_of_the_process(tied):
    report = run_workers(**({"OMP_PROC_BIND": "true"} if tied else {}))
    where = ALL if tied else ALL[:1]
    assert report["allowed"] == where and report["worth"] <= len(where)
    assert report["of_a_call"] == report["worth"] - 1, "a call starts no more workers than can run"
    assert report["of_five"] == max(4, report["of_a_call"]) and report["when_threads_are_short"]
    assert report["on"] == report["homes"] and {p for home in report["on"] for p in home} <= set(where)
    assert report["woken"] <= 1, "workers that a call does not need stay asleep"
    assert report["busy"] < 0.3, "idle workers use no CPU time"


def test_the_kernels_lists_of_numbers_are_parsed():
    assert processors.numbers("0-2,5,8-9") == [0, 1, 2, 5, 8, 9] and processors.numbers("") == []
