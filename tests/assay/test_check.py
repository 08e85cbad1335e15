"""`check` from a user's side: the first example, verdicts, reports, budgets, and goldens at fault."""

import json

import pytest
import torch

from assay.kernels import normed, plain_sum, probes_of, rmsnorm, rows, target, texts
from goldsmith import assay
from goldsmith.assay.probes import LEVELS, NAMES

# the first example


class MyRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        inv_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, w, inv_rms)
        return x * inv_rms * w

    @staticmethod
    def backward(ctx, g):
        x, w, inv_rms = ctx.saved_tensors
        x_hat = x * inv_rms
        dx = inv_rms * (g * w - x_hat * (g * w * x_hat).mean(-1, keepdim=True))
        return dx, (g * x_hat).sum(0), None


class Forgetful(MyRmsNorm):
    """The gradient of x lacks the path through inv_rms."""

    @staticmethod
    def backward(ctx, g):
        x, w, inv_rms = ctx.saved_tensors
        return inv_rms * g * w, (g * x * inv_rms).sum(0), None


PAGE = """
from goldsmith import assay

def golden(x, w, eps):                                   # plain torch; called with float64 copies of the very inputs
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    x_hat = assay.stage("x_hat", x * inv_rms)
    return x_hat * w

@assay.case(T=[0, 1, 13, 128], D=[32, 100])              # every combination is a case
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}

target = assay.Target(my_rmsnorm, golden, cases=tokens)  # gradients through autograd; or backward=my_backward

assay.check(target)                                      # in a test: raises with the report when it fails
"""


def test_the_first_example_runs_as_written():
    scope = {"torch": torch, "my_rmsnorm": MyRmsNorm.apply}
    exec(compile(PAGE, "page", "exec"), scope)
    assert [str(c) for c in scope["target"].cases][:3] == ["tokens[T=0,D=32]", "tokens[T=0,D=100]", "tokens[T=1,D=32]"]


def test_a_broken_kernel_fails_the_first_example_and_the_report_names_it():
    with pytest.raises(assay.AssayError) as error:
        exec(compile(PAGE, "page", "exec"), {"torch": torch, "my_rmsnorm": Forgetful.apply})
    report, text = error.value.report, str(error.value)
    assert text == str(report) and text.startswith("FAIL  Forgetful: x.grad exceeds its rounding bound")
    assert "[tokens[T=1,D=32]]" in text and isinstance(error.value, AssertionError)
    assert {f.tensor for f in report.findings if f.rung == "CERTAIN"} == {"x.grad"}
    assert all(r.state == "ok" for r in report.rows if r.tensor in ("y", "w.grad") and r.run == "values")


# verdicts


def test_the_same_seed_gives_the_same_report_and_leaves_torchs_seed_alone():
    one = target(lambda x, w: plain_sum(x, w) * 1.001)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, second = (assay.check(one, seed=3, raises=False) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.findings == second.findings and first.rows == second.rows and first.notes == second.notes
    other = assay.check(one, seed=4, raises=False)
    assert [r.max_error for r in other.rows] != [r.max_error for r in first.rows]


def test_zero_tokens_are_an_ordinary_case():
    @assay.case(T=[0], D=[8])
    def none(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D)}

    report = assay.check(target(plain_sum, cases=none))
    assert {(r.tensor, r.shape) for r in report.rows} >= {("y", (0,)), ("x.grad", (0, 8)), ("w.grad", (8,))}

    def garbage(x, w, grad_y):
        return torch.empty_like(x), torch.empty_like(w)  # accumulates into memory that was never set to zero

    report = assay.check(target(plain_sum, cases=none, backward=garbage, outputs=("y",)), raises=False)
    assert report.findings[0].probe == "poison" and report.findings[0].tensor == "w.grad"


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_candidate_that_raises_is_a_failure_not_a_crash(phase):
    def forward(x, w):
        if phase == "forward":
            raise ZeroDivisionError("no groups")
        return plain_sum(x, w)

    def backward(x, w, grad_y):
        raise RuntimeError("launch failed\nwith many lines")

    report = assay.check(target(forward, backward=backward, outputs=("y",)), raises=False)
    (finding,) = report.findings
    message = {"forward": "ZeroDivisionError: no groups", "backward": "RuntimeError: launch failed"}[phase]
    assert (
        finding.text.startswith(f"the candidate raised in its {phase} (values): {message} (")
        and finding.rung == "CERTAIN"
    )
    assert all(p.reason for p in report.probes if not p.ran)


