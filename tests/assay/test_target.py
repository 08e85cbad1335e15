"""Declaring a target: binding by name, validation on construction, and errors that name the argument."""

import functools

import pytest
import torch

from assay.kernels import plain_sum, rows, sum_gradients, target, texts, weighted_sum
from goldsmith import assay

X = {"x": torch.randn(3, 4), "w": torch.randn(4), "eps": 1e-6}


def golden(x, w):
    return (x * w).sum(-1)


def declare(**changes):
    return assay.Target(**{"candidate": golden, "golden": golden, "cases": dict(X), **changes})


# binding


class Module(torch.nn.Module):
    def forward(self, w, x):
        return (x * w).sum(-1)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, x):
        ctx.save_for_backward(w, x)
        return (x * w).sum(-1)

    @staticmethod
    def backward(ctx, g):
        w, x = ctx.saved_tensors
        return (g[:, None] * x).sum(0), g[:, None] * w


def keywords(*, w, x):
    return (x * w).sum(-1)


def everything(**named):
    return (named["x"] * named["w"]).sum(-1)


def positional(x, w, /, eps):
    return (x * w).sum(-1)


def default(x, w, missing=3):
    return (x * w).sum(-1)


def unreadable(*values):
    x, w, _ = values
    return (x * w).sum(-1)


CALLABLES = (
    Module(), Function, Function.apply, keywords, everything, positional, default, unreadable,
    functools.partial(positional, eps=0.0), lambda w, x: (x * w).sum(-1),
)  # fmt: skip


@pytest.mark.parametrize("candidate", CALLABLES, ids=lambda c: getattr(c, "__qualname__", type(c).__name__))
def test_callables_are_bound_by_parameter_name(candidate):
    report = assay.check(declare(candidate=candidate), probes="values")
    assert {r.tensor for r in report.rows} == {"y", "x.grad", "w.grad"}


def test_a_parameter_without_a_value_is_an_error_that_lists_the_names():
    with pytest.raises(assay.TargetError) as error:
        declare(candidate=lambda x, weight: x)
    assert str(error.value) == "candidate: <lambda> takes 'weight', which is not supplied; there are: x, w, eps"
    with pytest.raises(
        assay.TargetError, match=r"^golden: wrong takes 'z', which is not supplied; there are: x, w, eps$"
    ):

        def wrong(z):
            return z

        declare(golden=wrong)


def test_a_positional_callable_gets_inputs_and_scalars_in_the_order_of_the_case():
    def product(*arguments):
        x, eps, w = arguments
        return x * w + eps

    cases = {"x": torch.randn(3), "eps": 0.5, "w": torch.randn(3)}
    for kernel, golden in ((product, lambda x, eps, w: x * w + eps), (lambda x, w, eps: x * w + eps, product)):
        assert assay.check(assay.Target(kernel, golden, cases=cases), raises=False).ok


def test_a_name_after_a_gap_in_positions_is_an_error():
    def gap(x, other=1, w=None, /):
        return x

    with pytest.raises(assay.TargetError, match="takes 'w' by position after 'other', which is not supplied"):
        declare(candidate=gap)


# validation on construction

