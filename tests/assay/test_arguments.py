"""Arguments of `check` and `diagnose`: an error names the argument, its value and what is valid."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import ranks

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def golden(x, w):
    return (x * w).sum(-1)


def target(**changes):
    cases = {"x": X, "w": X[0]}
    return assay.Target(**{"candidate": golden, "golden": golden, "cases": cases, **changes})


UNJUDGEABLE = (
    "^dtype: torch.{} cannot be judged; use one of: torch.bfloat16, torch.float16, torch.float32, torch.float64$"
)
LITERAL = (
    r"^dtype: case given is a dict of tensors, which keep their own dtype \(float32\), and cannot be run in bfloat16; "
)
ARGUMENTS = [
    ({"dtype": torch.int32}, assay.TargetError, UNJUDGEABLE.format("int32")),
    ({"dtype": torch.float8_e4m3fn}, assay.TargetError, UNJUDGEABLE.format("float8_e4m3fn")),
    ({"dtype": torch.bfloat16}, assay.TargetError, LITERAL),
    (
        {"device": "gpu"},
        assay.TargetError,
        "^device: candidates cannot run on 'gpu'; use cpu, cuda or cuda:1$",
    ),
    ({"device": "meta"}, assay.TargetError, "^device: candidates cannot run on 'meta'; use "),
    ({"device": 0}, TypeError, "^device: expected cpu, cuda or cuda:1, got 0$"),
    ({"seed": 1.5}, TypeError, "^seed: expected a whole number, got 1.5$"),
    ({"seed": 2**70}, assay.TargetError, "^seed: expected a number of at most 62 bits, got "),
    ({"budget_s": "1"}, TypeError, "^budget_s: expected a positive number of seconds or None, got '1'$"),
    (
        {"budget_s": float("nan")},
        assay.TargetError,
        "^budget_s: expected a positive number of seconds or None, got nan$",
    ),
    ({"case": {"x": torch.ones(2)}}, TypeError, "^case: expected a Case, its name or None for all, got dict$"),
    (
        {"probes": 3},
        TypeError,
        "^probes: expected the name of a level, or a list of names of levels and probes, got 3$",
    ),
]


@pytest.mark.parametrize("function", [assay.check, assay.diagnose])
@pytest.mark.parametrize(
    "changes, kind, text", ARGUMENTS, ids=[next(iter(a[0])) + str(i) for i, a in enumerate(ARGUMENTS)]
)
def test_a_wrong_argument_is_named_with_its_value_and_what_is_valid(function, changes, kind, text):
    with pytest.raises(kind, match=text):
        function(target(), **changes)


def test_an_unwritable_folder_is_refused_before_the_diagnosis(tmp_path):
    runs = []
    one = target(candidate=lambda x, w: runs.append(1) or golden(x, w) * 2, outputs=("y",))
    (tmp_path / "file").write_text("here")
    for out, kind, text in (
        (3, TypeError, "^out: expected a folder's path or None, got 3$"),
        ("", assay.TargetError, "^out: expected a folder's path or None, got ''$"),
        (tmp_path / "file", assay.TargetError, "^out: '.*file' cannot be written: it is not a folder$"),
        (tmp_path / "file" / "in", assay.TargetError, "^out: '.*in' cannot be written: Not a direc"),
    ):
        with pytest.raises(kind, match=text):
            assay.diagnose(one, out=out)
    assert not runs
    assert assay.diagnose(target(), out=tmp_path / "new" / "kept").ok and not (tmp_path / "new").exists()
    assert assay.diagnose(one, out=tmp_path / "new" / "kept", probes="quick").bundle.is_dir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_missing_cuda_device_is_an_error():
    text = "^device: cuda: this machine has no CUDA device that torch can use; use device='cpu'$"
    with pytest.raises(assay.TargetError, match=text):
        assay.check(target(), device="cuda")


def test_a_literal_case_is_run_and_reported_in_its_own_dtype():
    report = assay.check(target(dtypes=(torch.bfloat16, torch.float32)), probes="values")
    assert report.dtypes == ["float32"] and report.cases == ["given"]


def test_a_check_inside_a_transform_is_refused():
    one, text = target(), "called inside a torch.func transform"
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(assay.TargetError, match=f"^check: {text}"):
            transform(lambda x: (assay.check(one), x.sum())[1])(torch.ones(3))
        with pytest.raises(assay.TargetError, match=f"^Target: {text}"):
            transform(lambda x: (target(), x.sum())[1])(torch.ones(3))
    by_rows = target(candidate=lambda x, w: torch.func.vmap(lambda row: (row * w).sum())(x))
    assert assay.check(by_rows).ok, "a candidate may use them"


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_gradients_are_judged_whatever_mode_the_caller_is_in(outside):
    wrong = target(
        backward=lambda x, w, grad_y: (grad_y[:, None] * w, (grad_y[:, None] * x).sum(0) * 2), outputs=("y",)
    )
    with outside():
        assert {r.tensor for r in assay.check(target(), probes="values").rows} == {"y", "x.grad", "w.grad"}
        report = assay.check(wrong, probes="values", raises=False)
    assert [f.tensor for f in report.findings] == ["w.grad"]


def test_a_check_under_autocast_is_refused():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(assay.TargetError, match="^check: called under autocast"):
        assay.check(target())


SEGMENTS = [
    ({"y": {"a": (0, 9)}}, r"^segments\['y'\]: 'a' is \[0, 9\) of axis -1, but y has shape \[3\]$"),
    ({"x.grad": {"a": (2, 0, 1)}}, r"^segments\['x.grad'\]: 'a' is \[0, 1\) of axis 2, but x.grad has shape \[3, 4\]$"),
    ({"y": lambda: 1 / 0}, r"^segments\['y'\]: the function raised ZeroDivisionError: "),
]


@pytest.mark.parametrize("segments, text", SEGMENTS, ids=["long", "axis", "raises"])
def test_segments_lie_within_their_tensor(segments, text):
    with pytest.raises(assay.TargetError, match=text):
        assay.check(target(segments=segments))


def test_a_reset_that_raises_and_a_gradient_that_is_a_number_are_mistakes_in_the_declaration():
    with pytest.raises(assay.TargetError, match="^reset: raised ZeroDivisionError: "):
        assay.check(target(reset=lambda: 1 / 0))
    with pytest.raises(assay.TargetError, match="^backward: the gradient of 'x' is of type float, not a tensor$"):
        assay.check(target(backward=lambda x, w, grad_y: (1.0, w), outputs=("y",)))
    with pytest.raises(TypeError, match="^case: expected a function of make and the sizes, got int 3$"):
        assay.case(T=[1])(3)


DECLARED = [
    (lambda: target(cases={}), assay.TargetError, "^cases: the dict is empty; pass the inputs by name"),
    (lambda: assay.load_bundle(3), TypeError, "^path: expected the path of a bundle's folder, got 3$"),
    (lambda: assay.case(T=[1], tags="abc"), TypeError, "^tags: expected a tuple of words, got 'abc'$"),
    (lambda: assay.case(T=[1], tags=(1,)), TypeError, r"^tags: expected a tuple of words, got \(1,\)$"),
    (lambda: assay.case(T=[1], why=3), TypeError, "^why: expected a text, got 3$"),
    (lambda: assay.check(target(), strict="yes"), TypeError, "^strict: expected True or False, got 'yes'$"),
    (
        lambda: assay.storage(3).__enter__(),
        assay.TargetError,
        "^storage: name must be a word .*, got 3$",
    ),
    (lambda: assay.deciding("").__enter__(), assay.TargetError, "^deciding: precision must be a word .*, got ''$"),
]


@pytest.mark.parametrize("call, kind, text", DECLARED, ids=range(len(DECLARED)))
def test_declarations_validate_their_arguments(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize("who", ["candidate", "golden"])
def test_a_stage_without_a_name_is_a_mistake_in_the_declaration(who):
    named = {"candidate": golden, "golden": golden, who: lambda x, w: assay.stage("", golden(x, w))}
    with pytest.raises(assay.TargetError, match=r"^stage\('', \.\.\.\) needs a name for the value$"):
        assay.check(target(**named))


@pytest.mark.parametrize("function", [assay.check, assay.diagnose, ranks.check])
def test_an_unknown_argument_is_explained_and_a_tolerance_too(function):
    with pytest.raises(assay.TargetError, match="^atol: there is no tolerance to choose"):
        function(target(), atol=1e-3)
    with pytest.raises(assay.TargetError, match=f"^sed: {function.__name__} has no such argument; did you mean 'seed'"):
        function(target(), sed=3)


def test_a_value_of_the_wrong_type_is_a_mistake_in_the_declaration():
    with pytest.raises(assay.TargetError, match="got Tensor; name it as the kernel's parameter"):
        assay.Target(lambda x: x, lambda x: x, cases=[torch.ones(3)])