def test_a_candidate_that_ends_the_process_is_a_failure():
    def kernel(x, w):
        raise SystemExit(3)

    report = assay.check(target(kernel), raises=False)
    assert report.verdict == "fail" and "SystemExit: 3" in report.findings[0].text


def test_a_wrapper_with_a_borrowed_signature_is_called_with_positions():
    """functools.wraps gives torch.vmap's wrapper the signature of the wrapped function."""
    alone = torch.vmap(plain_sum, in_dims=(0, None))
    assert assay.check(target(alone)).verdict == "pass"


def test_an_interrupt_is_not_a_finding():
    def kernel(x, w):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        assay.check(target(kernel))


def test_an_interrupt_hands_over_what_was_finished():
    @assay.case(T=[3, 5, 7])
    def sized(make, T):
        return {"x": make.normal(T, 8), "w": make.normal(8)}

    def kernel(x, w):
        if len(x) == 5:
            raise KeyboardInterrupt
        return plain_sum(x, w)

    for raises in (True, False):
        with pytest.raises(KeyboardInterrupt) as stopped:
            assay.check(target(kernel, cases=sized), probes="quick", raises=raises)
        assert stopped.value.__notes__ == ["The check of kernel was interrupted; .report has the finished part."]
        assert stopped.traceback[-1].name == "kernel"
    report = stopped.value.report
    assert report.partial == "interrupted" and report.cases == ["sized[T=3]", "sized[T=5]", "sized[T=7]"]
    assert {r.case for r in report.rows} == {"sized[T=3]"} and not report.findings
    assert report.verdict == "unjudged" and not report.ok
    assert {n.case: n.text for n in report.notes if n.id == "not_run"} == {
        "sized[T=5]": "the case did not finish: interrupted", "sized[T=7]": "the case did not run: interrupted",
    }  # fmt: skip
    message = " ".join(str(report).split())
    assert message.startswith("NOT JUDGED kernel: 2 of 3 cases did not finish (sized[T=5], sized[T=7]): interrupted; ")


def test_wrong_shapes_nan_and_missing_results_are_certain():
    def texts_of(kernel):
        report = assay.check(target(kernel, backward=None), probes="values", raises=False)
        assert report.verdict == "fail"
        return texts(report)

    wrong_shape = texts_of(lambda x, w: plain_sum(x, w)[:, None])
    assert wrong_shape == ["y: the golden's shape is [12], the candidate's [12, 1]; one of the two is wrong"]
    (text,) = texts_of(lambda x, w: torch.where(torch.arange(12) == 3, torch.nan, plain_sum(x, w)))
    assert text.startswith("y has NaN where the golden is a number: axis T: 3; 1 of 12 elements")
    (text,) = texts_of(lambda x, w: plain_sum(x, w) / (torch.arange(12) != 3))
    assert text.startswith("y has Inf where the golden is finite: axis T: 3")


def test_quality_fails_only_a_strict_check():
    def noisy(x, w, eps):
        y = rmsnorm(x, w, eps)
        return y * (1 + (torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) - 0.5) * 2.0**-19)

    one = target(noisy, rmsnorm, normed, backward=None)
    report = assay.check(one, probes="quick", raises=False)
    assert report.ok and {f.rung for f in report.findings} == {"QUALITY"} and "1 remark on quality" in str(report)
    assert assay.check(one, probes="quick", strict=True, raises=False).verdict == "fail"


# probes, dtypes, budget


def test_levels_and_names_select_probes():
    one = target(plain_sum)

    def ran(probes):
        return {p.name for p in assay.check(one, probes=probes).probes if p.ran}

    assert ran("default") == set(NAMES) - {"float32"} == ran("all")
    assert ran("quick") == set(LEVELS["quick"]) - {"float32"}
    assert ran("taint") == {"values", "taint"} and ran(["quick", "layouts"]) == ran("quick") | {"layouts"}
    assert ran(()) == {"values"}


