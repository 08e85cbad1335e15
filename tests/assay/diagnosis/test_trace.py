"""The candidate's own trace: the line that goes wrong first is named by numbers alone, without stages."""

import pytest
import torch

from assay.diagnosis.written_modules import load
from goldsmith import assay
from goldsmith.assay import probes
from goldsmith.assay.checks import examine
from goldsmith.assay.diagnosis.trace.line_search import NoLine, traced_line
from goldsmith.assay.diagnosis.trace.lookup import GoldenValue, Lookup

TORCH = """
import torch

from goldsmith import assay


def forward(x, w, eps):
    square = x.pow(2).sum(-1, keepdim=True)
    rstd = (square / x.shape[-1] + eps).rsqrt()
    return x * rstd * w


def golden(x, w, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w


@assay.case(T=[5], D=[6])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 0.25}


target = assay.Target(forward, golden, cases=tokens, name="norm")
"""

TRITON = """
import torch
import triton
import triton.language as tl

from goldsmith import assay


@triton.jit
def _kernel(x_ptr, w_ptr, y_ptr, D, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < D
    x = tl.load(x_ptr + row * D + d, mask=inside, other=0.0)
    total = tl.sum(x * x, axis=0)
    root = tl.sqrt(total / D)
    w = tl.load(w_ptr + d, mask=inside, other=0.0)
    tl.store(y_ptr + row * D + d, x / root * w, mask=inside)


def forward(x, w):
    y = torch.empty_like(x)
    _kernel[(x.shape[0],)](x, w, y, x.shape[1], BLOCK=8)
    return y


def golden(x, w):
    return x / x.square().mean(-1, keepdim=True).sqrt() * w


@assay.case(T=[5], D=[6])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


target = assay.Target(forward, golden, cases=tokens, name="norm", backward=None)
"""


def _traced(target):
    report, failing = examine(
        target, list(target.cases), torch.float32, "cpu", 0, frozenset(probes.QUICK), None, until_failing=True
    )
    assert report.verdict == "fail"
    return traced_line(target, failing[0], 30.0)


@pytest.fixture(autouse=True)
def _imported_from(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    "right, wrong, operation",
    [
        pytest.param("square / x.shape[-1]", "square / x.shape[0]", "div", marks=pytest.mark.sweep(4, part=0)),
        pytest.param("x.pow(2)", "x.pow(3)", "pow", marks=pytest.mark.sweep(4, part=1)),
        pytest.param("x * rstd * w", "x * rstd + w", "add", marks=pytest.mark.sweep(4, part=2)),
        pytest.param("+ eps", "- eps", "sub", marks=pytest.mark.sweep(4, part=3)),
    ],
)
def test_the_line_that_goes_wrong_first_is_named(tmp_path, right, wrong, operation):
    line = _traced(load(tmp_path, TORCH.replace(right, wrong, 1)).target)
    assert wrong in line.expression
    assert line.operation == operation
    assert line.at.function == "forward"


def test_another_result_of_the_line_makes_every_result_right(tmp_path):
    line = _traced(load(tmp_path, TORCH.replace("+ eps", "- eps", 1)).target)
    assert line.border == line.at.line
    assert "every result is right" in line.sentences[-1]


@pytest.mark.parametrize(
    "right, wrong", [("tl.sum(x * x, axis=0)", "tl.sum(x * x * x, axis=0)"), ("x / root * w", "x * root * w"),
                     ("tl.sqrt(total / D)", "tl.sqrt(total / BLOCK)"),
                     ("tl.sum(x * x, axis=0)", "tl.max(tl.cumsum(x * x, 0, reverse=True) / 2, 0)")],
)  # fmt: skip
def test_a_line_of_an_interpreted_kernel_is_named(tmp_path, right, wrong):
    pytest.importorskip("triton")
    line = _traced(load(tmp_path, TRITON.replace(right, wrong, 1)).target)
    assert wrong in line.expression
    assert line.at.function == "_kernel"
    assert (line.at.file, line.at.line) in line.region
    assert not set(line.beside) & set(line.region)
    assert line.beside or "sum" in wrong  # what comes before the first line is not judged


def test_the_line_is_shown_and_is_data(tmp_path):
    diagnosis = assay.diagnose(load(tmp_path, TORCH.replace("+ eps", "- eps", 1)).target)
    assert diagnosis.line is not None
    shown = " ".join(str(diagnosis).split())
    assert f"Line {diagnosis.line.place}, in forward: rstd = (square / x.shape[-1] - eps).rsqrt()" in shown
    data = diagnosis.to_json()["line"]
    assert (data["line"], data["function"]) == (diagnosis.line.at.line, "forward")
    diagnosis.to_html(tmp_path / "page.html")
    assert "<h2>Line</h2>" in (tmp_path / "page.html").read_text()


def test_a_candidate_without_a_file_has_no_line():
    def forward(x):
        return x.sin() * 2

    case = assay.Case("few", lambda make: {"x": make.normal(4)})
    target = assay.Target(forward, torch.sin, cases=[case], name="sine")
    _, failing = examine(target, [case], torch.float32, "cpu", 0, frozenset(probes.QUICK), None, until_failing=True)
    with pytest.raises(NoLine):
        traced_line(target, failing[0])


GOLDEN = torch.randn(64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize(
    "numbers, name",
    [(GOLDEN[8:24].flip(0), "h"), (-GOLDEN, "h"), (GOLDEN.float().double(), "h"), (GOLDEN * 1.01, None),
     (torch.zeros(16, dtype=torch.float64), None), (torch.arange(16, dtype=torch.float64), None)],
    ids=["a_slice", "negated", "rounded", "other_numbers", "zeros", "small_integers"],
)  # fmt: skip
def test_numbers_are_found_up_to_order_tiling_and_sign(numbers, name):
    match = Lookup([GoldenValue("h", GOLDEN, 0), GoldenValue("grid", torch.arange(32.0).double(), 0)]).find(
        numbers, 2.0**-23
    )
    assert (match and match.name) == name


def test_numbers_that_any_other_number_would_match_are_not_evidence():
    crowded = torch.linspace(-3, 3, 60_000, dtype=torch.float64)
    assert Lookup([GoldenValue("h", crowded, 0)]).find(GOLDEN[:16], 2.0**-10) is None
