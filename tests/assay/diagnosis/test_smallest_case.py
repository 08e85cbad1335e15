"""The smallest case needs little memory."""

import weakref

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.diagnosis import collect
from goldsmith.assay.diagnosis.shrink import smallest_case

pytestmark = pytest.mark.sweep(8)


@assay.case(T=[4], D=[8])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


def test_one_smaller_case_stays_in_memory(monkeypatch):
    """An examination takes many times the memory of its inputs: only the whole case's and the last two exist."""
    outputs, at_once, examined = [], [], smallest_case.examine

    def examine(*arguments, **options):
        report, examinations = examined(*arguments, **options)
        outputs.extend(map(weakref.ref, examinations))
        at_once.append(sum(examination() is not None for examination in outputs))
        return report, examinations

    of = assay.Target(lambda x, w: (x * w).sum(-1) * 1.5, lambda x, w: (x * w).sum(-1), cases=rows, name="factor")
    report, (whole,) = examined(of, [rows[0]], torch.float32, "cpu", 0, frozenset({"values"}), None, until_failing=True)
    evidence = collect.begin(whole, report)
    collect.collect(whole, evidence, collect.Depth(runs=(), influence=(), whatif=frozenset()))
    monkeypatch.setattr(smallest_case, "examine", examine)
    shrunk, small = smallest_case.smallest_case(whole, evidence, "y", lambda more: False)
    assert len(outputs) >= 6 and max(at_once) <= 2 and shrunk.steps[0] == "D: 8 -> 1"
    assert small.case is shrunk.case and small.material.inputs["x"].numel() < 8 and "y" in small.bad


def test_integers_that_number_no_groups_need_no_list_of_all_numbers_below_them():
    @assay.case(T=[5])
    def hashes(make, T):
        return {"x": make.normal(T), "keys": make.integers(10**14, 10**15, T)}

    of = assay.Target(lambda x, keys: x * (keys % 7) * 1.5, lambda x, keys: x * (keys % 7), cases=hashes, name="hash")
    examine = smallest_case.examine
    report, (whole,) = examine(
        of, [hashes[0]], torch.float32, "cpu", 0, frozenset({"values"}), None, until_failing=True
    )
    assert collect.begin(whole, report).unused == {}