def counted(function, count):
    def call(x, w):
        count.append(1)
        return function(x, w)

    return call


@pytest.mark.parametrize("kernel", [plain_sum, torch.mul, lambda x, w: torch.softmax(x * w, -1)])
def test_the_costs_of_a_check_stay_within_the_specification(kernel):
    """At most 24 candidate runs plus three per axis, ten for quick; 42 golden runs plus eight per axis."""
    axes = 3
    for level, candidates, goldens in (("default", 24 + 3 * axes, 42 + 8 * axes), ("quick", 10, 30)):
        called = [], []
        one = target(counted(kernel, called[0]), counted(kernel, called[1]))
        for calls in called:
            calls.clear()
        spent = assay.check(one, probes=level).environment["runs"]
        assert spent["candidate"] + spent["calls"] == len(called[0]) and spent["golden"] == len(called[1])
        assert spent["candidate"] <= candidates and spent["golden"] <= goldens, spent


def test_every_dtype_of_the_target_is_tried_and_16_bit_ones_in_float32_too():
    both = target(
        lambda x, w, eps: rmsnorm(x.float(), w.float(), eps).to(x.dtype), rmsnorm, normed,
        dtypes=(torch.bfloat16, torch.float16),
    )  # fmt: skip
    report = assay.check(both, probes="quick")
    assert report.dtypes == ["bfloat16", "float16", "float32"]
    assert report.cases == [f"normed[T=13,D=100] {d}" for d in report.dtypes]
    assert assay.check(both, probes="quick", dtype=torch.float16).dtypes == ["float16", "float32"]
    assert assay.check(both, probes="values", dtype=torch.float16).dtypes == ["float16"]


def test_a_kernel_for_16_bits_only_is_judged_in_16_bits_only():
    def kernel(x, w, eps):
        if x.dtype == torch.float32:
            raise TypeError("bfloat16 only")
        return rmsnorm(x.float(), w.float(), eps).to(x.dtype)

    report = assay.check(target(kernel, rmsnorm, normed, dtypes=(torch.bfloat16,)), probes="quick")
    assert [n.id for n in report.notes] == ["refused_dtype"]


def test_reset_is_called_before_every_run_that_must_start_fresh():
    count = []
    assay.check(target(plain_sum, reset=lambda: count.append(1)), probes="values")
    assert len(count) == 1


def test_a_kernel_that_cannot_run_in_the_interpreter_is_neither_accused_nor_certified():
    """Triton's interpreter lacks features; an exception from it says nothing about the kernel."""

    class InterpreterError(Exception):
        pass

    def kernel(x, w):
        try:
            (2.0).to("float32")
        except AttributeError as error:
            raise InterpreterError(repr(error)) from error

    report = assay.check(target(kernel), raises=False)
    assert report.verdict == "unjudged" and not report.findings and [n.id for n in report.notes] == ["not_judged"]
    assert report.notes[0].text.startswith("cannot run in the interpreter: InterpreterError: AttributeError")


# goldens at fault


def faulty(golden, **more):
    return assay.check(target(plain_sum, golden, **more), raises=False)


