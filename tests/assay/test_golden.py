"""The self-check of a golden: faulty goldens are reported before any kernel is judged, and right ones pass."""

import math

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.bounds.running_errors import running_bounds
from goldsmith.assay.golden.self_check import _rounded_apart, self_check
from goldsmith.assay.noise.ensemble import legal_runs
from goldsmith.assay.support.torch_settings import default_dtype
from goldsmith.core.tracing import deciding, storage

F64 = torch.float64


def leaves(seed=0, **extra):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(6, 8, generator=generator, dtype=F64),
        "w": torch.randn(8, generator=generator, dtype=F64),
        **extra,
    }


def autograd_of(forward, names=("x", "w")):
    def gradient(own, cotangents):
        for name in names:
            own[name].requires_grad_()
        out = forward(own)
        sent = [cotangents[f"grad_{n}"] for n in out]
        return dict(zip(names, torch.autograd.grad(list(out.values()), [own[n] for n in names], sent), strict=True))

    return gradient


def norm(L):
    return {"y": L["x"] * torch.rsqrt(L["x"].square().mean(-1, keepdim=True) + 1e-6) * L["w"]}


def check(forward, gradient="auto", own=None, **options):
    gradient = autograd_of(forward) if gradient == "auto" else gradient
    return self_check(forward, gradient, leaves() if own is None else own, **options)


# trusted


@pytest.mark.parametrize("seed", range(20))
def test_a_right_golden_has_neither_problems_nor_notes(seed):
    report = check(norm, own=leaves(seed), seed=seed, shapes={"y": (6, 8)})
    assert report.problems == [] and report.notes == []


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-12, 2.0**12, 2.0**40])
def test_the_scale_of_the_inputs_does_not_matter(scale):
    forward = lambda L: {"y": L["x"] * torch.rsqrt(L["x"].square().mean(-1, keepdim=True)) * L["w"]}  # noqa: E731
    own = {"x": leaves()["x"] * scale, "w": leaves()["w"]}
    report = check(forward, own=own)
    assert report.problems == [] and report.notes == []


@pytest.mark.parametrize(
    "f",
    [
        lambda L: torch.softmax(20 * L["x"] * L["w"], -1),
        lambda L: torch.relu(L["x"]) @ L["w"],
        lambda L: L["x"].sort(-1).values * L["w"],
        lambda L: torch.exp(3 * L["x"]).sum() * L["w"].prod(),
        lambda L: torch.zeros(8) * L["w"] + L["x"].new_zeros(6, 1),
        lambda L: torch.where(L["x"] > 0, L["x"] ** 3, L["x"] * L["w"]),
    ],
)
def test_goldens_with_steep_flat_and_discontinuous_parts_pass(f):
    forward = lambda L: {"y": f(L) + 0 * L["x"].sum()}  # noqa: E731
    assert check(forward).problems == []


def test_forward_only_integers_and_empty_inputs_are_fine():
    assert check(norm, gradient=None).problems == []
    own = leaves(i=torch.tensor([0, 3]))
    assert check(lambda L: {"y": (L["x"] * L["w"])[L["i"]], "n": L["i"] + 1}, gradient=None, own=own).problems == []
    empty = {"x": torch.zeros(0, 8, dtype=F64), "w": leaves()["w"]}
    assert check(norm, own=empty).problems == []


def test_constants_made_without_a_dtype_are_float64_inside():
    report = check(lambda L: {"y": L["x"] * torch.ones(8) * L["w"] + torch.tensor(0.5)})
    assert report.problems == [] and torch.get_default_dtype() == torch.float32


def test_a_kink_at_the_point_is_a_note():
    own = {"x": torch.zeros(6, 8, dtype=F64), "w": leaves()["w"]}
    report = check(lambda L: {"y": L["x"].abs() * L["w"]}, own=own)
    assert report.problems == [] and len(report.notes) == 1 and report.notes[0].startswith("a kink: ")


