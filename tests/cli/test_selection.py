"""What a run of each size tries, and that it accounts for everything that it leaves out."""

from types import SimpleNamespace

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.probes import LEVELS, NAMES
from goldsmith.cli import placement
from goldsmith.cli.targets import op_dtypes
from goldsmith.cli.verify import selection
from goldsmith.cli.verify.selection import CONTRACT, EVERY_PROBE, USUAL, VALUES, Job, choose, choose_own, examined
from goldsmith.core.op import Op

OPS = Op.all().values()
PLACES = [("reference", "cpu", False), ("triton", "cpu", True), ("triton", "cuda", False), ("reference", "cuda", False)]


def dtypes(op):
    return [str(d).removeprefix("torch.") for d in op_dtypes(op)]


@pytest.mark.parametrize("size", selection.SIZES)
@pytest.mark.parametrize("backend, device, interpreted", PLACES)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_case_in_every_dtype_is_run_or_accounted_for(op, backend, device, interpreted, size):
    choice = choose(op, backend, device, interpreted, size, None)
    ran = {(job.case, job.dtype) for job in choice.jobs}
    assert len(ran) == len(choice.jobs)
    assert len(ran) + sum(number for number, _ in choice.left_out) == len(op.cases) * len(dtypes(op))
    assert all(number > 0 and why for number, why in choice.left_out)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_ordinary_run_has_every_small_case_and_one_in_each_further_dtype(op):
    jobs = choose(op, "reference", "cpu", False, "default", None).jobs
    first, *others = dtypes(op)
    small = [c.name for c in op.cases if "large" not in c.tags]
    assert [job.case for job in jobs if job.dtype == first] == small
    assert [job.dtype for job in jobs if job.dtype != first] == others
    thorough = {job.case for job in jobs if job.probes is None}
    assert thorough >= {c.name for c in op.cases if EVERY_PROBE in c.tags and "large" not in c.tags} != set()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_on_a_gpu_kernels_are_run_on_every_small_case_in_every_dtype_and_on_large_ones_in_the_first(op):
    jobs = choose(op, "triton", "cuda", False, "default", None).jobs
    first, *others = dtypes(op)
    small = {c.name for c in op.cases if "large" not in c.tags}
    assert {job.case for job in jobs if job.dtype == first} == {c.name for c in op.cases}
    assert {(job.case, job.dtype) for job in jobs if job.dtype != first} == {(c, d) for c in small for d in others}


def test_a_case_that_runs_in_float32_anyway_is_not_run_in_float32_again_beside_16_bits():
    jobs = choose(Op.get("mhc.post"), "triton", "cuda", False, "default", None).jobs
    assert {"float32" in job.probes for job in jobs if job.dtype == "bfloat16"} == {False}
    alone = choose(Op.get("mhc.post"), "triton", "cuda", False, "default", "bfloat16").jobs
    assert {job.probes is None or "float32" in job.probes for job in alone} == {True}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_interpreter_gets_a_few_small_cases_in_float32_one_of_them_with_layouts(op):
    jobs = choose(op, "triton", "cpu", True, "default", None).jobs
    large = {c.name for c in op.cases if "large" in c.tags}
    assert 0 < len(jobs) <= selection.FEW_CASES
    assert {job.dtype for job in jobs} == {"float32"} and not large & {job.case for job in jobs}
    assert sorted(job.probes == CONTRACT for job in jobs)[-2:] == [False, True]


def test_a_dtype_requested_by_name_runs_even_in_the_interpreter():
    jobs = choose(Op.get("mhc.post"), "triton", "cpu", True, "quick", "bfloat16").jobs
    assert [job.dtype for job in jobs] == ["bfloat16"]


@pytest.mark.parametrize("backend, device, interpreted", PLACES)
def test_thorough_means_all_probes_on_every_small_case_in_every_dtype(backend, device, interpreted):
    op = Op.get("mhc.expand")
    jobs = choose(op, backend, device, interpreted, "thorough", None).jobs
    large = {c.name for c in op.cases if "large" in c.tags}
    small = [job for job in jobs if job.case not in large]
    assert {job.probes for job in small if job.dtype == "float32"} == {None}
    # the same case in float32 is a job of its own
    others = USUAL if device == "cuda" and backend == "reference" else NAMES
    assert {job.probes for job in small if job.dtype != "float32"} == {tuple(p for p in others if p != "float32")}
    alone = choose(op, backend, device, interpreted, "thorough", "float16").jobs
    assert {job.probes for job in alone if job.case not in large} == {None}