ERRORS = [
    ({"candidate": 3}, TypeError, "candidate: expected a callable, got int 3"),
    ({"golden": None}, ValueError, "golden: missing; give it second: a function in plain torch"),
    ({"golden": "x * w"}, TypeError, "golden: expected a callable, got str 'x * w'"),
    (
        {"cases": None},
        ValueError,
        "cases: missing; give the inputs to try: a function decorated with @assay.case",
    ),
    ({"tolerance": 1e-3}, ValueError, "tolerance: there is no tolerance to choose, because the assay computes a bound"),
    ({"rtol": 1e-3}, ValueError, "rtol: there is no tolerance to choose"),
    (
        {"output": "y"},
        ValueError,
        "output: Target has no such argument; did you mean 'outputs'? Its arguments are: ",
    ),
    ({"backward": "none"}, TypeError, "backward: expected 'auto', None or a callable, got str 'none'"),
    ({"golden_backward": 1}, TypeError, "golden_backward: expected a callable, got int 1"),
    ({"reset": 1}, TypeError, "reset: expected a callable, got int 1"),
    ({"cases": 5}, TypeError, "cases: expected @assay.case functions, a list of them or a dict of tensors, got int"),
    (
        {"cases": lambda make: {}},
        TypeError,
        "cases: expected @assay.case functions, a list of them or a dict of tensors, got function; put @assay.case",
    ),
    ({"cases": []}, ValueError, "cases: the list is empty; pass at least one case"),
    (
        {"cases": [rows, rows]},
        ValueError,
        "cases: 'rows[T=12,D=40]' occurs more than once; every case needs its own name",
    ),
    (
        {"cases": {"x": [torch.ones(1)]}},
        ValueError,
        "case given: 'x' holds several tensors; give each its own name",
    ),
    ({"cases": {"x y": torch.ones(1)}}, ValueError, "case given: 'x y' is not a valid parameter name"),
    ({"name": 3}, TypeError, "name: expected a name, got 3"),
    ({"outputs": "y"}, TypeError, "outputs: expected a tuple of names, got 'y'"),
    ({"outputs": ()}, ValueError, "outputs: () is empty; leave it out, or name the results of the candidate"),
    ({"outputs": ("y", "y")}, ValueError, "outputs: 'y' occurs more than once in ['y', 'y']"),
    ({"outputs": ("y",), "saved": ("h",)}, ValueError, "saved: 'h' is not among the outputs; there are: y"),
    ({"grads": ("z",)}, ValueError, "grads: 'z' is not among the floating-point inputs; there are: x, w"),
    ({"mutates": ("eps",)}, ValueError, "mutates: 'eps' is not among the inputs; there are: x, w"),
    ({"layouts": "dense"}, ValueError, "layouts: 'dense' is not valid; there are: any, contiguous"),
    ({"dot": "fp8"}, ValueError, "dot: 'fp8' is not valid; there are: ieee, tf32"),
    ({"dtypes": ()}, TypeError, "dtypes: expected a tuple of torch dtypes, got ()"),
    ({"dtypes": (torch.int8,)}, ValueError, "dtypes: torch.int8 cannot be judged; use one of: torch.bfloat16, "),
    ({"dtypes": (torch.float32, torch.float32)}, ValueError, "dtypes: torch.float32 occurs more than once"),
    (
        {"compute": torch.int8},
        ValueError,
        "compute: torch.int8 is not a compute precision; use one of: torch.bfloat16, ",
    ),
    ({"decisions": ("i",)}, TypeError, "decisions: expected a dict, got tuple"),
    ({"decisions": {"i": "topk"}}, TypeError, "decisions: 'i' must be assay.topk, argmax, sign or given, got 'topk'"),
    (
        {"decisions": {"i": assay.topk(scores="x", k="n")}},
        ValueError,
        "decisions['i']: 'n' is not among the scalars; there are: eps",
    ),
    ({"segments": [1]}, TypeError, "segments: expected a dict by tensor name, got list"),
    ({"segments": {"y": 3}}, TypeError, "segments['y']: expected a dict or a function of the sizes, got int"),
    (
        {"segments": {"y": {"a": (-2, 1)}}},
        ValueError,
        "segments['y']: 'a' must be (lo, hi) or (axis, lo, hi) with 0 <= lo <= hi, got (-2, 1)",
    ),
    (
        {"cases": {"x": torch.eye(3).to_sparse()}},
        ValueError,
        "case given: 'x' is a tensor of kind sparse_coo, which cannot be judged; ",
    ),
    ({"cases": {"x": torch.eye(3) * 1j}}, ValueError, "case given: 'x' is complex, which cannot be judged; pass its "),
    ({"cases": {"x": torch.eye(3).numpy()}}, ValueError, "case given: 'x' is a numpy array; pass a tensor, torch.from"),
    (
        {"segments": {"y": {"a": (4, 1)}}},
        ValueError,
        "segments['y']: 'a' must be (lo, hi) or (axis, lo, hi) with 0 <= lo <= hi, got (4, 1)",
    ),
]


@pytest.mark.parametrize("changes, kind, text", ERRORS, ids=[next(iter(e[0])) + str(i) for i, e in enumerate(ERRORS)])
def test_a_mistake_in_the_declaration_names_the_argument(changes, kind, text):
    with pytest.raises(kind) as error:
        declare(**changes)
    assert str(error.value).startswith(text)
    assert isinstance(error.value, assay.TargetError)


def test_decisions_name_their_scores():
    with pytest.raises(TypeError, match="^topk: scores must be the name of an input, output or stage, got Tensor$"):
        assay.topk(scores=torch.ones(1), k=2)
    with pytest.raises(assay.TargetError, match="^given: rate must lie between 0 and 1, got 2$"):
        assay.given(rate=2)


def test_nothing_runs_before_the_declaration_is_valid():
    def never(x, w):
        raise AssertionError("ran")

    with pytest.raises(assay.TargetError):
        declare(candidate=never, golden=never, grads=("nosuch",))
    declare(candidate=never, golden=never)  # binding reads signatures; it does not call


