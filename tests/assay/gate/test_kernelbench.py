"""Problems in KernelBench's format, which these tests write."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate import candidate_call
from goldsmith.assay.gate.bad_problem import BadProblem
from goldsmith.assay.gate.formats.problem_source import load_problem
from goldsmith.assay.gate.weight_matching import Weight, matched

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


def verdict_in_process(problem, source, folder, monkeypatch, probes="quick"):
    monkeypatch.chdir(folder)
    parts = candidate_call.load(source, construct=problem.construct)
    return assay.check(problem.target(parts.candidate), probes=probes, raises=False).verdict


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


def test_weights_keep_the_layout_of_parameters_where_inputs_are_restrided(linear, tmp_path, monkeypatch):
    for names, verdict in (("(self.linear.weight, self.norm.bias)", "pass"), ("(x,)", "fail")):
        own = f"assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in {names})"
        source = NEW.replace("        return torch.relu", f"        {own}\n        return torch.relu")
        assert verdict_in_process(linear, source, tmp_path, monkeypatch, "layouts") == verdict


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
    (tmp_path / "finite.py").write_text(f"{LINEAR}\nfinite = ('x',)\n")
    assert gate.load_problem(tmp_path / "finite.py").finite == ("x",)
    (tmp_path / "asks.py").write_text(f"{LINEAR}\nwants_kernel = True\n")
    assert gate.load_problem(tmp_path / "asks.py").wants_kernel


def test_dtypes_can_be_chosen(tmp_path):
    problem = load_problem(written(tmp_path, LINEAR), dtypes=(torch.bfloat16,))
    assert problem.cases[0].build(torch.bfloat16)["linear_weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=pytest.mark.sweep(2, part=n)) for n, d in enumerate((torch.bfloat16, torch.float16))],
)
def test_a_model_in_16_bits_rounds_between_its_layers(tmp_path, monkeypatch, dtype):
    problem = load_problem(written(tmp_path, LINEAR), dtypes=(dtype,))
    for source, verdict in ((NEW, "pass"), (NEW.replace("* self.scale", "* 1.02 * self.scale"), "fail")):
        assert verdict_in_process(problem, source, tmp_path, monkeypatch, "default") == verdict


FROZEN = STATISTICS.replace("self.eval()", "self.norm.eval()")


@pytest.mark.parametrize("model, training", [(STATISTICS, False), (FROZEN, True)])
def test_a_norm_that_the_constructor_freezes_stays_frozen(tmp_path, monkeypatch, model, training):
    monkeypatch.chdir(tmp_path)
    problem = load_problem(written(tmp_path, model))
    source = model.replace("class Model(", "class ModelNew(")
    assert gate.judge(gate.Candidate("right", source), problem, seed=1, probes="quick").ok
    parts = candidate_call.load(source, construct=problem.construct)
    values = problem.declared.case("normal").build()
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            parts.candidate(**values)
        module = parts.candidate.module
        assert not module.norm.training and module.training == (training and gradients)


class Packed(torch.nn.Module):
    """Weights of `weights`, as authors of kernels store them."""

    def __init__(self, weights):
        super().__init__()
        self.q = torch.nn.Parameter(weights["q"].t().contiguous())  # the model's own name, transposed
        self.columns = torch.nn.Parameter(torch.cat([weights["k"].t(), weights["v"].t()], 1))
        self.register_buffer("rows", torch.cat([weights["k"], weights["tall"]]))
        self.stacked = torch.nn.Parameter(torch.stack([weights["v"], weights["k"]]))
        self.biases = torch.nn.Parameter(torch.cat([weights["b"], weights["c"]]).view(1, -1))
        self.convolution = torch.nn.Parameter(weights["convolution"].permute(2, 3, 1, 0).reshape(-1, 3))
        self.scalar = torch.nn.Parameter(weights["scalar"].view(()))
        self.other = torch.nn.Parameter(torch.full((2, 7), 0.5))


def drawn_weights(zeros):
    shapes = {"q": (4, 4), "k": (4, 4), "v": (4, 4), "tall": (6, 4), "convolution": (3, 2, 2, 3), "scalar": (1,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    biases = {name: torch.zeros(4) if zeros else torch.randn(4) for name in ("b", "c")}
    return {**weights, **biases, "unused": torch.randn(9)}


def test_weights_that_a_candidate_repacks_are_repacked_for_each_case():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = drawn_weights(zeros=True), drawn_weights(zeros=False)
    known = [Weight.of(name, f"case_{name}", t) for name, t in first.items()]
    repackings, remarks = matched(Packed(first), known)
    wanted = Packed(second).state_dict()
    del wanted["other"]
    assert set(repackings) == set(wanted)
    for name, t in wanted.items():
        values = repackings[name].of({f"case_{n}": w for n, w in second.items()})
        assert torch.equal(values, t) and values.is_contiguous(), name
    assert "parameter other [2, 7] is not made of the model's weights" in remarks[1]
    assert "holds the model's unused [9]" in remarks[2]


def test_parts_of_a_weight_are_cut_from_it_for_each_case():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = (({"w": torch.randn(12, 4), "b": torch.randn(12), "one": torch.ones(12)}) for _ in range(2))

    def split(weights):
        module = torch.nn.Module()
        q, k, v = weights["w"].chunk(3)
        shift = torch.cat([weights["b"][8:], weights["b"][:4]])
        wanted = {"q": q, "kv": torch.cat([v.t(), k.t()], 1), "left": weights["w"][:, :2], "shift": shift}
        for name, t in {**wanted, "own": torch.ones(4)}.items():
            module.register_parameter(name, torch.nn.Parameter(t.contiguous()))
        return module

    known = [Weight.of(n, n, t) for n, t in first.items()]
    known += [part for n, t in first.items() for part in Weight.parts_of(n, n, t)]
    repackings, remarks = matched(split(first), known)
    wanted = split(second).state_dict()
    del wanted["own"]  # its ones are no part of the model's
    assert set(repackings) == set(wanted) and len(remarks) == 3
    assert all(torch.equal(repackings[n].of(second), t) for n, t in wanted.items())


def test_a_candidate_may_split_a_weight(linear, tmp_path, monkeypatch):
    own = "self.linear = nn.Linear(width, 6)"
    more = "l = nn.Linear(width, 6); w, b = l.weight.detach().chunk(2), l.bias.detach().chunk(2)"
    more += "; self.w, self.v, self.b, self.c = (nn.Parameter(t.clone()) for t in (*w, *b))"
    right = NEW.replace(own, more).replace(
        "self.linear(x)", "torch.cat([x @ self.w.t() + self.b, x @ self.v.t() + self.c], -1)"
    )
    for source, verdict in ((right, "pass"), (right.replace("+ self.c", "+ self.b"), "fail")):
        assert verdict_in_process(linear, source, tmp_path, monkeypatch) == verdict


def test_a_source_of_the_same_size_and_second_is_no_other_candidate(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.chdir(tmp_path)
    sources = [f"def candidate(x):\n    return x + {number}\n" for number in range(4)]
    assert [candidate_call.load(source).candidate(x=1) for source in sources] == [1, 2, 3, 4]


def test_equal_numbers_serve_once():
    known = [Weight.of("bias", "bias", torch.zeros(4))]
    module = torch.nn.Module()
    module.shift = torch.nn.Parameter(torch.zeros(4))
    module.register_buffer("sums", torch.zeros(4))
    assert set(matched(module, known)[0]) == {"shift"}


def test_a_candidate_whose_parameters_are_repacked_weights_is_accepted(linear):
    own = "self.linear = nn.Linear(width, 6)"
    source = NEW.replace(own, "l = nn.Linear(width, 6); self.w = nn.Parameter(l.weight.detach().t().contiguous())")
    source = source.replace("self.w =", "self.b = nn.Parameter(l.bias.detach()); self.w =")
    source = source.replace("self.linear(x)", "(x @ self.w + self.b)")
    assert gate.judge(gate.Candidate("transposed", source), linear, seed=1, probes="quick").status == "accepted"
    scaled = source.replace(".t().contiguous()", ".t().contiguous() * 2").replace("x @ self.w", "x @ self.w / 2")
    verdict = gate.judge(gate.Candidate("scaled", scaled), linear, seed=1, probes="quick")
    assert (verdict.status, verdict.reason) == ("refused", "unmatched_weights")  # its constructor makes it right
    assert "its parameter w [5, 6] is not made of the model's weights" in verdict.evidence[1]
    assert verdict.evidence[2].endswith("holds the model's linear.weight [6, 5]")


CHOICE = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        values, index = torch.topk(torch.softmax(x, -1), self.k, -1)
        return values, index

def get_inputs():
    return [torch.rand(5, 16)]

def get_init_inputs():
    return [3]
"""
SORT = "values, index = (t[:, : self.k] for t in torch.softmax(x, -1).sort(-1, descending=True))"
LATE = "values, index = torch.softmax(x, -1).sort(-1, descending=True); values, index = values[:, :3], index[:, 1:4]"


