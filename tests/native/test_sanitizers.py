"""Every script of cases/ on the native library under AddressSanitizer with UBSan, and under ThreadSanitizer.

A new kernel gets its own script there. The last tests show that the sanitizers detect mistakes.
"""

import pytest

from native.variants import CASES, run

# Each variant needs its own build. The two variants and test_tiles.py therefore take turns by day.
ADDRESS, THREAD = pytest.mark.sweep(3, part=0), pytest.mark.sweep(3, part=1)
VARIANTS = (pytest.param("address", marks=ADDRESS), pytest.param("thread", marks=THREAD))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", sorted(path.stem for path in CASES.glob("*.py")))
def test_the_sanitizers_find_nothing(case, variant):
    done = run(variant, case)
    assert done.returncode == 0, done.stdout + done.stderr


@ADDRESS
def test_the_address_sanitizer_stops_writes_beyond_a_region():
    done = run("address", "pool", "overrun")
    assert done.returncode != 0
    assert "AddressSanitizer: use-after-poison" in done.stderr


@THREAD
def test_guard_words_detect_writes_beyond_a_region():
    done = run("thread", "pool", "overrun")
    beyond = [f"scratch was written {n} bytes beyond the region that ends at byte 292 of 576" for n in (1, 1, 21)]
    assert done.stdout.splitlines() == beyond


@THREAD
def test_the_thread_sanitizer_detects_two_workers_that_write_to_one_address():
    done = run("thread", "pool", "race")
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
