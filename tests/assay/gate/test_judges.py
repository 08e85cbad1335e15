"""Judges in processes of their own, and the reward function over them."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from goldsmith.assay import gate
from goldsmith.assay.gate.formats.problem_source import ProblemSource
from goldsmith.assay.gate.isolation.zygote_process import ZygoteProcess
from goldsmith.assay.gate.judges import Judges
from goldsmith.assay.gate.judging import GateOptions
from goldsmith.assay.gate.kernel_reward import reward

from .problems import RIGHT, TRITON, problem

FILE = Path(__file__).parent / "problems.py"
SOURCE = """
import torch
from goldsmith import assay

def golden(x, w):
    return torch.softmax(x, -1) * w

@assay.case(T=[1, 5], D=[12])
def cases(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D)}
"""
WRONG = RIGHT.replace("* w", "")
OPTIONS = GateOptions(probes="quick", seed=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("judges") / "softmax.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def zygote():
    """It imports once what all judges of this file need: two seconds of a processor."""
    one = ZygoteProcess.start(threads=1)
    yield one
    one.close()


@pytest.fixture
def judging(zygote, monkeypatch):
    """Judges that the zygote forks, and that leave it to the next test."""
    monkeypatch.setattr(zygote, "close", lambda: None)
    monkeypatch.setattr("goldsmith.assay.gate.judges._new_zygote", lambda: zygote)
    return Judges


@pytest.mark.sweep(2, part=0)
def test_verdicts_come_in_order_from_several_judges(file, judging):
    own = ProblemSource(str(file))
    bad = ProblemSource(str(file.parent / "nowhere.py"))
    sources = [RIGHT, WRONG, "def candidate(", RIGHT]
    with judging(2, OPTIONS) as judges:
        pairs = [(own, gate.Candidate(str(n), s)) for n, s in enumerate(sources)]
        found = list(judges.in_order([*pairs, (bad, gate.Candidate("4", RIGHT))]))
        pids = [p.pid for p in judges.processes]
    assert [v.candidate for v in found] == list("01234")
    assert [v.status for v in found] == ["accepted", "wrong", "refused", "accepted", "refused"]
    assert [v.reason for v in found][2::2] == ["does_not_parse", "problem"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.sweep(2, part=1)
def test_a_judge_that_dies_is_replaced_and_candidates_of_one_batch_share_a_seed(file, judging):
    with judging(1, replace(OPTIONS, seed=None)) as judges:
        pairs = [(ProblemSource(str(file)), gate.Candidate(str(n), RIGHT)) for n in range(3)]
        verdicts = []
        for _, verdict in judges.run(pairs):
            verdicts.append(verdict)
            if len(verdicts) == 1:
                os.kill(judges.processes[0].pid, signal.SIGKILL)
        (later,) = judges.in_order(pairs[:1])
    assert [v.status for v in verdicts] == ["accepted"] * 3
    assert len({v.seed for v in verdicts}) == 1 and later.seed != verdicts[0].seed


def test_no_limit_on_the_problem_is_no_error(file):
    with Judges(1, replace(OPTIONS, problem_seconds=float("inf"))) as judges:
        (verdict,) = judges.in_order([(ProblemSource(str(file)), gate.Candidate("right", RIGHT))])
    assert verdict.ok


def test_a_problem_that_does_not_end_is_no_verdict_about_a_candidate_and_is_tried_once(tmp_path, judging):
    endless = tmp_path / "endless.py"
    endless.write_text(SOURCE.replace("    return torch", "    __import__('time').sleep(600)\n    return torch"))
    pairs = [(ProblemSource(str(endless)), gate.Candidate(str(n), RIGHT)) for n in range(3)]
    with judging(1, replace(OPTIONS, problem_seconds=3.0)) as judges:
        verdicts = list(judges.in_order(pairs))
        starts = judges.processes
    assert [(v.status, v.reason, v.candidate) for v in verdicts] == [("refused", "problem", n) for n in "012"]
    for verdict in verdicts:
        assert f"{endless}: a call of its golden had not ended after 3 s, in golden (endless.py" in verdict.evidence[0]
        assert "--problem-seconds" in verdict.evidence[0]
    assert not starts  # no second judge waited as long


@pytest.fixture(scope="module")
def rewards(file):
    function = reward({"softmax": file}, jobs=1, options=OPTIONS, scores={"accepted": 1.0, "wrong": 0.25})
    yield function
    function.close()


def test_a_reward_is_called_as_trl_calls_it(rewards, tmp_path):
    completions = [f"```python\n{RIGHT}\n```", [{"role": "assistant", "content": WRONG}], "I cannot."]
    columns = {"prompts": ["?"] * 3, "completion_ids": [[1]] * 3, "problem": ["softmax"] * 3, "trainer_state": None}
    assert rewards(completions=completions, **columns) == [1.0, 0.25, 0.0]
    assert [v.status for v in rewards.verdicts] == ["accepted", "wrong", "refused"]
    with pytest.raises(ValueError, match="names the problem 'other'; there are: softmax"):
        rewards(completions=[RIGHT], problem=["other"])
    (tmp_path / "empty.py").write_text("def golden(x):\n    return x\n")
    with pytest.raises(gate.BadProblem, match="empty.py: the problem has no cases"):  # as when a reward is made
        rewards.judges.check([ProblemSource(str(tmp_path / "empty.py"))])


def test_a_reward_is_called_as_verl_calls_it(rewards):
    extra = {"problem": "softmax", "index": 7}
    assert rewards(data_source="kernels", solution_str=WRONG, ground_truth=None, extra_info=extra) == 0.25
    batch = {"data_sources": ["kernels"] * 2, "ground_truths": [None] * 2, "extra_infos": [extra] * 2}
    assert rewards(solution_strs=[RIGHT, WRONG], **batch) == [1.0, 0.25]


def test_a_reward_of_a_problem_in_this_process():
    function = reward(problem(), options=OPTIONS)
    assert function([RIGHT, WRONG]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="'right' is no status"):
        reward(problem(), scores={"right": 1.0})
    with pytest.raises(TypeError, match="without completions"):
        function()


WRONG_ARGUMENTS = [
    ({"problem": "nowhere.py"}, "nowhere.py: there is no such file"),
    ({"problem": {}}, "problem: expected an assay.gate.Problem, a file, or files by name, got an empty dict"),
    ({"options": GateOptions(device="warp9")}, "device: candidates cannot run on 'warp9'; use cpu, cuda or cuda:1"),
    ({"options": GateOptions(probes="alle")}, "probes: 'alle' is neither a level nor a probe"),
    ({"options": GateOptions(sandbox="none")}, "sandbox: 'none' is unknown; there are: auto, namespaces"),
    ({"device": "cpu"}, r"device: no option of a problem; give options=gate.GateOptions\(device=...\)"),
    ({"language": "rust"}, "language: 'rust' is unknown"),
    ({"jobs": -1}, "jobs: expected a number of judges"),
    ({"scores": {"accepted": "x"}}, "scores: expected a number for 'accepted', got 'x'"),
]


@pytest.mark.parametrize("arguments, text", WRONG_ARGUMENTS, ids=[text[:20] for _, text in WRONG_ARGUMENTS])
def test_a_reward_of_something_wrong_raises_when_it_is_made(arguments, text):
    """Otherwise a training run goes on with rewards of 0."""
    with pytest.raises((ValueError, TypeError), match=f"^{text}"):
        reward(**{"problem": problem(), "jobs": 1, **arguments})


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["def candidate(x): return x", problem()], "candidate: expected an assay.gate.Candidate, got str"),
        ([gate.Candidate("a", RIGHT), "softmax.py"], "problem: expected an assay.gate.Problem, got str"),
        (
            [gate.Candidate("a", RIGHT), problem().declared],
            "problem: expected an assay.gate.Problem, got Target; gate.Pr",
        ),
        ([gate.Candidate("a", RIGHT), problem(), "meta"], "device: candidates cannot run on 'meta'"),
    ],
)
def test_a_wrong_argument_is_no_verdict(arguments, text):
    candidate, own, *device = arguments
    with pytest.raises((ValueError, TypeError), match=f"^{text}"):
        gate.judge(candidate, own, device=device[0] if device else "cpu")


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"completions": "def"}, "reward: completions: expected a list of completions, got a str"),
        ({"completions": {"content": RIGHT}}, "reward: completions: expected a list of completions, got a dict"),
        ({"solution_strs": RIGHT}, "reward: solution_strs: expected a list of completions, got a str"),
        ({"completions": [RIGHT] * 3, "problem": ["a"]}, "reward: the column 'problem' has 1 rows, and completions 3"),
        ({"solution_strs": [RIGHT] * 3, "extra_infos": [{}]}, "reward: extra_infos has 1 rows, and solution_strs 3"),
    ],
)
def test_a_call_of_a_reward_names_the_argument_that_is_wrong(arguments, text):
    with pytest.raises((ValueError, TypeError), match=f"^{text}"):
        reward(problem(), options=OPTIONS)(**arguments)


def test_a_flag_of_a_problem_is_a_flag():
    with pytest.raises(TypeError, match="^wants_kernel: expected True or False, got 'no'"):
        problem(wants_kernel="no")


@pytest.mark.gpu
@pytest.mark.parametrize("spares", [True, False])
def test_triton_kernels_on_a_gpu(tmp_path, spares):
    path = tmp_path / "softmax.py"
    path.write_text(f"{SOURCE}\nbackward = None\n")
    with Judges(1, replace(OPTIONS, device="cuda"), spares=spares) as judges:
        pair = (ProblemSource(str(path)), gate.Candidate("softmax", TRITON))
        wrong = (pair[0], gate.Candidate("wrong", TRITON.replace("/ tl.sum(e)", "")))
        verdicts = list(judges.in_order([pair, wrong, pair]))
    assert [v.status for v in verdicts] == ["accepted", "wrong", "accepted"], verdicts
