"""Operators that do not round (a copy, a gather, a power of two): any difference between two runs is a fault."""

import pytest
import torch

from goldsmith import assay


@assay.case()
def rows(make):
    return {"x": make.uniform(6, 8), "index": make.permutation(6)}


def gather(x, index):
    return x[index]


def double(x, index):
    return x * 2


def one_row_leaks(x, index):
    """Threads that share a row of scratch memory."""
    y = x[index]
    return y if torch.get_num_threads() == 1 else torch.where(torch.arange(len(y))[:, None] == 3, y.roll(1, 0), y)


def more_with_threads(x, index):
    return x * (2 if torch.get_num_threads() == 1 else 2.6)


@pytest.mark.parametrize("kernel, golden", [(one_row_leaks, gather), (more_with_threads, double)])
def test_a_race_that_stays_below_one_is_found(kernel, golden):
    for seed in range(3):
        report = assay.check(assay.Target(kernel, golden, cases=rows), seed=seed, raises=False)
        assert report.verdict == "fail" and "with 2 threads the result is another" in report.findings[0].text


@pytest.mark.parametrize("factor", [1.001, 1.1])
def test_a_kernel_that_fails_only_in_later_runs_is_reported_as_such(factor):
    calls = []

    def drifts(x, index):
        calls.append(0)
        return x * 2 * (factor if len(calls) > 3 else 1)

    diagnosis = assay.diagnose(assay.Target(drifts, double, cases=rows, reset=None))
    assert diagnosis.causes[0].id == "stale_state"
