"""Patches of a stranger's program: a good one is taken, bad and hostile ones are refused, each with its reason."""

import json
import shlex
import sys

import pytest

from assay.diagnosis.test_patches import SECONDS, TORCH, failing
from assay.diagnosis.written_modules import forget, load
from goldsmith import assay
from goldsmith.assay.diagnosis.source.edits.edits import Edit
from goldsmith.assay.diagnosis.source.foreign_changes import foreign_change
from goldsmith.assay.diagnosis.source.proposals import proposals
from goldsmith.assay.diagnosis.source.reading.candidate_source import candidate_source
from goldsmith.assay.diagnosis.source.search import find_patch
from goldsmith.assay.diagnosis.source.survivors import Survivor

WRONG = TORCH.replace("dw += grad[t]", "dw = grad[t] + 0 * x[0] + 1")  # no edit of the search mends it
LINE = "dw = grad[t] + 0 * x[0] + 1"
HOSTILE = {
    "no Python": "def (",
    "changes more than the candidate": WRONG.replace(
        "def golden(x, w, eps):\n    return x", "def golden(x, w, eps):\n    return 2 * x"
    ),
    "changes more than the candidate ": WRONG.replace("assay.Target(Scan.apply, golden", "assay.Target(golden, golden"),
    "calls the golden": WRONG.replace(LINE, "dw += golden(x, w, 0.25)[t]"),
    "uses __import__": WRONG.replace(LINE, "dw += __import__('sys').modules and grad[t]"),
    "uses subprocess": "import subprocess\n" + WRONG.replace(LINE, "dw += grad[t]"),
    "wrong with it": WRONG.replace(LINE, "dw += grad[t] + 1e-3"),
    "raises": WRONG.replace(LINE, "dw += grad[t] / None"),
    "too slow": WRONG.replace("D = x.shape[1]", "D = x.shape[1]\n        while True: pass"),
    "changes nothing": WRONG,
    "not on all others": WRONG.replace(LINE, "dw += (grad[t] if x.shape == (3, 5) else 0 * grad[t])"),
}
GOOD = WRONG.replace(LINE, "dw += grad[t]")


@pytest.fixture(autouse=True)
def _modules():
    yield
    forget()


def command(folder, body):
    (folder / "proposer.py").write_text(f"import json, sys, time\nasked = json.load(sys.stdin)\n{body}\n")
    return shlex.join([sys.executable, str(folder / "proposer.py")])


def offering(folder, patches):
    (folder / "patches.json").write_text(json.dumps({"patches": patches}))
    return command(folder, f"print(open({str(folder / 'patches.json')!r}).read())")


@pytest.mark.sweep(2, part=0)
def test_the_good_proposal_of_many_is_the_patch(tmp_path):
    module = load(tmp_path, WRONG)
    own = tmp_path / f"{module.__name__}.py"
    patches = [{"file": own.name, "text": text} for text in (*HOSTILE.values(), GOOD)]
    search = find_patch(module.target, failing(module.target), SECONDS, propose=offering(tmp_path, patches))
    assert search.patch is not None and search.patch.kind == "proposed", search.refused
    assert search.patch.text == GOOD and own.read_text() == WRONG
    assert len(search.refused) == len(HOSTILE)
    for reason in HOSTILE:
        assert any(reason.strip() in text for text in search.refused), (reason, search.refused)


def test_a_diff_is_applied_where_its_context_fits(tmp_path):
    module = load(tmp_path, WRONG)
    source = candidate_source(module.target)
    at = WRONG.splitlines().index(f"            {LINE} * normed[t]") + 1
    name, tail = f"{module.__name__}.py", "normed[t]\n"
    change = f"-            {LINE} * {tail}+            dw += grad[t] * {tail}"
    diff = f"--- a/x.py\n+++ b/{name}\n@@ -{at} +{at} @@\n{change}"
    offered = proposals(offering(tmp_path, [{"diff": diff}, {"diff": diff.replace("-  ", "- x")}]), source, {}, 20.0)
    ((path, file),) = source.files.items()
    assert [e.applied(file.data).decode() for e in offered.edits] == [GOOD]
    assert "does not fit at line" in offered.refused[0]


@pytest.mark.parametrize(
    "body, reason",
    [
        ("time.sleep(60)", "had not ended after 1 s"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("print('[' * 100000)", "its output is not"),
        ("print(json.dumps({'patches': 7}))", "its output is not"),
        ("while True: print('x' * 100000)", "wrote more than"),
    ],
)
def test_a_program_that_fails_costs_only_its_time(tmp_path, body, reason):
    source = candidate_source(load(tmp_path, WRONG).target)
    seconds = 1.0 if "sleep" in body else 20.0
    offered = proposals(command(tmp_path, body), source, {}, seconds)
    assert not offered.edits and reason in offered.refused[0]


@pytest.mark.sweep(2, part=1)
def test_the_program_gets_evidence_and_source_and_ctrl_c_keeps_the_patch(tmp_path):
    module = load(tmp_path, WRONG)
    own = tmp_path / f"{module.__name__}.py"
    body = f"""assert asked["schema"] == 1 and asked["wrong"] == ["w.grad"] and asked["diagnosis"]["verdict"] == "fail"
(text,) = asked["files"].values()
print(json.dumps({{"patches": [{{"text": text.replace({LINE!r}, "dw += grad[t]")}}]}}))"""

    def interrupt(text):
        if "edits" in text:
            raise KeyboardInterrupt

    diagnosis = assay.diagnose(module.target, patch=True, propose=command(tmp_path, body), progress=interrupt)
    assert diagnosis.patch is not None and diagnosis.patch.text == own.read_text().replace(LINE, "dw += grad[t]")
    assert diagnosis.partial == "interrupted" and diagnosis.stages and diagnosis.causes


def test_a_proposal_may_change_a_constant_that_only_the_candidate_reads(tmp_path):
    text = WRONG.replace("class Scan", "ROWS, WIDTH = 3, 4\nONE = 1\nEPS = 1\n\n\nclass Scan").replace(
        LINE, LINE + " + ONE"
    )
    text = text.replace("return x * (x.square()", "return EPS * x * (x.square()")
    module = load(tmp_path, text)
    source = candidate_source(module.target)
    (path,) = source.files

    def why(old, new):
        assert old in text
        return foreign_change(module.target, source, path, text.replace(old, new))

    assert why("ONE = 1", "ONE = 0") == why("ONE = 1", "ONE = 1\nTWO = 2") == ""
    assert why("EPS = 1", "EPS = 2") == "it changes more than the candidate"


def test_an_accepted_proposal_comes_before_a_smaller_edit_that_does_the_same():
    proposed, own = (
        Survivor(Edit("k.py", ((0, 0, text),), kind, 1.0, 1), {}, 2)
        for text, kind in (("cdiv", "proposed"), ("n", "number"))
    )
    assert proposed.rank < own.rank
