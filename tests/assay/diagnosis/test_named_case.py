"""A named case that passes stays alone; and a cause that an experiment of the tool contradicts is dropped."""

from assay.diagnosis.fault_table import poisoned
from goldsmith import assay
from goldsmith.assay.diagnosis.causes.rules import matches


@assay.case(N=[4, 9])
def rows(make, N):
    return {"x": make.normal(N, 3)}


def test_a_case_that_is_wrong_by_itself_blames_no_cache():
    def kernel(x):
        return x * 2 if len(x) < 8 else x * 3

    target = assay.Target(kernel, lambda x: x * 2, cases=rows, backward=None)
    assert assay.diagnose(target, "rows[N=4]").verdict == "pass"
    assert assay.diagnose(target, "rows[N=9]").verdict == "fail"


def test_a_cache_between_sizes_is_still_blamed():
    kept = []

    def kernel(x):
        kept.append(len(x))
        return x * (2 if kept[0] == len(x) else 3)

    target = assay.Target(kernel, lambda x: x * 2, cases=rows, backward=None)
    diagnosis = assay.diagnose(target, "rows[N=4]")
    assert diagnosis.verdict == "fail" and diagnosis.causes[0].id == "stale_config", str(diagnosis)


def test_memory_that_is_wrong_when_zeroed_is_no_uninitialised_sum():
    evidence = poisoned(0.5, right=False)
    evidence.runs["zeroed memory"] = type(evidence.runs["zeroed memory"])("zeroed memory", ("y",), computed=("y",))
    assert "uninitialised_accumulator" not in matches(evidence)
    assert "uninitialised_accumulator" in matches(poisoned(0.5, right=True))
