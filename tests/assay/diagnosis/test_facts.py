"""The diagnosis reads facts as data: if every message is scrambled, no cause moves; and no code reads messages."""

import ast
import dataclasses
import random
from datetime import date

import pytest

from benchmarks.kernelfault import catalogue, targets
from goldsmith import assay
from goldsmith.assay.diagnosis.causes.likelihood import likelihoods
from goldsmith.assay.diagnosis.causes.rank import rank
from goldsmith.assay.diagnosis.causes.rules import matches
from goldsmith.assay.report.results import KINDS
from repo.tree import SOURCE

TEXTS = {"text", "sentences", "sentence", "detail"}  # fields for people
DIAGNOSIS = SOURCE / "assay" / "diagnosis"


def scrambled(value, drawn):
    """The value with other letters in every field for people."""
    if isinstance(value, list | tuple):
        return type(value)(scrambled(v, drawn) for v in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name in TEXTS:
            changes[field.name] = _noise(part, drawn)
        elif isinstance(part, list | tuple) and part and dataclasses.is_dataclass(part[0]):
            changes[field.name] = scrambled(part, drawn)
        elif isinstance(part, dict) and part and dataclasses.is_dataclass(next(iter(part.values()))):
            changes[field.name] = {k: scrambled(v, drawn) for k, v in part.items()}
        elif dataclasses.is_dataclass(part):
            changes[field.name] = scrambled(part, drawn)
    return dataclasses.replace(value, **changes)


def _noise(text, drawn):
    if isinstance(text, tuple):
        return tuple(_noise(t, drawn) for t in text)
    return "".join(drawn.choice("qxzjk ") for _ in range(24)) if text else text


def same_causes(evidence):
    other = scrambled(evidence, random.Random(27))
    assert [f.text for f in other.report.findings] != [f.text for f in evidence.report.findings]
    before, after = matches(evidence), matches(other)
    assert {id: m.score for id, m in before.items()} == {id: m.score for id, m in after.items()}
    assert likelihoods(evidence, before) == likelihoods(other, after)
    assert [(c.id, c.score) for c in rank(evidence)] == [(c.id, c.score) for c in rank(other)]


FAULTS = [f for f in catalogue.faults() if f.backend == "torch" and not f.equivalent and not f.host.package]
TODAYS = random.Random(date.today().toordinal()).sample(FAULTS, 1)


@pytest.mark.parametrize("fault", TODAYS, ids=lambda f: f"{f.host.name}-{f.id}")
def test_scrambled_messages_move_no_cause(fault, tmp_path):
    make = targets.factory(fault.host, fault.backend, catalogue.copy(fault.host, fault.backend, fault, tmp_path))
    diagnosis = assay.diagnose(make(), fault.cases[0] if fault.cases else None, budget_s=6)
    if diagnosis.evidence is not None and diagnosis.verdict == "fail":
        same_causes(diagnosis.evidence)
        assert {f.kind for f in diagnosis.report.findings} <= KINDS


METHODS = {
    "startswith",
    "endswith",
    "partition",
    "rpartition",
    "split",
    "find",
    "index",
    "removeprefix",
    "removesuffix",
}
OF_SOURCE = {"source", "whatif"}  # `text` is a user's source there, or the words of an edit


def reads_text(node):
    """Whether a piece of code looks for something in the text of a finding, a note, a fact or a run."""

    def is_text(part):
        return isinstance(part, ast.Attribute) and part.attr in TEXTS

    if isinstance(node, ast.Compare):
        return any(isinstance(op, ast.In | ast.NotIn) and is_text(p) for op, p in zip(node.ops, node.comparators))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return (
        node.func.attr in METHODS
        and is_text(node.func.value)
        or (node.func.attr in {"search", "match", "fullmatch", "findall", "sub"} and any(map(is_text, node.args)))
    )


def test_no_code_of_the_diagnosis_reads_a_text_back():
    assert reads_text(ast.parse('"raised" in f.text').body[0].value)
    assert reads_text(ast.parse('f.text.startswith("layout")').body[0].value)
    assert reads_text(ast.parse("_LABEL.findall(f.text)").body[0].value)
    places = [
        f"{path.relative_to(DIAGNOSIS)}:{node.lineno}"
        for path in sorted(DIAGNOSIS.rglob("*.py"))
        if path.relative_to(DIAGNOSIS).parts[0] not in OF_SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if reads_text(node)
    ]
    assert places == []