def test_a_kink_next_to_the_point_is_stepped_around():
    own = {"x": torch.full((6, 8), 3e-7, dtype=F64), "w": leaves()["w"]}
    own["x"][0] = 1.0  # gives the other inputs a step that crosses their kink
    for seed in range(5):
        report = check(lambda L: {"y": torch.relu(L["x"]) * L["w"]}, own=own, seed=seed)
        assert report.problems == [] and report.notes == []


def test_a_kink_too_close_to_step_around_is_a_note():
    own = {"x": torch.full((6, 8), 1e-10, dtype=F64), "w": leaves()["w"]}
    own["x"][0] = 1.0
    for seed in range(20):
        report = check(lambda L: {"y": torch.relu(L["x"]) * L["w"]}, own=own, seed=seed)
        assert report.problems == [] and len(report.notes) == 1


# not trusted


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16, torch.float16])
def test_a_golden_that_computes_in_a_narrow_dtype_is_named_with_operator_and_line(narrow):
    def forward(L):
        return {"y": (L["x"].to(narrow) * 2).double() * L["w"]}

    report = check(forward)
    assert len(report.problems) == 1
    text = report.problems[0]
    assert text.startswith(f"the golden computes in {str(narrow)[6:]}: aten._to_copy at ")
    assert f"test_golden.py:{forward.__code__.co_firstlineno + 1};" in text


def test_random_numbers_are_drawn_in_the_candidates_dtype():
    """torch draws other numbers in float64, so a dropout compared with itself would fail."""

    def drop(x, seed, dtype):
        return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) > 0.5) * 2

    cases = {"x": torch.randn(5, 8), "seed": 3}
    own = {dtype: lambda x, seed, d=dtype: drop(x, seed, d) for dtype in (None, torch.float32, F64)}
    assert assay.check(assay.Target(own[torch.float32], own[torch.float32], cases=cases)).verdict == "pass"
    report = assay.check(assay.Target(own[None], own[None], cases=cases), raises=False)
    assert report.verdict == "reference_fault"
    assert "draws random numbers in float64: aten.rand at" in " ".join(str(report).split())
    wide = {**cases, "x": cases["x"].double()}
    assert assay.check(assay.Target(own[F64], own[F64], cases=wide, dtypes=(F64,))).verdict == "pass"


def test_a_narrow_backward_is_named_too():
    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad.float().double() * 2

    report = check(lambda L: {"y": Narrow.apply(L["x"]) * L["w"]})
    assert len(report.problems) == 1 and "aten._to_copy" in report.problems[0]


def test_a_modelled_storage_format_is_allowed():
    def forward(L):
        with storage("bfloat16"):
            w = L["w"].detach().to(torch.bfloat16).double()
        return {"y": L["x"] * w + L["w"] * 0}

    assert check(forward, gradient=None).problems == []


def test_a_golden_that_does_not_repeat_is_named():
    state = {"calls": 0}

    def forward(L):
        state["calls"] += 1
        return {"y": L["x"] * L["w"] * (1 + 1e-15 * state["calls"]), "z": L["x"]}

    report = check(forward, gradient=None)
    assert report.problems == ["the golden does not repeat: y differs between two runs on the same inputs"]


def test_a_golden_that_writes_to_an_input_is_named():
    def forward(L):
        L["x"].mul_(1.5)
        return {"y": L["x"] * L["w"]}

    assert "the golden wrote to its input x" in check(forward, gradient=None).problems


def test_an_exception_is_reported_with_its_line():
    def forward(L):
        return {"y": L["x"] @ L["x"]}

    (text,) = check(forward).problems
    assert text.startswith("the golden raised RuntimeError: ")
    assert f"test_golden.py:{forward.__code__.co_firstlineno + 1})" in text


def test_a_shape_other_than_the_candidates_is_named():
    checked = check(norm, gradient=None, shapes={"y": (6, 1)})
    assert not checked.problems
    assert checked.mismatches["y"] == "y: the golden's shape is [6, 8], the candidate's [6, 1]; one of the two is wrong"


