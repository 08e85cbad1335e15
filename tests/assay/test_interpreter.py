"""Results in bfloat16 of Triton's interpreter are not judged; all other results of the interpreter are."""

import os

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.execute.interpreter import watching
from goldsmith.cli.verify.checks import Check
from goldsmith.cli.verify.selection import choose_own

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    """Unpatched Triton."""


@triton.jit
def _scale_kernel(x_ptr, y_ptr, size, factor: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, x * factor, mask=at < size)


@triton.jit
def _product_kernel(a_ptr, b_ptr, y_ptr, narrow: tl.constexpr, N: tl.constexpr):
    square = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + square), tl.load(b_ptr + square)
    if narrow:
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
    tl.store(y_ptr + square, tl.dot(a, b, input_precision="ieee"))


def scaled(x, factor=1.7):
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _scale_kernel[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), factor, BLOCK=32)
    return y


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scaled(x)

    @staticmethod
    def backward(ctx, g):
        return scaled(g)


@assay.case(T=[0, 7])
def tokens(make, T):
    return {"x": make.normal(T, 33)}


def scale(*dtypes, kernel=Scale.apply, **more):
    return assay.Target(kernel, lambda x: x * 1.7, cases=tokens, name="scale", dtypes=dtypes, **more)


def test_a_right_kernel_is_neither_failed_nor_certified_in_interpreted_bfloat16():
    report = assay.check(scale(torch.bfloat16), raises=False)
    assert report.verdict == "unjudged" and not report.ok and not report.findings
    assert [n.case for n in report.notes if n.id == "not_judged"] == ["tokens[T=7]"]
    with pytest.raises(assay.AssayError, match="NOT JUDGED  scale: bfloat16 was not judged: the kernel ran in"):
        assay.check(scale(torch.bfloat16))


def test_other_dtypes_pass_and_the_report_names_the_unjudged_one():
    report = assay.check(scale(torch.float32, torch.bfloat16, torch.float16))
    assert report.environment["interpreted"]
    assert str(report).startswith("PASS  scale: ") and "; 1 case not judged, see the notes" in str(report)
    assert {r.case for r in report.rows} == {
        "tokens[T=0] float32", "tokens[T=7] float32", "tokens[T=0] bfloat16", "tokens[T=0] float16",
        "tokens[T=7] float16",
    }  # fmt: skip


def test_a_wrong_kernel_fails_in_the_other_dtypes():
    wrong = scale(torch.float32, torch.bfloat16, kernel=lambda x: scaled(x, 1.6), backward=None)
    assert assay.check(wrong, raises=False).verdict == "fail"
    narrow = scale(torch.bfloat16, kernel=lambda x: scaled(x, 1.6), backward=None)
    assert assay.check(narrow, raises=False).verdict == "fail", "float32 is tried beside bfloat16"


@pytest.mark.parametrize("factor, verdict", [(1.7, "pass"), (1.6, "fail")])
def test_plain_torch_in_bfloat16_is_judged_although_the_interpreter_is_on(factor, verdict):
    plain = scale(torch.bfloat16, kernel=lambda x: (x.float() * factor).to(x.dtype))
    report = assay.check(plain, raises=False)
    assert report.verdict == verdict and not report.environment["interpreted"]


@assay.case()
def squares(make):
    return {"a": make.normal(16, 16), "b": make.normal(16, 16)}


@pytest.mark.parametrize("narrow, verdict", [(False, "pass"), (True, "unjudged")])
def test_bfloat16_operands_inside_a_float32_kernel_are_detected(narrow, verdict):
    def product(a, b):
        y = torch.empty(a.shape)
        _product_kernel[(1,)](a.contiguous(), b.contiguous(), y, narrow, N=16)
        return y

    target = assay.Target(product, lambda a, b: a @ b, cases=squares, backward=None)
    assert assay.check(target, raises=False).verdict == verdict


def test_a_kernel_with_bfloat16_compute_is_not_judged_by_truncated_casts():
    assert assay.check(scale(torch.float32, compute=torch.bfloat16), raises=False).verdict == "unjudged"


def test_triton_is_restored():
    from triton.runtime import interpreter

    before = interpreter.GridExecutor.__call__, vars(interpreter.interpreter_builder).copy()
    with watching() as seen:
        scaled(torch.ones(3, dtype=torch.bfloat16))
    assert (seen.launches, seen.bfloat16) == (1, True)
    with watching() as seen:
        scaled(torch.ones(3))
    assert (seen.launches, seen.bfloat16) == (1, False)
    after = interpreter.GridExecutor.__call__, vars(interpreter.interpreter_builder)
    assert after[0] is before[0] and "create_dot" not in after[1] and set(after[1]) >= set(before[1])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float32, torch.bfloat16)])
def test_verify_reports_every_case_as_not_judged(dtypes):
    target = scale(*dtypes)
    jobs = choose_own(target, "default", None).jobs
    check = Check("scale", "", "cpu", jobs, done=len(jobs))
    for job in jobs:
        dtype = getattr(torch, job.dtype)
        check.reports.append(assay.check(target, job.case, dtype=dtype, probes="values", raises=False))
    entry = check.entry()
    if len(dtypes) == 1:
        assert entry.report is None and entry.verdict == "absent" and "check it on a GPU" in entry.reason
    else:
        assert entry.verdict == "pass" and [n.id for n in entry.report.notes] == ["not_judged"]
        assert entry.report.notes[0].case == "tokens[T=7] bfloat16"


def _compiled_for_a_gpu():
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "size": "i32", "factor": "constexpr", "BLOCK": "constexpr"}
    source = triton.compiler.ASTSource(JITFunction(_scale_kernel.fn), signature, {(3,): 2.0, (4,): 16})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]


def test_a_kernel_compiles_for_a_gpu_between_launches_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    plain = _compiled_for_a_gpu()
    with watching() as seen:
        x = torch.randn(5)
        assert torch.equal(scaled(x, 2.0), 2 * x)
        assert _compiled_for_a_gpu() == plain
        assert torch.equal(scaled(x, 2.0), 2 * x)
    assert seen.launches == 2
