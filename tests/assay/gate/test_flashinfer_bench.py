"""FlashInfer-Bench's Definition, Workload and Solution, which these tests write."""

import json

import pytest
import torch
from safetensors.torch import save_file

from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate.bad_problem import BadProblem
from goldsmith.assay.gate.formats.candidate_source import load_candidates
from goldsmith.assay.gate.formats.problem_source import load_problem

REFERENCE = """
import torch

def run(x, weight, eps):
    rows, width = x.shape
    assert width == 12
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed = (wide * inverse).to(torch.bfloat16)
    out = torch.zeros((rows, width), dtype=torch.bfloat16)
    out[:] = normed * weight
    return out, inverse.squeeze(-1).float()
"""
DEFINITION = {
    "name": "rmsnorm_d12",
    "op_type": "rmsnorm",
    "axes": {"rows": {"type": "var"}, "width": {"type": "const", "value": 12}},
    "inputs": {
        "x": {"shape": ["rows", "width"], "dtype": "bfloat16"},
        "weight": {"shape": ["width"], "dtype": "bfloat16"},
        "eps": {"shape": None, "dtype": "float32"},
    },
    "outputs": {
        "out": {"shape": ["rows", "width"], "dtype": "bfloat16"},
        "inverse": {"shape": ["rows"], "dtype": "float32"},
    },
    "reference": REFERENCE,
}
INPUTS = {"x": {"type": "random"}, "weight": {"type": "random"}, "eps": {"type": "scalar", "value": 1e-5}}
RETURNING = """
import torch

def run(x, weight, eps):
    inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * inverse * weight.float()).to(x.dtype), inverse[:, 0]
"""
FILLING = """
from parts.norm import norm

def run(x, weight, eps, out, inverse):
    out[:], inverse[:] = norm(x, weight, eps)
"""


def workload(rows, inputs=INPUTS):
    return {
        "definition": "rmsnorm_d12",
        "workload": {"uuid": f"{rows:08d}-1", "axes": {"rows": rows}, "inputs": inputs},
    }