@pytest.mark.parametrize("wrong", [lambda g: g * (1 + 1e-4), lambda g: g * 0, lambda g: -g, lambda g: g + 1e-3])
def test_a_wrong_gradient_is_named_by_input(wrong):
    right = autograd_of(norm)

    def gradient(own, cotangents):
        grads = right(own, cotangents)
        return {**grads, "w": wrong(grads["w"])}

    (text,) = check(norm, gradient).problems
    assert text.startswith("the golden's gradient disagrees with central differences along a random direction: w (")


def test_a_gradient_that_forgets_one_path_is_named():
    def forward(L):
        x = L["x"]
        inv_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach()  # the mistake
        return {"y": x * inv_rms * L["w"]}

    (text,) = self_check(norm, autograd_of(forward), leaves()).problems
    assert ": x (" in text


def test_a_gradient_of_another_shape_is_named():
    right = autograd_of(norm)
    gradient = lambda own, c: {k: g[..., :1] if k == "w" else g for k, g in right(own, c).items()}  # noqa: E731
    (text,) = check(norm, gradient).problems
    assert text == "the gradient of w has shape [1], the input [8]"


def test_nan_within_differences_is_a_note_and_no_problem():
    own = leaves()
    own["x"][0, 0] = float("nan")
    report = check(norm, own=own)
    assert report.problems == [] and "not confirmed" in report.notes[0]


def test_an_exception_restores_the_default_dtype():
    with pytest.raises(ZeroDivisionError), default_dtype(F64):
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


def test_results_inside_a_decision_are_exact_and_may_be_narrow():
    """Sums that tie within rounding: ambiguous if computed, but decided if they are inside the decision."""

    def golden(leaves, context):
        x = leaves["x"]
        with context():
            order = (x.float() + 1.0).argsort(dim=-1, stable=True)
        return {"y": x.gather(-1, order)}

    x = torch.linspace(0, 2**-22, 9, dtype=torch.float64).expand(3, 9)
    outcomes = {}
    for name, context in (("open", lambda: storage("float32")), ("decided", lambda: deciding("float32"))):
        bounds = running_bounds(lambda own, c=context: golden(own, c), {"x": x}, compute=torch.float32, stores={})
        outcomes[name] = bool(bounds["y"].open.any())
        runs = legal_runs(lambda own, c=context: golden(own, c), {"x": x}, compute=torch.float32, stores={})
        assert all(torch.equal(run["y"], runs[0]["y"]) for run in runs)
    assert outcomes == {"open": True, "decided": False}
    assert not self_check(lambda own: golden(own, lambda: deciding("float32")), None, {"x": x}).problems


@pytest.mark.gpu
def test_sums_by_atomics_are_not_a_fault_of_the_golden():
    """On a GPU the gradients of index_select and gather are summed with atomics."""
    at = torch.randint(0, 7, (4096,), device="cuda")
    leaves = {"x": torch.randn(7, 65, dtype=torch.float64, device="cuda")}

    def forward(L):
        return {"y": L["x"].index_select(0, at), "z": L["x"].gather(0, at.unsqueeze(1).expand(-1, 65))}

    def gradient(L, cotangents):
        x = L["x"].requires_grad_()
        y, z = forward({"x": x}).values()
        return {"x": torch.autograd.grad([y, z], [x], [cotangents["grad_y"], cotangents["grad_z"]])[0]}

    result = self_check(forward, gradient, leaves)
    assert result.problems == []
    assert not torch.are_deterministic_algorithms_enabled()


def test_rounding_differs_from_another_result():
    y = torch.tensor([1e3, -2.0, math.nan, math.inf], dtype=torch.float64)
    assert _rounded_apart(y, y * (1 + 1e-15))
    assert _rounded_apart(y, y + torch.tensor([0, 1e-12, 0, 0]))  # a sum of terms as large as the largest
    assert not _rounded_apart(y, y + torch.tensor([0, 1e-9, 0, 0]))
    assert not _rounded_apart(y, y.nan_to_num(nan=0.0))
    assert not _rounded_apart(y, y.nan_to_num(posinf=1.0, nan=math.nan))
    assert not _rounded_apart(y.long(), y.long() + 1)