def test_thorough_runs_a_large_case_with_all_probes_in_two_dtypes_and_not_again_where_small_ones_show_the_same():
    op = Op.get("mhc.expand")
    large = [c.name for c in op.cases if "large" in c.tags]

    def found(backend):
        jobs = choose(op, backend, "cuda", False, "thorough", None).jobs
        return [(job.case, job.dtype, job.probes) for job in jobs if job.case in large]

    assert found("reference") == [(c, "float32", VALUES) for c in large]
    every, usual = (tuple(p for p in probes if p != "float32") for probes in (NAMES, USUAL))
    probes = {"float32": None, "bfloat16": every, "float16": usual}
    assert found("triton") == [(c, d, probes[d]) for d in dtypes(op) for c in large]


def test_levels_are_made_of_probes_that_exist():
    assert set(CONTRACT) < set(NAMES)
    # plain calls look for kernels that cheat: an ordinary verify makes them only on cases that get all probes
    assert set(LEVELS["quick"]) - set(USUAL) == {"calls"} and set(USUAL) < set(NAMES)


def test_estimated_costs_grow_with_the_work():
    def cost(probes, interpreted):
        job = selection._Jobs(["float32"], interpreted)
        return job(Op.get("mhc.expand").cases[1], "float32", probes).cost

    assert cost(VALUES, False) < cost(USUAL, False) < cost(None, False) < cost(None, True)
    assert cost(VALUES, False) < cost(VALUES, True)


def test_no_case_counts_as_hours_in_the_time_left():
    for op in OPS:
        assert max(job.cost for job in choose(op, "triton", "cuda", False, "thorough", None).jobs) < 60


def own(draw, **options):
    return assay.Target(lambda x: x * 2, lambda x: x * 2, cases=draw, **options)


def test_a_users_target_gets_all_probes_in_all_its_dtypes():
    cases = assay.case(T=[1, 4])(lambda make, T: {"x": make.normal(T, 3)})
    target = own(cases, dtypes=(torch.float32, torch.bfloat16))
    jobs = choose_own(target, "default", None).jobs
    assert [(job.dtype, job.probes) for job in jobs] == [("float32", None)] * 2 + [("bfloat16", None)] * 2
    assert jobs[0].label.endswith(" float32")
    quick = choose_own(target, "quick", None)
    assert len(quick.jobs) == 1 and quick.left_out[0][0] == 3


def test_labels_are_those_of_the_reports():
    cases = assay.case(T=[2])(lambda make, T: {"x": make.normal(T, 3)})
    for options in ({}, {"dtypes": (torch.float32, torch.bfloat16)}):
        target = own(cases, **options)
        for job in choose_own(target, "default", None).jobs:
            dtype = getattr(torch, job.dtype)
            report = assay.check(target, job.case, dtype=dtype, probes=("values",), raises=False)
            assert report.cases == [job.label]


def test_a_case_that_cannot_be_drawn_does_not_end_the_planning():
    def broken(make, T):
        if T > 1:
            raise RuntimeError("gone")
        return {"x": make.normal(T, 3)}

    assert len(choose_own(own(assay.case(T=[1, 9])(broken)), "default", None).jobs) == 2


def test_one_sentence_says_what_ran():
    jobs = [Job("a", "float32", "a", None), Job("b", "float32", "b", None), Job("c", "float32", "c", VALUES)]
    assert examined(jobs[:2]) == "Run: 2 cases with all probes."
    message = (
        "Run: 2 cases with all probes; 1 case with values and memory; --thorough runs all probes on every small case."
    )
    assert examined(jobs) == message
    assert examined([]) == ""


def test_the_typical_case_has_about_the_typical_size():
    def case(name, elements, *tags):
        return SimpleNamespace(
            name=name, tags=tags, sizes={}, given=False, build=lambda *_: {"x": torch.zeros(elements)}
        )

    cases = [case("none", 0), case("usual", 90), case("big", 4000), case("probed", 30, EVERY_PROBE)]
    assert selection._typical(cases[:3]).name == "usual"
    assert selection._typical(cases).name == "probed"
    kept = selection._spread([case(str(k), k) for k in range(30)] + cases, cases[1])
    assert len(kept) == selection.FEW_CASES and cases[1] in kept


@pytest.mark.parametrize(
    "device, able, wanted",
    [
        (None, {"cpu", "cuda"}, ("cuda", None)),
        (None, {"cpu"}, ("cpu", None)),  # native kernels, on a machine that has a card as well
        ("cuda", {"cpu"}, ("cuda", "not on cuda")),
        (None, set(), ("cuda", "not on cuda")),
    ],
)
def test_a_backend_for_the_cpu_only_is_checked_there_unless_a_device_is_named(monkeypatch, device, able, wanted):
    monkeypatch.setattr(placement, "device_of", lambda request: request["device"] or "cuda")
    monkeypatch.setattr(
        placement, "machine_reason", lambda op, backend, device: None if device in able else f"not on {device}"
    )
    assert placement.place(Op.get("experts.moe"), "native", {"device": device}) == wanted