def test_a_target_is_frozen_and_has_a_short_repr():
    one = declare(name="sum")
    with pytest.raises(AttributeError):
        one.name = "other"
    assert repr(one) == "Target(sum, 1 cases)" and [c.name for c in one.cases] == ["given"]
    assert declare(candidate=Function.apply).name == "Function"


def test_a_target_without_a_name_is_named_after_the_source_of_its_candidate():
    anonymous, part = declare(candidate=lambda x, w: golden(x, w)), declare(candidate=functools.partial(golden))
    where = f"{__name__}:test_a_target_without_a_name_is_named_after_the_source_of_its_candidate.<locals>.<lambda>"
    assert (anonymous.name, part.name) == (where, f"{__name__}:golden") and anonymous.nameless and part.nameless
    assert not declare().nameless and not declare(candidate=lambda x, w: x, name="sum").nameless


# check's own arguments


def test_check_names_its_wrong_argument():
    one = declare()
    with pytest.raises(TypeError, match="^check: expected an assay.Target, got function$"):
        assay.check(golden)
    with pytest.raises(TypeError, match="^dtype: expected a torch dtype or None, got 'float32'$"):
        assay.check(one, dtype="float32")
    with pytest.raises(assay.TargetError, match="^case: golden has no case 'other'; there are: given$"):
        assay.check(one, "other")
    with pytest.raises(
        assay.TargetError, match="^probes: 'tain' is neither a level nor a probe; there are: default, all, "
    ):
        assay.check(one, probes=["values", "tain"])
    with pytest.raises(assay.TargetError, match="^budget_s: expected a positive number of seconds or None, got 0$"):
        assay.check(one, budget_s=0)


# errors that only a run can reveal