FAULTS = {
    "computes in float32": (lambda x, w: plain_sum(x.float(), w.float()), "the golden computes in float32: aten._to_c"),
    "draws anew": (lambda x, w: plain_sum(x, w) + torch.rand(12), "the golden does not repeat: y differs between"),
    "writes its input": (lambda x, w: plain_sum(x.detach().mul_(2), w), "the golden wrote to its input x"),
    "raises": (lambda x, w: w @ x, "the golden raised"),
    "its gradient is not its own": (
        lambda x, w: plain_sum(x, w.detach()) + 0 * w.sum(), "the golden's gradient disagrees with central differences"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_golden_is_reported_and_the_candidate_is_not_accused(fault):
    golden, text = FAULTS[fault]
    report = faulty(golden)
    assert report.verdict == "reference_fault" and probes_of(report) == {"golden"}
    assert any(t.startswith(text) for t in texts(report)), texts(report)
    assert str(report).startswith("REFERENCE FAULT  kernel is not accused: ")


def test_a_golden_backward_is_compared_with_central_differences():
    report = faulty(
        lambda x, w: plain_sum(x, w),
        golden_backward=lambda x, w, grad_y: (grad_y[:, None] * w, 2 * (grad_y[:, None] * x).sum(0)),
        outputs=("y",),
    )
    assert report.verdict == "reference_fault" and "w (backward " in texts(report)[0]


def test_a_golden_may_model_a_storage_format():
    def golden(x, w):
        with assay.storage("bfloat16"):
            stored = w.to(torch.bfloat16)
        return plain_sum(x, stored.to(x.dtype))

    report = assay.check(target(lambda x, w: plain_sum(x, w.bfloat16().float()), golden, grads=("x",)), probes="quick")
    assert report.ok


def test_a_kink_of_the_golden_is_a_note():
    @assay.case()
    def at_zero(make):
        return {"x": torch.zeros(3)}

    def relu(x):
        return torch.relu(x)

    report = assay.check(assay.Target(relu, relu, cases=at_zero), probes="values")
    assert report.ok and [n.id for n in report.notes] == ["golden"] and "a kink" in report.notes[0].text


# the report as data


def test_a_report_survives_json():
    report = assay.check(target(lambda x, w: 2 * plain_sum(x, w) / (torch.arange(12) != 3)), raises=False)
    assert report.findings and report.maps and report.notes
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    again = assay.Report.from_json(data)
    assert str(again) == str(report) and again.to_json() == report.to_json()
    assert again.findings == report.findings and again.probes == report.probes
    with pytest.raises(ValueError, match="^report has schema 99; this version reads 1$"):
        assay.Report.from_json({**data, "schema": 99})


def test_maps_show_the_wrong_tensors_or_one_output_if_all_are_right():
    good = assay.check(target(plain_sum), probes="values")
    (picture,) = good.maps.values()
    assert (picture.tensor, picture.bad, picture.shape) == ("y", False, (1, 12))
    wrong = assay.check(target(lambda x, w: x * w + (torch.arange(40) == 7), lambda x, w: x * w), raises=False)
    (picture,) = wrong.maps.values()
    assert picture.bad and max(range(40), key=lambda d: picture.error_over_limit[0][d]) == 7


def test_rows_of_a_case_name_their_run(rows=rows):
    report = assay.check(target(plain_sum))
    runs = {r.run for r in report.rows}
    assert {"values", "other inputs", "scale:2^12", "scale:2^-12", "values:flat", "values:offset"} <= runs
    assert any(run.startswith("layout:stride0(") for run in runs)
    assert {r.case for r in report.rows} == {"rows[T=12,D=40]"}


def test_a_result_narrower_than_its_inputs_is_judged_to_its_own_precision_with_a_note():
    def narrow(x, w):
        return (plain_sum(x, w) * 1.001).to(torch.bfloat16)

    report = assay.check(target(narrow, backward=None), raises=False)
    (note,) = [n for n in report.notes if n.id == "narrow_result"]
    assert report.ok and note.tensor == "y"
    assert note.text.startswith(
        "y is stored in bfloat16, narrower than every input, so it is judged to 0.004 of its value"
    )
    wide = assay.check(target(lambda x, w: plain_sum(x, w) * 1.001, backward=None), raises=False)
    assert not wide.ok and not [n for n in wide.notes if n.id == "narrow_result"]
    same = assay.check(target(lambda x, w: plain_sum(x.float(), w.float()).to(x.dtype), dtypes=(torch.bfloat16,)))
    assert not [n for n in same.notes if n.id == "narrow_result"]


def test_a_golden_without_error_analysis_is_judged_by_the_noise_alone(monkeypatch):
    def fails(*args, **more):
        raise RuntimeError("no storage")

    monkeypatch.setattr("goldsmith.assay.bounds.running_errors.running_bounds", fails)
    report = assay.check(target(plain_sum), probes=("values", "ensemble"))
    assert {n.id for n in report.notes} == {"not_proven"}
    assert "the error analysis cannot follow the golden (RuntimeError: no storage)" in report.notes[0].text
    wrong = assay.check(target(lambda x, w: plain_sum(x, w) * 1.001), probes=("values", "ensemble"), raises=False)
    assert {f.rung for f in wrong.findings} == {"STATISTICAL"}
