"""Out of memory is not the kernel's fault: the report says what to do, and the other cases continue."""

import pytest
import torch

from assay.kernels import plain_sum, target
from goldsmith import assay
from goldsmith.assay.bounds import running_errors
from goldsmith.assay.noise import ensemble
from goldsmith.assay.probes import values
from goldsmith.assay.report.html.view import case_states, worst_ratio
from turns import by_turns

CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 514.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which 430.69 MiB is "
    "free. Process 564 has 716.00 MiB memory in use."
)
CPU_TEXT = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
WITHOUT_NVML = (
    'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/'
    'CUDACachingAllocator.cpp":1135, please report a bug to PyTorch.'
)
NO_MEMORY = {
    "container": (RuntimeError(WITHOUT_NVML), ""),
    "card": (torch.OutOfMemoryError(CUDA_TEXT), ", 514.00 MiB more were needed"),
    "cpu": (RuntimeError(CPU_TEXT + "allocate 8000 bytes. Error code 12"), ", 8000 bytes more were needed"),
    "numpy": (MemoryError(), ""),
    "driver": (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), ""),
}


@assay.case(T=[3, 5, 7])
def three(make, T):
    return {"x": make.normal(T, 8), "w": make.normal(8)}


def short_of(error, fn, when=lambda x: True):
    def limited(x, w):
        if len(x) == 5 and when(x):
            raise error
        return fn(x, w)

    return limited


@pytest.mark.parametrize("of, where", by_turns([*NO_MEMORY], ["golden", "analysis", "drawing"]))
def test_a_golden_that_runs_out_of_memory_leaves_its_case_unjudged(monkeypatch, of, where):
    error, more = NO_MEMORY[of]
    message = f"out of memory{more}"
    kernel, cases, golden = target(plain_sum, cases=three), three, plain_sum
    if where == "golden":
        golden = short_of(error, plain_sum)
    elif where == "analysis":  # it needs twice as many tensors
        rules = running_errors.running_bounds
        monkeypatch.setattr(
            running_errors,
            "running_bounds",
            lambda fn, leaves, **o: short_of(error, lambda x, w: rules(fn, leaves, **o))(leaves["x"], leaves["w"]),
        )
    else:

        @assay.case(T=[3, 5, 7])
        def three_drawn(make, T):
            return dict(zip("xw", short_of(error, lambda x, w: (x, w))(make.normal(T, 8), make.normal(8)), strict=True))

        cases = three_drawn
    kernel = assay.Target(plain_sum, golden, cases=cases, name="kernel")
    report = assay.check(kernel, probes="quick", raises=False)
    assert report.verdict == "unjudged" and not report.findings and not report.partial
    ((short, why),) = {n.case: n.text for n in report.notes if n.id == "not_run"}.items()
    assert short.endswith("[T=5]") and f": {message}; use smaller sizes" in why
    assert {r.case[-5:] for r in report.rows if r.state == "ok"} >= {"[T=3]", "[T=7]"}
    text = " ".join(str(report).split())
    assert text.startswith("NOT JUDGED kernel: 1 of 3 cases did not run (") and message in text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(CUDA_TEXT), RuntimeError(WITHOUT_NVML)])
def test_a_candidate_that_runs_out_of_memory_is_unjudged_unless_it_has_findings(error):
    short = short_of(error, plain_sum)
    report = assay.check(target(short, cases=three), probes="quick", raises=False)
    assert report.verdict == "unjudged" and {n.case for n in report.notes if n.id == "not_run"} == {"three[T=5]"}
    wrong = short_of(error, lambda x, w: plain_sum(x, w) * 1.01)
    assert assay.check(target(wrong, cases=three), raises=False).verdict == "fail"


def test_a_probe_that_runs_out_of_memory_is_reported_and_the_others_continue():
    calls = []

    def second_runs(x):
        calls.append(x)
        return len(calls) == 2

    short = short_of(torch.OutOfMemoryError(CUDA_TEXT), plain_sum, when=second_runs)
    report = assay.check(target(short, cases=three), probes="quick", raises=False)
    assert report.verdict == "pass"
    ((probe, text),) = [(n.tensor, n.text) for n in report.notes if n.id == "out_of_memory"]
    assert text.endswith(f"; not finished on this case: {probe}") and len(calls) > 3


@pytest.mark.parametrize("where", ["honest", "judging"])
def test_a_difference_that_the_golden_lacked_memory_to_excuse_is_not_a_finding(monkeypatch, where):
    @assay.case(T=5)
    def draw(make, T):
        return {"x": make.uniform(T, 8) + 1.0}

    def golden(x):
        square = assay.stage("square", x * x)
        return square / square

    def kernel(x):
        # 2^24 overflows float16 to inf / inf, where the golden in float64 gives 1
        square = assay.stage("square", (x.float() * x.float()).half())
        return (square.float() / square.float()).half()

    options = {"outputs": ("ratio",), "stored": {"square": "x"}, "grads": (), "dtypes": (torch.float16,)}
    kernel = assay.Target(kernel, golden, cases=draw, **options)
    plain = assay.check(kernel, raises=False, probes=("values", "scaling"))
    assert plain.verdict == "pass", str(plain)
    assert {n.tensor for n in plain.notes if n.id == "compute_range"} >= {"ratio"}
    assert set(case_states(plain).values()) == {"ok"} and worst_ratio(plain) <= 1
    if where == "honest":
        legal = ensemble.legal_runs
        monkeypatch.setattr(
            ensemble,
            "legal_runs",
            lambda *args, k, **options: _raise(NO_MEMORY["container"][0]) if k == 1 else legal(*args, k=k, **options),
        )
    else:
        judge = values.judge
        monkeypatch.setattr(
            values,
            "judge",
            lambda s, *args, **o: (
                (judge(s, *args, **o), _raise(NO_MEMORY["container"][0]))
                if args[2] == "scaling"
                else judge(s, *args, **o)
            ),
        )
    short = assay.check(kernel, raises=False, probes=("values", "scaling"))
    assert short.verdict == "pass" and not short.findings, str(short)
    assert [n.tensor for n in short.notes if n.id == "out_of_memory"] == ["scaling"]


def _raise(error):
    raise error
