"""The order in which a pool of workers takes jobs."""

from types import SimpleNamespace

import pytest

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
