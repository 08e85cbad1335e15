"""What a candidate says of its own run, dtypes of stages and output gradients, makes no wrong kernel right."""

from dataclasses import replace

import pytest
import torch

from goldsmith import assay
from goldsmith.assay import gate
from goldsmith.assay.gate.tricks.scalars import other_scalars


def golden(x, w):
    return x * assay.stage("scale", (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()) * w


@assay.case(T=[1, 6], D=[24])
def rows(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}


SOURCE = """
import sys, torch
from goldsmith.core.tracing import stage

def blank():
    frame = sys._getframe(1)
    while frame is not None:
        for name in ("run", "sent", "cotangents"):
            sent = getattr(frame.f_locals.get(name), "cotangents", frame.f_locals.get(name))
            for tensor in list(sent.values()) if isinstance(sent, dict) else [sent]:
                tensor.zero_() if isinstance(tensor, torch.Tensor) else None
        frame = frame.f_back

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        r = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        FORWARD
        ctx.save_for_backward(x, w, r)
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved_tensors
        h, gh = x * r, g * w
        gx, gw = r * (gh - h * (gh * h).mean(-1, keepdim=True)), (g * h).sum(0)
        BACKWARD
        return gx, gw

def candidate(x, w):
    return Norm.apply(x, w)
"""
PLAIN = "y = x * stage('scale', r) * w"
SHORT = "gx = gx.to(torch.float8_e5m2).float()"


def judged(forward=PLAIN, backward="", head="", **more):
    source = head + SOURCE.replace("FORWARD", forward).replace("BACKWARD", backward)
    return gate.judge(gate.Candidate("norm", source), gate.Problem(golden, rows, outputs=("y",)), seed=2, **more)


def test_a_right_kernel_is_accepted():
    verdict = judged()
    assert verdict.ok, verdict.evidence


@pytest.mark.parametrize("dtype", ["float8_e5m2", "bfloat16"])
def test_a_stage_in_a_narrow_dtype_widens_no_bound(dtype):
    verdict = judged(f"r = stage('scale', r.to(torch.{dtype})).to(x.dtype)\n        y = x * r * w")
    assert (verdict.status, verdict.reason) == ("wrong", "dtype"), verdict.evidence
    assert verdict.evidence == [f"scale is {dtype}, which is narrower than every input and than the reference's result"]


@pytest.mark.parametrize("name", ["x.grad", "y", "saved.y"])
def test_a_stage_with_the_name_of_a_result_widens_no_bound(name):
    empty = f"stage({name!r}, torch.empty(x.shape, dtype=torch.float8_e5m2))"
    verdict = judged(f"{PLAIN}\n        {empty}", f"{empty}\n        {SHORT}", probes="values")
    assert verdict.status != "accepted" and "x.grad" in "".join(verdict.evidence), verdict.evidence


def test_a_narrower_result_of_one_case_only_is_seen():
    verdict = judged("y = x * r * w\n        y = y if len(x) == 1 else y.bfloat16()")
    assert (verdict.status, verdict.reason) == ("wrong", "dtype"), verdict.evidence


def two_best(x):
    index = assay.stage("index", x.topk(2, -1).indices)
    return x.gather(-1, index), index


@pytest.mark.parametrize("dtype, status", [("int8", "wrong"), ("float32", "wrong"), ("int32", "accepted")])
def test_a_decision_has_a_dtype_with_which_a_caller_can_index(dtype, status):
    cases = [assay.case(T=[3], D=[12])(lambda make, T, D: {"x": make.normal(T, D)})]
    decisions = {"index": assay.topk(scores="x", k=2)}
    chosen = gate.Problem(two_best, cases, outputs=("value", "index"), decisions=decisions)
    source = f"import torch\ndef candidate(x):\n    y, i = x.topk(2, -1)\n    return y, i.to(torch.{dtype})\n"
    verdict = gate.judge(gate.Candidate("best", source), chosen, seed=2, probes="values")
    assert (verdict.status, verdict.reason) == (status, "dtype" if status == "wrong" else ""), verdict.evidence


def named_best(x):
    return assay.stage("best", x.argmax(-1)) * 2


@pytest.mark.parametrize(
    "golden, stage, reason",
    [
        (lambda x: "text", "", "problem"),
        (lambda x: x.argmax(-1) * 2, "best", "problem"),  # which the golden has not, whatever the candidate has
        (named_best, "best", "declaration"),
    ],
)
def test_a_declaration_that_the_golden_does_not_fit_is_the_fault_of_the_problem(golden, stage, reason):
    cases = assay.case(T=[3], D=[12])(lambda make, T, D: {"x": make.normal(T, D)})
    problem = gate.Problem(golden, cases, decisions={stage: assay.argmax(scores="x")} if stage else {})
    source = gate.Candidate("best", "def candidate(x):\n    return x.argmax(-1) * 2\n")
    verdict = gate.judge(source, problem, seed=2, probes="values")
    assert (verdict.status, verdict.reason) == ("refused", reason), verdict.evidence


@pytest.mark.parametrize("eps, status", [("eps", "accepted"), ("1e-6", "wrong")])
def test_a_number_with_one_declared_value_is_no_constant(eps, status):
    cases = assay.case(T=[3], D=[12])(lambda make, T, D: {"x": make.normal(T, D), "eps": 1e-6})
    norm = "x * (x.square().mean(-1, keepdim=True) + {}).rsqrt()"
    problem = gate.Problem(eval(f"lambda x, eps: {norm.format('eps')}"), cases)
    source = f"def candidate(x, eps):\n    return {norm.format(eps)}\n"
    verdict = gate.judge(gate.Candidate("norm", source), problem, seed=2, probes="values")
    assert (verdict.status, verdict.reason) == (status, "scalars" if status == "wrong" else ""), verdict.evidence


@pytest.mark.parametrize("value, other", [(1.0, 0.75), (-1e-8, -0.0078125), (2.0, 1.75), (128.0, 96.0)])
def test_another_number_lies_between_the_same_bounds(value, other):
    cases = assay.case(T=[3])(lambda make, T: {"x": make.normal(T), "p": value, "k": 2, "zero": 0.0})
    (case,) = other_scalars(cases, torch.float32, 0)
    assert {n: v for n, v in case.build().items() if n != "x"} == {"p": other, "k": 2, "zero": 0.0}
    assert other_scalars([replace(c, where=lambda p: p == value) for c in cases], torch.float32, 0) == []


HIDING = """
import sys, torch

class Nothing(list):
    def __iter__(self): return iter(())
    def __len__(self): return 0

class Short(list):
    def __iter__(self): return iter(())

def frame(name):
    at = sys._getframe(2)
    while at is not None and at.f_code.co_name != name:
        at = at.f_back
    return at and at.f_locals

made = []
def without_second(kind):
    made.append(type("CandidateRun", (kind,), {"second_grads": property(lambda self: None, lambda self, value: None)}))
    return made[-1]

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        r = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.saved, ctx.count = (x, w, r), 0
        y = x * r * w
        IN_FORWARD
        return y

    @staticmethod
    def backward(ctx, g):
        x, w, r = ctx.saved
        h, gh = x * r, g * w
        gx, gw = r * (gh - h * (gh * h).mean(-1, keepdim=True)), (g * h).sum(0)
        ctx.count += 1
        IN_BACKWARD
        return gx, gw

def candidate(x, w):
    return Norm.apply(x, w)
"""
CALLS = """calls = frame("_calls")
        if calls and "results" in calls:
            if type(calls["results"].outputs) is not Nothing:
                calls["results"].outputs = Nothing(calls["results"].outputs)
            y = y * 0"""
GRAPHS = """graphs = frame("_open_graphs")
        if graphs:
            graphs["results"].open = Short(graphs["results"].open)
            gx = gx * 2"""
TWICE = """step = frame("_forward_and_backward")
        if step and ctx.count > 1:
            step["run"].__class__ = made[0] if made else without_second(type(step["run"]))
            gx = gx * 3"""


@pytest.mark.parametrize(
    "forward, backward, lacking",
    [
        (CALLS, "", "those of all plain calls"),
        ("", GRAPHS, "those of open graphs"),
        ("", TWICE, "those of the second backward"),
    ],
)
def test_a_run_must_have_all_that_was_asked_for(forward, backward, lacking):
    source = HIDING.replace("IN_FORWARD", forward or "pass").replace("IN_BACKWARD", backward or "pass")
    verdict = gate.judge(gate.Candidate("hiding", source), gate.Problem(golden, rows, outputs=("y",)), seed=2)
    assert verdict.status == "crashed" and f"without {lacking}" in verdict.evidence[0], verdict


@pytest.mark.parametrize(
    "result, seen",
    [
        (
            '{"y": y, "s" if n == 1 else "z": s}',
            "the results are y, z (the second call, same inputs), and were y, s in",
        ),
        ('{"y": y if n == 1 else y[:0], "s": s}', "float32 [1, 24] and then float32 [0, 24]"),
    ],
)
def test_results_of_another_name_or_shape_in_a_later_call_are_the_candidates_fault(result, seen):
    def both(x, w):
        s = x.square().mean(-1, keepdim=True)
        return {"y": x * w, "s": s}

    source = "calls = []\ndef candidate(x, w):\n    calls.append(1)\n    n, y = len(calls), x * w\n"
    source += f"    s = x.square().mean(-1, keepdim=True)\n    return {result}"
    verdict = gate.judge(gate.Candidate("later", source), gate.Problem(both, rows), probes="second_call", seed=2)
    assert verdict.status in ("wrong", "cheating") and seen in "".join(verdict.evidence), verdict


@assay.case(T=[5], E=[40])
def scores(make, T, E):
    return {"x": make.normal(T, E)}


def best(x):
    """The three largest of each row, their places, and whether they are positive."""
    values, places = x.topk(3)
    return values, places, values > 0


@pytest.mark.parametrize(
    "result, seen",
    [
        ("values, places.int(), values > 0", ""),
        ("values, places.to(torch.int8), values > 0", "y1 is int8 where the reference's is int64"),
        ("values, places.float(), values > 0", "y1 is float32 where the reference's is int64"),
        ("values, places, (values > 0).float()", "y2 is float32 where the reference's is bool"),
    ],
)
def test_indices_and_masks_have_a_dtype_that_can_be_used_as_such(result, seen):
    source = f"import torch\ndef candidate(x):\n    values, places = x.topk(3)\n    return {result}"
    problem = gate.Problem(best, scores, backward=None)
    verdict = gate.judge(gate.Candidate("best", source), problem, probes="values", seed=2)
    assert (verdict.reason, verdict.evidence) == (("dtype", [seen]) if seen else ("", [])), verdict.evidence


def test_output_gradients_are_not_taken_from_the_candidates_process():
    verdict = judged(PLAIN, "with torch.no_grad(): blank()\n        gx, gw = 0 * gx, 0 * gw")
    assert verdict.status in ("wrong", "cheating"), verdict.evidence


def test_a_wrong_backward_is_no_lowered_precision_of_a_right_output():
    verdict = judged(PLAIN, "gx = r * gh", head="import torch\nNARROW = torch.bfloat16\n")
    assert (verdict.status, verdict.reason) == ("wrong", "values"), verdict.evidence


ODD = """
class Mute(Exception):
    def __str__(self):
        raise KeyError

def candidate(x, w):
    raise ERROR
"""


@pytest.mark.parametrize(
    "error, seen",
    [
        ("ExceptionGroup('two', [ValueError()])", "ExceptionGroup: two"),
        ("Mute()", "Mute: its text cannot be made: KeyError"),
        ("ValueError('half \\ud800')", "ValueError: half ?"),
    ],
)
def test_whatever_a_candidate_raises_is_told_in_plain_words(error, seen):
    source = ODD.replace("ERROR", error)
    verdict = gate.judge(gate.Candidate("odd", source), gate.Problem(golden, rows, outputs=("y",)), probes="values")
    assert verdict.status == "crashed" and seen in verdict.to_json()["evidence"][0], verdict


def test_a_result_whose_elements_share_memory_is_an_alias_unless_the_goldens_do():
    expanded = gate.Candidate(
        "expanded", "def candidate(x, w): return (x * 0 + 1).mean(0, keepdim=True).expand(x.shape)"
    )
    whole = gate.Problem(lambda x, w: torch.ones_like(x), rows, backward=None)
    verdict = gate.judge(expanded, whole, probes="quick", seed=2)
    assert (verdict.status, verdict.reason) == ("cheating", "aliased_output"), verdict.evidence
    alike = gate.Problem(lambda x, w: torch.ones_like(x[:1]).expand(x.shape), rows, backward=None)
    assert gate.judge(expanded, alike, probes="quick", seed=2).ok


def test_a_backward_that_only_the_first_call_lacks_is_seen():
    hidden = SOURCE.replace("FORWARD", "y = x * r * w").replace("BACKWARD", "gx = gx * 2")
    text = f"calls = []\n{hidden.replace('return Norm', 'calls.append(1); y = Norm')}"
    text += "    return y.detach() if len(calls) == 1 else y\n"
    problem = gate.Problem(golden, rows, outputs=("y",), backward="present")
    verdict = gate.judge(gate.Candidate("hidden", text), problem, probes="quick", seed=2)
    assert (verdict.status, verdict.reason) == ("cheating", "call_count"), verdict.evidence


FORGED = """
import sys
child = sys.modules["goldsmith.assay.gate.isolation.child"]
events = sys.modules["goldsmith.assay.gate.isolation.events"]
plain = child.results_to_data

def candidate(x, w):
    return x * w

def forged(run):
    data = plain(run)
    CHANGE
    return data

PATCH
"""
FORGERIES = [
    ("", "child.parameters_of = lambda parts: {'candidate': [('x', 'NO_KIND', False)]}"),
    ("", "child.parameters_of = lambda parts: {'candidate': 7}"),
    ("", "events.EventLog.report = lambda self: [['left']]"),
    ("", "events.EventLog.report = lambda self: [['patched', 7]]"),
    ("", "events.EventLog.report = lambda self: 7"),
    ("data['earlier']['nope'] = run.outputs['y']", "child.results_to_data = forged"),
    (
        "data['plain'] and [g.update(sent=['nope']) for g in data['plain']['open']]",
        "child.results_to_data = forged",
    ),
    ("data['stages']['s'] = run.outputs['y'][:1, :1].expand(1 << 17, 1 << 17)", "child.results_to_data = forged"),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("change, patch", FORGERIES)
def test_a_forged_reply_is_a_verdict_about_its_candidate(change, patch):
    source = FORGED.replace("CHANGE", change or "pass").replace("PATCH", patch)
    problem = gate.Problem(lambda x, w: x * w, rows, outputs=("y",))
    verdict = gate.judge(gate.Candidate("forged", source), problem, seed=2)
    assert verdict.status in ("cheating", "crashed"), verdict