@pytest.fixture
def root(tmp_path):
    """A data set with one definition and two workloads."""
    for folder in ("definitions/rmsnorm", "workloads/rmsnorm", "solutions/rmsnorm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "definitions/rmsnorm/rmsnorm_d12.json").write_text(json.dumps(DEFINITION))
    lines = "\n".join(json.dumps(workload(rows)) for rows in (1, 7))
    (tmp_path / "workloads/rmsnorm/rmsnorm_d12.jsonl").write_text(lines)
    return tmp_path


def problem_of(root):
    return load_problem(root / "definitions/rmsnorm/rmsnorm_d12.json")


def solution(sources, *, returns=False, language="triton", **spec):
    return {
        "name": "own",
        "definition": "rmsnorm_d12",
        "author": "somebody",
        "spec": {
            "language": language, "target_hardware": ["cpu"], "entry_point": "main.py::run",
            "destination_passing_style": not returns, **spec,
        },
        "sources": [{"path": path, "content": text} for path, text in sources.items()],
    }  # fmt: skip


def loaded(folder, data):
    (folder / "solution.json").write_text(json.dumps(data))
    return load_candidates([folder / "solution.json"])[0]


def test_workloads_are_cases_and_a_reference_that_casts_is_a_golden(root):
    problem = problem_of(root)
    assert [c.name for c in problem.cases] == ["00000001[rows=1]", "00000007[rows=7]"]
    assert problem.outputs == ("out", "inverse")
    assert dict(problem.stored) == {"rounded_0": "x"}  # `normed`, which candidates may round or not
    values = problem.cases[1].build()
    assert values["x"].dtype == torch.bfloat16 and values["eps"] == 1e-5
    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
    out, _ = problem.golden(**wide)
    assert out.dtype == torch.float64
    report = assay.check(
        problem.target(lambda x, weight, eps: _returning(x, weight, eps)), raises=False, probes="quick"
    )
    assert report.verdict == "pass", report.text()


def _returning(x, weight, eps):
    namespace = {}
    exec(RETURNING, namespace)
    return namespace["run"](x, weight, eps)


@pytest.mark.parametrize("returns", [pytest.param(r, marks=pytest.mark.sweep(2, part=int(r))) for r in (True, False)])
def test_solutions_of_both_styles_are_judged(root, returns):
    sources = {"main.py": RETURNING} if returns else {"main.py": FILLING, "parts/norm.py": RETURNING + "\nnorm = run\n"}
    submission = loaded(root, solution(sources, returns=returns))
    assert submission.problem == "rmsnorm_d12" and submission.candidate.name == "own"
    verdict = gate.judge(submission.candidate, problem_of(root), seed=1, probes="quick")
    assert verdict.status == "accepted", verdict


@pytest.mark.parametrize("returns", [pytest.param(r, marks=pytest.mark.sweep(2, part=1 - r)) for r in (True, False)])
def test_a_function_of_the_other_style_is_refused_by_the_name_of_the_field(root, returns):
    sources = {"main.py": FILLING if returns else RETURNING, "parts/norm.py": f"{RETURNING}\nnorm = run\n"}
    submission = loaded(root, solution(sources, returns=returns))
    verdict = gate.judge(submission.candidate, problem_of(root), seed=1, probes="quick")
    assert (verdict.status, verdict.reason) == ("refused", "passing_style")
    assert f"set it to {'true' if returns else 'false'}" in verdict.evidence[0]


def test_an_output_that_is_not_filled_is_found(root):
    source = FILLING.replace("inverse[:]", "inverse[1:]").replace(
        "norm(x, weight, eps)", "(lambda a, b: (a, b[1:]))(*norm(x, weight, eps))"
    )
    submission = loaded(root, solution({"main.py": source, "parts/norm.py": RETURNING + "\nnorm = run\n"}))
    verdict = gate.judge(submission.candidate, problem_of(root), seed=1, probes="quick")
    assert verdict.status in ("wrong", "cheating") and verdict.finding.tensor == "inverse", verdict


def test_where_all_inputs_are_drawn_odd_sizes_are_added_that_the_constraints_allow(root):
    definition = {**DEFINITION, "inputs": {n: DEFINITION["inputs"][n] for n in ("x", "weight")}}
    definition["reference"] = REFERENCE.replace(", eps)", ")").replace("+ eps", "")
    path = root / "definitions/rmsnorm/rmsnorm_d12.json"
    path.write_text(json.dumps(definition))
    assert [c.sizes["rows"] for c in load_problem(path).cases] == [1, 7, 11]
    path.write_text(json.dumps({**definition, "constraints": ["rows < 10"]}))
    assert [c.sizes["rows"] for c in load_problem(path).cases] == [1, 7]


def test_inputs_come_from_safetensors_below_the_root(root):
    x = torch.arange(24.0).reshape(2, 12).bfloat16()
    save_file({"first": x}, str(root / "x.safetensors"))
    inputs = {**INPUTS, "x": {"type": "safetensors", "path": "x.safetensors", "tensor_key": "first"}}
    (root / "workloads/rmsnorm/rmsnorm_d12.jsonl").write_text(json.dumps(workload(2, inputs)))
    assert torch.equal(problem_of(root).cases[0].build()["x"], x)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"axes": {"rows": {"type": "variable"}}}, "axis 'rows' must be"),
        ({"inputs": {"x": {"shape": ["rows", "depth"], "dtype": "bfloat16"}}}, "axis 'depth' is not among the axes"),
        ({"inputs": {"x": {"shape": ["rows"], "dtype": "float4_e2m1"}}}, "dtype 'float4_e2m1' cannot be judged"),
        ({"reference": "def ran(x): pass"}, "must define a function run"),
        ({"reference": "def run(x, weight, eps): return x @ x"}, "the reference raised RuntimeError"),
    ],
)
def test_a_broken_definition_says_what_is_wrong(root, change, text):
    path = root / "definitions/rmsnorm/rmsnorm_d12.json"
    path.write_text(json.dumps({**DEFINITION, **change}))
    with pytest.raises(BadProblem, match=text):
        load_problem(path)


