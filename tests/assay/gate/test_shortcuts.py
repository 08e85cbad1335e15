"""The faster ways of the gate note the same evidence as the slow ones."""

import math
import sys
import types

import torch

from assay.gate.problems import candidate, problem
from goldsmith.assay import gate
from goldsmith.assay.execute.plain_calls import plain_calls
from goldsmith.assay.execute.records import CandidateRun, Material, PlainCalls, PlainResults, RunSettings
from goldsmith.assay.gate.isolation import wire
from goldsmith.assay.gate.isolation.protocol import Malformed
from goldsmith.assay.judge.known_functions import KnownFunctions

LATE_PATCH = """
import torch
count = 0


def candidate(x, w):
    global count
    count += 1
    if count == 13:
        before = torch.equal
        torch.equal = lambda a, b: before(a, b)
    return x * w
"""


def test_a_patch_made_in_a_run_that_is_not_looked_at_is_found_in_a_later_one():
    verdict = gate.judge(gate.Candidate("late", LATE_PATCH), problem(), seed=1)
    assert (verdict.status, verdict.reason) == ("cheating", "patched_runtime")
    assert "torch.equal" in verdict.evidence[0]


def test_a_patch_is_found_after_a_library_has_replaced_a_function(monkeypatch):
    functions = KnownFunctions()
    monkeypatch.setattr(torch, "compile", torch.nn.functional.softmax)  # a function of a library
    assert not functions.replaced()
    assert not functions.replaced()
    monkeypatch.setattr(torch, "equal", lambda a, b: True)
    assert list(functions.replaced()) == ["torch.equal"]


def test_every_kind_of_replacement_is_found_and_put_back(monkeypatch):
    softmax = torch.nn.functional.softmax
    other = (lambda input, dim=None, _stacklevel=3, dtype=None: input).__code__
    for owner, name, value, shown in (
        (softmax, "__code__", other, "torch.nn.functional.softmax"),
        (softmax, "__defaults__", (None, 3, torch.float16), "torch.nn.functional.softmax"),
        (softmax, "__kwdefaults__", {"dim": 0}, "torch.nn.functional.softmax"),
        (torch.nn, "Linear", torch.nn.Identity, "torch.nn.Linear"),
        (torch, "float", torch.float16, "torch.float"),
        (math, "pi", 3.0, "math.pi"),
    ):
        functions = KnownFunctions()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert list(functions.replaced()) == [shown]
            functions.restore({shown})
            assert not functions.replaced()
        assert not functions.replaced()
    functions = KnownFunctions()
    monkeypatch.setitem(sys.modules, "statistics", types.ModuleType("statistics"))
    assert list(functions.replaced()) == ["sys.modules['statistics']"]


def test_equal_results_of_plain_calls_are_sent_once():
    target = problem().target(lambda x, w: x * w)
    inputs = {"x": torch.ones(2, 6), "w": torch.ones(6)}
    first = Material(target, "case", {}, inputs, {}, 0, order=("x", "w"))
    second = first.with_inputs({"x": torch.full((2, 6), 2.0)})
    calls = PlainCalls((second,), (0, 1, 0, 0, 1))
    run = plain_calls(first, calls)
    data = wire.results_to_data(run)
    assert [len(data["plain"]["outputs"]), data["plain"]["calls"]] == [2, [0, 1, 0, 0, 1]]
    outputs = wire.results_from_data(data, first, RunSettings(plain=calls)).plain.outputs
    assert [float(list(o.values())[0][0, 0]) for o in outputs] == [1, 2, 1, 1, 2]


def test_results_of_plain_calls_that_were_not_sent_are_malformed():
    material = Material(problem().target(torch.mul), "case", {}, {}, {}, 0)
    for calls in ([1], [-1], ["0"], [True]):
        data = wire.results_to_data(CandidateRun(plain=PlainResults(outputs=[{"y": torch.ones(2)}])))
        data["plain"]["calls"] = calls
        try:
            wire.results_from_data(data, material, RunSettings())
        except Malformed:
            continue
        raise AssertionError(f"{calls} was taken")


def test_the_golden_is_checked_once_for_all_candidates():
    one, options = problem(), gate.GateOptions(seed=3, probes="values")
    list(gate.judge_all([candidate("return x * w")], one, options=options))
    before = [known.counts.get("self_check", 0) for known in one.known.known.values()]
    list(gate.judge_all([candidate("return x * w")], one, options=options))
    after = [known.counts.get("self_check", 0) for known in one.known.known.values()]
    assert sum(before) > 0
    assert sum(after) == 0
