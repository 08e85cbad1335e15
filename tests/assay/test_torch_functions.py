"""torch's own functions, compared with themselves and with their formulas."""

import pytest
import torch
import torch.nn.functional as F

from goldsmith import assay


def check(candidate, golden, std=1.0, **inputs):
    inputs = inputs or {"x": std * torch.randn(16, 256, generator=torch.Generator().manual_seed(3))}
    return assay.check(assay.Target(candidate, golden, cases=inputs, name="kernel"), raises=False)


def gelu(x):
    return F.gelu(x)


def erf_formula(x):
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


@pytest.mark.parametrize("golden", [gelu, erf_formula], ids=["itself", "formula"])
@pytest.mark.parametrize("std", [1.0, 2.0])
def test_torchs_gelu_is_right(golden, std):
    """Its vector kernel on a CPU has an erf that is off by 12 roundings of 1."""
    report = check(gelu, golden, std)
    assert report.verdict == "pass", str(report)


def test_the_tanh_approximation_is_not_gelu():
    report = check(lambda x: F.gelu(x, approximate="tanh"), gelu)
    assert report.verdict == "fail" and report.findings[0].measured > 100


def cholesky(x):
    return torch.linalg.cholesky(x @ x.mT + torch.eye(8, dtype=x.dtype))


