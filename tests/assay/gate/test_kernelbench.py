"""Problems in KernelBench's format, which these tests write."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate import candidate_call
from goldsmith.assay.gate.bad_problem import BadProblem
from goldsmith.assay.gate.formats.problem_source import load_problem

LINEAR = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.linear = nn.Linear(width, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("offsets", torch.arange(6.0))
        self.scale = scale

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)) * self.scale + self.offsets)

rows, width = 3, 5

def get_inputs():
    return [torch.rand(rows, width)]

def get_init_inputs():
    return [width, 0.5]
"""


def written(folder, text, name="problem.py"):
    path = folder / name
    path.write_text(text)
    return path


def verdict_in_process(problem, source, folder, monkeypatch):
    monkeypatch.chdir(folder)
    parts = candidate_call.load(source, construct=problem.construct)
    return assay.check(problem.target(parts.candidate), probes="quick", raises=False).verdict


@pytest.fixture
def linear(tmp_path):
    return load_problem(written(tmp_path, LINEAR))


def test_weights_are_inputs_by_name(linear):
    drawn = linear.declared.case("declared").build()
    assert list(drawn) == ["x", "linear_weight", "linear_bias", "norm_weight", "norm_bias"]
    assert drawn["x"].shape == (3, 5) and (drawn["x"] >= 0).all()
    assert (drawn["norm_weight"] == 1).all()


def test_the_second_case_leaves_no_weight_at_its_initial_value_and_has_signs(linear):
    drawn = linear.declared.case("normal").build()
    assert (drawn["x"] < 0).any()
    assert len(drawn["norm_weight"].unique()) == 6 and (drawn["norm_bias"] != 0).all()


NEW = LINEAR.replace("class Model(", "class ModelNew(")


@pytest.mark.parametrize(
    "old, new, verdict",
    [
        ("", "", "pass"),
        ("self.linear", "self.projection", "pass"),  # other names, equal values of equal seeds
        ("torch.relu(", "(torch.relu if self.training else torch.neg)(", "fail"),
        # assumes that a norm's weights are 1 and 0
        ("self.norm(self.linear(x))", "torch.nn.functional.layer_norm(self.linear(x), (6,))", "fail"),
        ("torch.relu(", "(", "fail"),
        ("+ self.offsets", "+ 0.999 * self.offsets", "fail"),
    ],
)
def test_a_candidate_gets_the_weights_of_the_case(linear, tmp_path, monkeypatch, old, new, verdict):
    source = NEW.replace(old, new) if old else NEW
    assert source != NEW or not old
    assert verdict_in_process(linear, source, tmp_path, monkeypatch) == verdict


STATISTICS = LINEAR.replace("LayerNorm(6)", "BatchNorm1d(6)").replace(
    "self.scale = scale", "self.scale = scale; self.eval()"
)


def test_statistics_that_no_call_updates_are_not_left_at_0_and_1(tmp_path, monkeypatch):
    problem = load_problem(written(tmp_path, STATISTICS))
    drawn = problem.declared.case("normal").build()
    assert (drawn["norm_running_var"] > 0).all() and (drawn["norm_running_mean"] != 0).all()
    without = "self.linear(x) * self.norm.weight * (1 + self.norm.eps) ** -0.5 + self.norm.bias"
    for code, verdict in (("self.norm(self.linear(x))", "pass"), (f"({without})", "fail")):
        source = STATISTICS.replace("class Model(", "class ModelNew(").replace("self.norm(self.linear(x))", code)
        assert verdict_in_process(problem, source, tmp_path, monkeypatch) == verdict
    updated = load_problem(written(tmp_path, STATISTICS.replace("; self.eval()", ""), "updated.py"))
    assert "norm_running_mean" not in updated.declared.case("normal").build()


def test_inputs_that_need_their_own_values_are_kept(tmp_path):
    path = written(tmp_path, LINEAR.replace("torch.relu(", "torch.relu(torch.log(x).sum() + "))
    assert (load_problem(path).declared.case("normal").build()["x"] >= 0).all()


def test_a_forward_only_candidate_is_judged_without_its_backward(linear):
    source = NEW.replace("+ self.offsets)", "+ self.offsets).detach()")
    assert gate.judge(gate.Candidate("forward", source), linear, seed=1, probes="quick").status == "accepted"


def test_a_candidate_with_a_backward_is_judged_by_it(linear):
    more = "x = self.linear(x)\n        x = x + 0.01 * (x - x.detach())\n        return torch.relu(self.norm(x)"
    source = NEW.replace("return torch.relu(self.norm(self.linear(x))", more)
    verdict = gate.judge(gate.Candidate("backward", source), linear, seed=1, probes="quick")
    assert verdict.status == "wrong" and "linear_weight.grad" in " ".join(verdict.evidence)


def test_a_model_that_detaches_is_judged_by_its_forward_alone(tmp_path):
    path = written(tmp_path, LINEAR.replace("self.linear(x))", "self.linear(x).detach())"))
    assert load_problem(path).backward is None


def test_sizes_that_are_too_large_are_halved_together_where_they_must_be_equal(tmp_path):
    text = LINEAR.replace("rows, width = 3, 5", "rows = 4096\nwidth = 4096 * 2\nsquare = 4096 * 2").replace(
        "torch.rand(rows, width)", "torch.rand(rows, width) @ torch.rand(square, width)"
    )
    problem = load_problem(written(tmp_path, text))
    sizes = problem.cases[0].sizes
    assert sizes["width"] == sizes["square"] <= 32 and "too large" in problem.cases[0].why
    declared = load_problem(written(tmp_path, LINEAR.replace("3, 5", "300, 5")), sizes="declared", elements=4)
    assert declared.cases[0].build()["x"].shape == (300, 5)


@pytest.mark.parametrize(
    "old, new, text",
    [
        ("return [torch.rand(rows, width)]", "return torch.rand(rows, width)", "get_inputs returns a Tensor"),
        ("return [torch.rand(rows, width)]", "return [1 / 0]", "get_inputs raised ZeroDivisionError"),
        ("return [width, 0.5]", "return [width]", r"Model\(...\) raised TypeError"),
        ("import torch.nn as nn", "import torch.nn as nn, not_there", "needs the package not_there"),
        ("rows, width =", "rows, width ==", "does not parse: line 18|raised NameError"),
    ],
)
def test_a_broken_problem_says_what_is_wrong(tmp_path, old, new, text):
    with pytest.raises(BadProblem, match=text):
        load_problem(written(tmp_path, LINEAR.replace(old, new)))


def test_a_file_may_end_its_process_or_ask_for_a_kernel(tmp_path):
    (tmp_path / "exits.py").write_text("import tabnanny\nraise SystemExit(3)")
    (tmp_path / "tabnanny.py").write_text("raise SystemExit('a candidate with the name of one of Python's modules')")
    with pytest.raises(gate.BadProblem, match="exits.py: importing it raised SystemExit: 3"):
        gate.load_problem(tmp_path / "exits.py")
    (tmp_path / "asks.py").write_text(f"{LINEAR}\nwants_kernel = True\n")
    assert gate.load_problem(tmp_path / "asks.py").wants_kernel


def test_dtypes_can_be_chosen(tmp_path):
    problem = load_problem(written(tmp_path, LINEAR), dtypes=(torch.bfloat16,))
    assert problem.cases[0].build(torch.bfloat16)["linear_weight"].dtype == torch.bfloat16
