"""The order in which a pool of workers takes jobs, and the kernels that its workers share."""

import multiprocessing
import time
from types import SimpleNamespace

import pytest

from goldsmith.cli.workers.compile_locks import SharedCompiler
from goldsmith.cli.workers.pool import Pool


def worker(group, *, busy=True):
    return SimpleNamespace(group=group, job={} if busy else None)


@pytest.mark.parametrize(
    ("own", "others", "groups", "expected"),
    [
        ("b", ["a"], "aabbcc", 2),
        (None, [], "aabbcc", 0),
        (None, ["a", "b"], "aabbcc", 4),
        ("d", ["a", "b", "c"], "abbcc", 1),
        ("d", ["a", "b", "c"], "abccc", 2),
    ],
    ids=["its own", "the first", "one without a worker", "one with most jobs", "the last one with most jobs"],
)
def test_choice_of_the_next_job(own, others, groups, expected):
    pool, free = Pool(4), worker(own, busy=False)
    pool.workers = [*map(worker, others), free]
    assert pool._choice(free, list(groups)) == expected


def test_one_process_compiles_a_kernel_and_the_others_find_it(tmp_path):
    """Each of four processes needs two kernels; a compile writes the kernel, unless the cache has it by then."""
    fork = multiprocessing.get_context("fork")
    begin, log = fork.Barrier(4), tmp_path / "log"

    def compile_kernel(src, target, options):
        cached = tmp_path / f"{src.name}{options['num_warps']}"
        if not cached.exists():
            time.sleep(0.05)
            cached.touch()
            with log.open("a") as lines:
                lines.write(f"{src.name}{options['num_warps']}\n")

    def work():
        compiler = SharedCompiler(compile_kernel, tmp_path / "cache" / "locks")
        begin.wait()
        for warps in (4, 8):
            compiler(SimpleNamespace(name="k", hash=lambda: "k"), target=None, options={"num_warps": warps})

    workers = [fork.Process(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(log.read_text().split()) == ["k4", "k8"] and not any(worker.exitcode for worker in workers)