@pytest.mark.parametrize("fn", [torch.linalg.inv, cholesky], ids=["inverse", "cholesky"])
def test_probe_inputs_that_the_golden_refuses_are_no_finding(fn):
    def function(x):
        return fn(x)

    report = check(function, function, x=torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    assert report.verdict == "pass", str(report)
    assert any(n.id == "golden_raised" for n in report.notes)


def test_a_candidate_that_refuses_inputs_of_the_golden_is_reported():
    def picky(x):
        if bool((x == x[:1]).all()):
            raise ValueError("all the same")
        return x * 2

    report = check(picky, lambda x: x * 2)
    assert report.verdict == "fail" and any("all the same" in f.text for f in report.findings)


def test_a_declared_dtype_that_a_dict_of_tensors_does_not_have_is_refused():
    target = assay.Target(gelu, gelu, cases={"x": torch.randn(4, 8)}, name="kernel", dtypes=(torch.bfloat16,))
    with pytest.raises(
        assay.TargetError, match="dtypes: bfloat16 is declared, and case .* a dict of tensors in float32"
    ):
        assay.check(target, raises=False)


# 16 bits: torch's functions round intermediates, so they do not keep the promise of float32


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_formula(q, k, v):
    scores = assay.stage("scores", q @ k.mT * q.shape[-1] ** -0.5)
    return assay.stage("p", torch.softmax(scores, -1)) @ v


def layer_norm(x, w, b):
    return F.layer_norm(x, (40,), w, b)


@assay.case()
def heads(make):
    return {n: make.normal(1, 2, 8, 16) for n in "qkv"}


@assay.case()
def rows(make):
    return {"x": make.normal(6, 40)}


@assay.case()
def normed(make):
    return {"x": make.normal(6, 40), "w": make.normal(40), "b": make.normal(40)}


def check_dtype(candidate, golden, cases, dtype, seed=0, probes="default", **declared):
    target = assay.Target(candidate, golden, cases=cases, name="kernel", dtypes=(dtype,), **declared)
    return assay.check(target, seed=seed, probes=probes, raises=False)


NUMBERS = ("values", "ensemble")


BFLOAT16 = {"compute": torch.bfloat16}


@pytest.mark.parametrize(
    "fn, cases, dtype, declared",
    [
        (attention, heads, torch.float32, {}),
        (causal, heads, torch.bfloat16, BFLOAT16),
        (layer_norm, normed, torch.bfloat16, BFLOAT16),
        (lambda x: F.logsigmoid(x), rows, torch.bfloat16, BFLOAT16),
        (lambda x: F.hardswish(x), rows, torch.bfloat16, BFLOAT16),
        (lambda x: F.normalize(x, dim=-1), rows, torch.float16, {"compute": torch.float16}),
    ],
    ids=["attention", "causal", "layer_norm", "logsigmoid", "hardswish", "normalize"],
)
def test_torchs_functions_pass_against_themselves_in_their_compute_precision(fn, cases, dtype, declared):
    """Attention on a CPU returns 0 for a query of NaN, and hardswish's gradient has NaN in whole vectors only."""
    report = check_dtype(fn, fn, cases, dtype, seed=6, **declared)
    assert report.verdict == "pass", str(report)


def test_a_kernel_that_rounds_intermediates_gets_a_declaration_hint():
    report = check_dtype(layer_norm, layer_norm, normed, torch.bfloat16, probes=NUMBERS)
    assert report.verdict == "fail"
    assert all("if it is meant to, declare compute=torch.bfloat16" in f.text for f in report.findings), str(report)


def test_a_kernel_that_rounds_a_stage_gets_its_name_and_passes_once_declared():
    report = check_dtype(attention, attention_formula, heads, torch.bfloat16, probes=NUMBERS)
    assert "declare stored={'p': 'q'}" in report.findings[0].text, str(report)
    report = check_dtype(attention, attention_formula, heads, torch.bfloat16, probes=NUMBERS, stored={"p": "q"})
    assert report.verdict == "pass", str(report)


def test_zeros_for_a_query_of_nan_are_reported_against_a_formula():
    """torch's attention does so on a CPU with AVX-512; with AVX2 it returns NaN."""

    def answered(q, k, v):
        return torch.where(q.isnan().any(-1, keepdim=True), 0, attention_formula(q, k, v))

    report = check_dtype(answered, attention_formula, heads, torch.float32, probes=("values", "scaling"))
    assert [f.text[:34] for f in report.findings] == ["values:nan is swallowed: y is fini"], str(report)


def test_an_error_that_no_rounding_explains_has_no_hint():
    report = check_dtype(lambda q, k, v: attention(q, k, v) * 1.5, attention, heads, torch.bfloat16, probes=NUMBERS)
    assert report.verdict == "fail" and not any("declare" in f.text for f in report.findings), str(report)


@pytest.mark.parametrize("declared", [{}, BFLOAT16], ids=["float32", "bfloat16"])
def test_a_wrong_scale_is_found_in_16_bits(declared):
    def wrong(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=0.3)

    assert check_dtype(wrong, attention, heads, torch.bfloat16, probes=NUMBERS, **declared).verdict == "fail"


# writing in place


def edits_what_was_saved(x):
    h = torch.exp(x)
    y = h * x
    h.add_(1)
    return y


def edits_its_input(x):
    x.mul_(2)
    return x * x


@pytest.mark.parametrize(
    "kernel, message",
    [
        (edits_what_was_saved, "a tensor saved for the backward (float [16, 256]"),
        (edits_its_input, "a leaf that requires a gradient, as x does, is edited in place"),
    ],
)
def test_a_tensor_edited_in_place_is_reported(kernel, message):
    report = check(kernel, lambda x: torch.exp(x) * x)
    assert report.verdict == "fail" and message in report.findings[0].text, str(report)
    assert "RuntimeError" not in str(report) and "anomaly" not in str(report)


def test_a_golden_that_edits_a_saved_tensor_is_reported():
    report = check(lambda x: torch.exp(x) * x, edits_what_was_saved)
    assert report.verdict == "reference_fault" and "a tensor saved for the backward" in str(report)


class OneNumber(torch.autograd.Function):
    """Treats any gradient expanded along its last axis as that of `y.sum()`: one number."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * (g.flatten()[0] if g.stride(-1) == 0 else g)


def test_a_gradient_that_is_one_number_for_every_row_is_sent_too():
    report = check(lambda x: OneNumber.apply(x), lambda x: x.square())
    assert report.verdict == "fail" and "along its last axis" in report.findings[0].text, str(report)


def test_an_overflow_in_the_declared_precision_of_another_run_is_excused():
    """The square of 1 / x overflows float16 where its product with a small gradient would not."""

    def reciprocal(x):
        return torch.reciprocal(x)

    @assay.case()
    def small_at_times(make):
        x = make.normal(6, 40)
        x[:, 0] = 1 / 300
        return {"x": x}

    report = check_dtype(reciprocal, reciprocal, small_at_times, torch.float16, compute=torch.float16)
    assert report.verdict == "pass", str(report)


def test_a_legal_overflow_is_not_attributed_to_another_slice():
    @assay.case()
    def large_at_a_place(make):
        x = make.normal(6, 40)
        x[4, 1] = 40000.0
        return {"x": x}

    report = check_dtype(lambda x: x * 2, lambda x: x * 2, large_at_a_place, torch.float16)
    assert report.verdict == "pass", str(report)


def test_a_softmax_over_an_empty_segment_is_no_fault_of_the_golden():
    def by_segments(x, offsets):
        ends = offsets.tolist()
        return torch.cat([x[lo:hi].softmax(0) for lo, hi in zip(ends, ends[1:], strict=False)])

    def golden(x, offsets):
        ends = offsets.tolist()
        parts = [x[lo:hi] for lo, hi in zip(ends, ends[1:], strict=False)]
        return torch.cat([p.log_softmax(0).exp() + 0 * p.logsumexp(0).clamp(min=-9) for p in parts])

    case = {"x": torch.randn(7, 3), "offsets": torch.tensor([0, 2, 2, 7])}
    report = assay.check(assay.Target(by_segments, golden, cases=case), raises=False)
    assert report.verdict == "pass", str(report)