def test_a_definition_without_workloads_has_no_cases(root):
    (root / "workloads/rmsnorm/rmsnorm_d12.jsonl").unlink()
    with pytest.raises(BadProblem, match="the problem has no cases"):
        problem_of(root)


@pytest.mark.parametrize(
    "data, reason",
    [
        (solution({"other.py": RETURNING}), "bad_solution"),
        (solution({"main.py": RETURNING}, language="fortran"), "unknown_language"),
        (solution({"main.py": RETURNING}, language="cuda"), "unknown_binding"),
    ],
)
def test_a_solution_that_cannot_be_called_is_refused(root, data, reason):
    verdict = loaded(root, data).verdict
    assert verdict.status == "refused" and verdict.reason == reason


def test_a_source_that_leads_out_of_its_folder_is_refused(root):
    submission = loaded(root, solution({"main.py": RETURNING, "../../outside.py": "x = 1"}, returns=True))
    verdict = gate.judge(submission.candidate, problem_of(root), seed=1)
    assert (verdict.status, verdict.reason) == ("refused", "bad_path")


ATTENTION = """
import torch

@torch.no_grad()
def run(q, k, v):
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        scores = q[row].to(torch.float32) @ k[: row + 1].to(torch.float32).T
        weights = torch.softmax(scores, dim=-1)
        out[row] = (weights @ v[: row + 1].to(torch.float32)).to(torch.bfloat16)
    return out
"""
GATED = """
import torch

def run(q, k, v):
    return torch.nn.functional.silu(q * k) * v
"""
FLASH = """
import torch

def run(q, k, v, out):
    scores = (q.float() @ k.float().T).SCORES + torch.full((len(q), len(q)), float("-inf")).triu(1)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    out.copy_((weights.to(v.dtype) @ v).float() / weights.sum(-1, keepdim=True))
"""
SAME = "import torch\n\ndef run(q, k, v, out):\n    out.copy_(torch.nn.functional.silu(q * k) * v)\n"


@pytest.mark.parametrize(
    "reference, source, status",
    [
        (ATTENTION, FLASH.replace("SCORES", "float()"), "accepted"),
        (ATTENTION, FLASH.replace("SCORES", "bfloat16()"), "wrong"),
        (GATED, SAME, "accepted"),
        (GATED, SAME.replace("(q * k)", "(q * k * 1.02)"), "wrong"),
    ],
    ids=["weights in 16 bits", "scores in 16 bits", "as the reference", "a factor"],
)
def test_candidates_may_round_what_the_reference_rounds_and_operands_of_products(reference, source, status, tmp_path):
    rows = {"shape": ["rows", "width"], "dtype": "bfloat16"}
    axes = {"rows": {"type": "var"}, "width": {"type": "const", "value": 16}}
    definition = {"name": "small", "op_type": "x", "axes": axes, "inputs": dict.fromkeys("qkv", rows)}
    definition |= {"outputs": {"out": rows}, "reference": reference}
    path = tmp_path / "definitions" / "small.json"
    (tmp_path / "workloads").mkdir()
    path.parent.mkdir()
    path.write_text(json.dumps(definition))
    line = {"definition": "small", "workload": {"uuid": "1", "axes": {"rows": 6}}}
    line["workload"]["inputs"] = dict.fromkeys("qkv", {"type": "random"})
    (tmp_path / "workloads" / "small.jsonl").write_text(json.dumps(line))
    candidate = gate.Candidate("new", source, entry="run", call="destination")
    assert gate.judge(candidate, load_problem(path), seed=5).status == status