@pytest.mark.parametrize("line, status", [(SORT, "accepted"), (LATE, "wrong")])
def test_another_choice_among_ties_is_right_without_a_declaration(line, status, tmp_path):
    problem = load_problem(written(tmp_path, CHOICE))
    source = CHOICE.replace("class Model(", "class ModelNew(")
    source = source.replace("values, index = torch.topk(torch.softmax(x, -1), self.k, -1)", line)
    verdict = gate.judge(gate.Candidate("chooses", source), problem, seed=3)
    assert verdict.status == status, verdict


def test_an_accepted_verdict_tells_that_all_scores_tie(tmp_path):
    text = CHOICE.replace("torch.rand(5, 16)", "torch.ones(5, 16)").replace("torch.softmax(x, -1)", "0 * x")
    problem = load_problem(written(tmp_path, text))
    verdict = gate.judge(gate.Candidate("same", text.replace("class Model(", "class ModelNew(")), problem, seed=3)
    assert verdict.ok and "all scores tie in every row" in verdict.evidence[0], verdict


OWN = """
class ModelNew(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.linear = nn.Linear(width, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("offsets", torch.arange(6.0))
        CHANGE
        self.scale = scale

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)) * self.scale + self.offsets)
"""


@pytest.mark.parametrize(
    "change, status, reason",
    [
        ("self.linear.weight = nn.Parameter(torch.rand(7, 5)[:6] * 2)", "accepted", ""),  # by its name
        ("self.linear = nn.Sequential(nn.Linear(width, 6), nn.Linear(6, 6))", "refused", "unmatched_weights"),
        ("del self.linear; self.linear = lambda x, w=torch.rand(6, 5): x @ w.to(x).T", "wrong", "values"),
    ],
)
def test_a_candidate_that_cannot_take_the_weights_is_refused_and_one_that_ignores_them_is_wrong(
    change, status, reason, linear
):
    source = "import torch\nimport torch.nn as nn\n" + OWN.replace("CHANGE", change)
    verdict = gate.judge(gate.Candidate("own", source), linear, seed=1, probes="quick")
    assert (verdict.status, verdict.reason) == (status, reason), verdict
    assert status != "refused" or "not all weights of the model have a place" in verdict.evidence[0]