def test_results_that_do_not_fit_the_declaration_are_errors_of_the_declaration():
    with pytest.raises(assay.TargetError, match="^outputs: the candidate returned 1 result, but .* declares 2: y, z$"):
        assay.check(declare(outputs=("y", "z")))
    with pytest.raises(assay.TargetError, match="^outputs: the candidate's 'y' is of type str, not a tensor"):
        assay.check(declare(candidate=lambda x, w: "three"))
    with pytest.raises(
        assay.TargetError, match="^outputs: the candidate returns 'z', but the golden has no output or stage"
    ):
        assay.check(declare(candidate=lambda x, w: {"z": golden(x, w)}, golden=lambda x, w: {"y": golden(x, w)}))
    with pytest.raises(assay.TargetError, match="^backward: returned 1 gradients, expected 2: x, w$"):
        assay.check(declare(backward=lambda x, w, grad_y: (x,), outputs=("y",)))
    with pytest.raises(assay.TargetError, match="^backward: returned a gradient for 'eps', expected .* for: x, w$"):
        assay.check(declare(backward=lambda x, w, grad_y: {"eps": x}, outputs=("y",)))
    with pytest.raises(assay.TargetError, match="^case broken: could not be drawn: ZeroDivisionError: "):

        @assay.case()
        def broken(make):
            return {"x": make.normal(1 // 0)}

        declare(cases=broken)


# outputs, saved results, backwards


def test_names_of_outputs_come_from_the_tuple_the_dict_or_the_declaration():
    def names(result, **more):
        report = assay.check(declare(candidate=result, golden=result, backward=None, **more), probes="values")
        return [r.tensor for r in report.rows]

    assert names(lambda x: x * 2) == ["y"]
    assert names(lambda x: (x * 2, x * 3)) == ["y0", "y1"]
    assert names(lambda x: {"a": x * 2, "b": x * 3}) == ["a", "b"]
    assert names(lambda x: (x * 2, x * 3), outputs=("a", "b")) == ["a", "b"]


def test_a_saved_result_is_compared_with_the_goldens_stage_and_gets_no_gradient():
    def kernel(x, w):
        scaled = x * w
        return scaled.sum(-1), scaled.detach() * factor

    def one():
        return target(kernel, outputs=("y", "scaled"), saved=("scaled",))

    factor = 1.0
    report = assay.check(one(), probes="quick")
    assert {r.tensor: r.kind for r in report.rows}["saved.scaled"] == "saved"
    factor = 2.0
    report = assay.check(one(), probes="values", raises=False)
    assert [f.tensor for f in report.findings] == ["saved.scaled"]


def test_the_golden_backward_may_return_a_dict_or_a_tuple_in_the_order_of_grads():
    def swapped(x, w, grad_y):
        return sum_gradients(x, w, grad_y)[::-1]

    def named(x, w, grad_y):
        return dict(zip(("x", "w"), sum_gradients(x, w, grad_y), strict=True))

    for backward, more in ((named, {}), (swapped, {"grads": ("w", "x")})):
        report = assay.check(target(plain_sum, backward=backward, outputs=("y",), **more), probes="quick")
        assert {r.tensor for r in report.rows} >= {"y", "x.grad", "w.grad"}


def test_a_missing_gradient_is_a_failure():
    report = assay.check(
        target(plain_sum, backward=lambda x, w, grad_y: {"x": grad_y[:, None] * w}, outputs=("y",)),
        probes="values",
        raises=False,
    )
    assert texts(report) == ["w.grad: no tensor came, expected shape [40]"]


def test_an_own_golden_backward_may_name_the_same_stages_as_a_candidate():
    def backward(x, w, grad_y, factor=1.0):
        spread = assay.stage("spread", grad_y[:, None] * factor * torch.ones_like(x))
        return {"x": spread * w / factor, "w": (spread * x).sum(0) / factor}

    def both(kernel_backward):
        return target(plain_sum, backward=kernel_backward, golden_backward=backward, outputs=("y",))

    report = assay.check(both(backward), probes="quick")
    assert {r.tensor: r.kind for r in report.rows}["spread"] == "stage" and not report.notes
    report = assay.check(both(lambda x, w, grad_y: backward(x, w, grad_y, 2.0)), probes="quick")
    assert [(n.id, n.tensor) for n in report.notes] == [("stage_differs", "spread")]


def test_scalars_reach_the_kernel_unchanged_and_integers_get_no_gradient():
    def gather(x, index, shift):
        return x[index] * shift

    cases = {"x": torch.randn(5, 3), "index": torch.tensor([4, 0, 0]), "shift": 2.5}
    report = assay.check(assay.Target(gather, gather, cases=cases), probes="quick")
    assert {r.tensor for r in report.rows} == {"y", "x.grad"}


def test_segments_may_depend_on_the_sizes_and_locate_wrong_elements():
    def wrong(x, w):
        return torch.cat([(x * w)[:, :30], 2 * (x * w)[:, 30:]], 1)

    for segments in (
        {"head": (0, 30), "tail": (30, 40)},
        lambda D: {"head": (1, 0, 30), "tail": (30, D)},
        lambda sizes: {"tail": (30, sizes["D"])},
    ):
        report = assay.check(target(wrong, lambda x, w: x * w, segments={"y": segments}), probes="values", raises=False)
        located = next(f.location for f in report.findings if f.tensor == "y")
        assert located.segments == ("tail",) and located.axes == {"D": [(30, 39)]}


def test_a_stage_of_the_golden_is_not_an_output_of_the_candidate():
    report = assay.check(target(plain_sum, weighted_sum), probes="values")
    assert [r.tensor for r in report.rows] == ["y", "x.grad", "w.grad"]


NUMBERS = "^outputs: the {} returned a list of 3 numbers; return them as one tensor$"
ONE = {"candidate": lambda x, w: x, "golden": lambda x, w: x}
RESULTS = [
    ({"candidate": lambda x, w: [1.0, 2.0, 3.0]}, NUMBERS.format("candidate")),
    ({"candidate": lambda x, w: [1.0, 2.0, 3.0], "outputs": ("y",)}, NUMBERS.format("candidate")),
    ({"golden": lambda x, w: [1.0, 2.0, 3.0]}, NUMBERS.format("golden")),
    ({"golden": lambda x, w: None}, "^golden: returned None; it must return a tensor, or a tuple or dict of tensors$"),
    ({"golden": lambda x, w: ()}, "^outputs: the golden returned 0 results, but the candidate returned 1: y$"),
    (
        {"candidate": lambda x, w: (x, x)},
        "^outputs: the golden returned 1 result, but the candidate returned 2: y0, y1$",
    ),
    ({"golden": lambda x, w: x.numpy()}, "^outputs: the golden's 'y' is of type ndarray, not a tensor or number$"),
]


@pytest.mark.parametrize("changes, text", RESULTS, ids=[str(i) for i in range(len(RESULTS))])
def test_wrong_return_types_are_errors_of_the_declaration(changes, text):
    with pytest.raises(assay.TargetError, match=text):
        assay.check(declare(**{**ONE, **changes}, backward=None))


def test_a_missing_result_is_named_by_its_position():
    both = declare(candidate=lambda x, w: (x, None), golden=lambda x, w: (x, x * 2))
    report = assay.check(both, raises=False)
    assert [f.text for f in report.findings if f.probe == "values"] == ["y1: no tensor came, expected shape [3, 4]"]


def test_a_golden_that_returns_a_number_leaves_it_unproven():
    number = declare(candidate=lambda x, w: (x * w).sum(), golden=lambda x, w: float((x * w).sum()), backward=None)
    report = assay.check(number)
    assert {n.id for n in report.notes} == {"not_proven"}
