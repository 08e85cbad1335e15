"""Work that threads do ahead of its reader."""

import threading
import time

import pytest

from goldsmith.core.processors import made_ahead


def test_results_come_in_order_and_few_wait() -> None:
    made: list[int] = []

    def make(item: int) -> int:
        time.sleep(0.002 * (item % 3))
        made.append(item)
        return item * item

    results = made_ahead(make, iter(range(40)), 3)
    assert next(results) == 0
    assert len(made) <= 5, "it reads no further than its threads and one more"
    assert list(results) == [item * item for item in range(1, 40)]


def test_an_error_comes_in_its_place_and_a_closed_reader_ends_the_threads() -> None:
    def make(item: int) -> float:
        return 1 / (3 - item)

    results = made_ahead(make, range(9), 2)
    assert [next(results) for _ in range(3)] == [1 / 3, 1 / 2, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    before = threading.active_count()
    stopped = made_ahead(make, range(3), 2)
    next(stopped)
    stopped.close()
    assert threading.active_count() == before
