"""The native library under AddressSanitizer with UBSan and under ThreadSanitizer: every script of cases/ on both.

A kernel is taken in by a script of its own there. The last tests show that a mistake would be seen.
"""

import pytest

from native.variants import CASES, run

VARIANTS = ("address", "thread")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", sorted(path.stem for path in CASES.glob("*.py")))
def test_the_sanitizers_find_nothing(case, variant):
    done = run(variant, case)
    assert done.returncode == 0, done.stdout + done.stderr


def test_writing_beyond_a_region_is_stopped_by_the_address_sanitizer():
    done = run("address", "pool", "overrun")
    assert done.returncode != 0
    assert "AddressSanitizer: use-after-poison" in done.stderr


def test_writing_beyond_a_region_is_noticed_by_the_guard_words():
    done = run("thread", "pool", "overrun")
    beyond = [f"scratch was written {n} bytes beyond the region that ends at byte 292 of 576" for n in (1, 1, 21)]
    assert done.stdout.splitlines() == beyond


def test_two_workers_that_write_the_same_place_are_seen_by_the_thread_sanitizer():
    done = run("thread", "pool", "race")
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
