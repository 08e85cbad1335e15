"""The assay over ranks: verdicts, causes in words, and ranks that hang or die."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from benchmarks.kernelfault.ranks import catalogue, score
from distributed import rank_functions as functions
from goldsmith import assay
from goldsmith.assay.ranks import RankError, RankPool, check, layout
from goldsmith.cli.terminal import Failure
from goldsmith.cli.verify.launcher import LaunchedRank

QUICK = ("sequence_norm", "vocabulary_loss", "vision_branch")
FAULTS = catalogue.faults()


@pytest.mark.parametrize("sizes, placed, shape", [
    ((3,), (Shard(0),), (7, 2)),
    ((4,), (Shard(1),), (2, 3)),  # the last rank has nothing
    ((2, 2), (Shard(0), Shard(0)), (7, 2)),
    ((2, 2), (Shard(0), Replicate()), (5, 2)),
    ((2, 2), (Partial(), Shard(1)), (5, 3)),
])  # fmt: skip
def test_the_parts_of_all_ranks_are_the_whole_tensor(sizes, placed, shape):
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    places = layout.coordinates(sizes)
    parts = [layout.part(whole, placed, at, sizes) for at in places]
    for view in places:
        assert torch.equal(layout.assembled(parts, placed, sizes, view), whole)


@pytest.mark.parametrize("fault", [
    pytest.param(f, marks=[] if f.specimen in QUICK else pytest.mark.slow, id=f.specimen) for f in FAULTS
])  # fmt: skip
def test_a_public_bug_is_named_and_its_right_version_passes(fault, pools):
    (outcome,) = score.outcomes(2, (fault,), pools(2))
    assert outcome.right_passes, outcome.right_text
    assert outcome.detected
    assert outcome.right, (outcome.named, outcome.text)


def test_every_edit_of_a_specimen_fits_and_names_its_source():
    for fault in FAULTS:
        assert catalogue.source_of(fault, faulty=True) != catalogue.source_of(fault, faulty=False)
        assert fault.source.count("#") == 1 and fault.source.count("/") == 1
    assert len(FAULTS) == 15


@pytest.mark.parametrize("mistake, cause, text", [
    ("right", None, ""),
    ("own_share", "missing_reduction", "on every rank, total is what the rank's own shard of x gives"),
    ("mean", "average_for_sum", "total is the golden's divided by 2, the number of ranks"),
    ("twice", "double_count", "total is the golden's times 2, the number of ranks"),
    ("first_shard", "own_bias", "if every rank has the first rank's shard of x"),
    ("drift", "differs_between_ranks", "rank 0 agrees with the golden, rank 1 does not"),
    ("one_rank", "gradient_on_one_rank", "rank 0 has total, rank 1 has None"),
])  # fmt: skip
def test_a_sum_over_ranks_is_explained(mistake, cause, text, pools):
    report = check(functions.target(mistake), pools(2), raises=False)
    causes = report.environment["ranks"]["causes"]
    assert [c["cause"] for c in causes] == ([] if cause is None else [cause]), str(report)
    if cause is None:
        assert report.ok, str(report)
        return
    assert not report.ok and causes[0]["proven"] and text in causes[0]["text"]
    assert report.findings[0].probe == "ranks" and text in report.findings[0].text


@pytest.mark.parametrize("mistake, text", [
    ("other_name", "no rank returns total; returned: sum"),
    ("writes", "the candidate writes to its input x on rank 1; copy it first, or declare mutates=('x',)"),
])  # fmt: skip
def test_what_a_step_returns_and_writes_is_judged_too(mistake, text, pools):
    report = check(functions.target(mistake), pools(2), raises=False)
    assert report.verdict == "fail" and [f.text for f in report.findings] == [text], str(report)


def test_a_step_that_destroys_the_group_fails_and_not_the_next_one():
    with RankPool(2) as pool:
        report = check(functions.target("destroys"), pool, raises=False)
        assert "destroyed the process group" in report.findings[0].text and not pool.alive
    assert check(functions.target("right"), 2).ok


@pytest.mark.parametrize("mesh", [
    {"dp": 2, "tp": 2},
    pytest.param({"dp": -1, "tp": 2}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_sum_over_one_mesh_dimension_only_is_named(mesh, pools):
    report = check(functions.two_dimensional(mesh), pools(4), raises=False)
    (cause,) = report.environment["ranks"]["causes"]
    assert cause["cause"] == "missing_reduction" and "over dp" in cause["text"]


def test_gradients_through_the_candidate_are_judged_too(pools):
    assert check(functions.layer("right"), pools(2)).ok
    report = check(functions.layer("unreduced"), pools(2), raises=False)
    causes = {c["tensor"]: c["cause"] for c in report.environment["ranks"]["causes"]}
    assert causes == {"weight.grad": "missing_reduction"}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the kernels run on the GPU here")
def test_interpreted_kernels_are_as_quick_on_a_rank_as_in_a_check(pools):
    pytest.importorskip("triton", reason="the interpreter is Triton's")
    assert pools(2).run(functions.interprets_quickly, [()] * 2) == [True] * 2


@pytest.mark.parametrize("placements, text", [
    ({"x": "rows"}, "placements['x']: expected Shard(i), Replicate() or Partial()"),
    ({"x": Shard(3)}, "placements['x']: Shard(dim=3), but x has 2 axes: [6, 3]"),
    ({"z": Shard(0)}, "placements: 'z' is no input or result; there are: "),
])  # fmt: skip
def test_placements_that_make_no_sense_are_refused(placements, text):
    with pytest.raises((TypeError, assay.TargetError)) as raised:
        functions.target("right", placements)
    assert text in str(raised.value)


def test_a_mesh_that_does_not_fit_the_ranks_is_refused(pools):
    with pytest.raises(assay.TargetError, match="needs 4 ranks for its mesh .* but there are 2"):
        check(functions.two_dimensional({"dp": 2, "tp": 2}), pools(2))


@pytest.mark.parametrize("mistake, texts", [
    ("hangs", ("rank 1 did not answer in 3 s: it is in sleeping (rank_functions.py:",
               "rank 0 waits in all_reduce, called in failing (rank_functions.py:")),
    pytest.param("returns", ("rank 1 has returned without that call", "rank 0 waits in all_reduce"),
                 marks=pytest.mark.slow),
    pytest.param("other_call", ("wait for each other in different calls", "rank 0 in all_reduce", "rank 1 in barrier"),
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_a_missing_rank_is_named_and_nobody_waits_forever(mistake, texts):
    with RankPool(2, limit_s=3.0) as pool, pytest.raises(RankError) as raised:
        pool.run(functions.failing, [(mistake,)] * 2)
    assert all(text in str(raised.value) for text in texts), raised.value


def test_a_rank_that_is_killed_is_named():
    with RankPool(2, limit_s=20.0) as pool, pytest.raises(RankError, match="^rank 1 was killed by SIGKILL$"):
        pool.run(functions.failing, [("killed",)] * 2)


def verify(folder, *arguments, launcher=()):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [*(launcher or (sys.executable,)), "-m", "goldsmith", "verify", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def user_file(tmp_path):
    source = Path(functions.__file__).read_text()
    (tmp_path / "mine.py").write_text(source + '\nRIGHT = target("right")\nWRONG = target("mean")\n')
    return tmp_path


def test_verify_judges_a_users_file_on_ranks(user_file):
    done = verify(user_file, "mine.py", "--ranks", "2", "--device", "cpu", "--json", "out.json")
    assert done.returncode == 1, done.stdout + done.stderr
    proofs = json.loads((user_file / "out.json").read_text())["proofs"]
    assert [p["verdict"] for p in proofs] == ["pass", "fail"]
    (cause,) = proofs[1]["report"]["environment"]["ranks"]["causes"]
    assert cause["cause"] == "average_for_sum" and cause["proven"]
    assert "An average where a sum belongs" in done.stdout


@pytest.mark.slow
def test_verify_judges_operators_on_ranks(tmp_path):
    done = verify(tmp_path, "mhc.post", "router", "--ranks", "2", "--quick", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks passed" in done.stdout


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
def test_verify_runs_under_torchrun(user_file):
    done = verify(user_file, "mine.py:RIGHT", "--device", "cpu", launcher=TORCHRUN)
    assert done.returncode == 0 and "All checks passed" in done.stdout, done.stdout + done.stderr


SERVES = "from goldsmith.assay.ranks import launched; launched.serve(1, limit_s=3.0)"
JUDGES = """
import torch
from distributed import rank_functions as functions
from goldsmith.assay.ranks import RankError, launched
try:
    launched.START_S = {start_s}
    ranks = launched.LaunchedRanks(limit_s={limit_s})
    ranks.run(functions.{function}, [(torch.ones(2, 3),)] * 2)
except RankError as error:
    print(error)
"""
ENDS = "from goldsmith.assay.ranks import launched; launched.end_without_a_run()"


def launched_ranks(*programs):
    """(exit status, stdout) of each rank's program, as a launcher without a store of its own starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], env={**os.environ, **common, "RANK": str(rank)}, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        for rank, program in enumerate(programs)
    ]  # fmt: skip
    try:
        judged = started[0].communicate(timeout=120)[0]
        others = started[1:]
        return [(started[0].returncode, judged), *((one.wait(2 if judged else 60), "") for one in others)]
    except subprocess.TimeoutExpired:  # a rank that hangs, as it should
        return [(started[0].returncode, judged)]
    finally:
        for one in started:
            one.kill()
            one.wait()
            one.stdout.close()


@pytest.mark.parametrize("function, limit_s, texts", [
    pytest.param("hangs_on_rank_1", 3.0, ("rank 1 did not answer in 3 s: it is in sleeping (rank_functions.py:",
                                          "rank 0 waits in all_reduce, called in right (rank_functions.py:"),
                 marks=pytest.mark.sweep(4, part=0)),
    pytest.param("ends_on_rank_1", 60.0, ("rank 1 has ended, or no longer runs",), marks=pytest.mark.sweep(4, part=1)),
])  # fmt: skip
def test_a_launchers_rank_that_is_missing_is_named(function, limit_s, texts):
    judges = JUDGES.format(start_s=60.0, limit_s=limit_s, function=function)
    (status, judged), *_ = launched_ranks(judges, SERVES)
    assert all(text in judged for text in texts), judged


@pytest.mark.parametrize("wrong, text", [
    ({"RANK": "5"}, "RANK is 5, but WORLD_SIZE is 2; expected 0 to 1"),
    ({"RANK": "x"}, "RANK is 'x'; expected a number"),
    ({"MASTER_PORT": ""}, "MASTER_PORT is ''; expected a number"),
])  # fmt: skip
def test_a_launchers_variables_that_make_no_sense_are_named(wrong, text):
    right = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert LaunchedRank.of(right).rank == 1 and LaunchedRank.of({}) is None
    with pytest.raises(Failure, match=text):
        LaunchedRank.of({**right, **wrong})


@pytest.mark.sweep(4, part=2)
def test_a_launchers_other_ranks_end_if_there_is_nothing_to_run():
    assert [status for status, _ in launched_ranks(ENDS, SERVES)] == [0, 0]


@pytest.mark.sweep(4, part=3)
def test_a_launchers_rank_that_does_not_start_is_named():
    ((_, judged),) = launched_ranks(JUDGES.format(start_s=0.0, limit_s=1.0, function="right"))
    assert "of 2 ranks, rank 1 did not start within 1 s" in judged


@pytest.mark.slow
def test_a_target_on_ranks_says_what_it_needs(user_file):
    done = verify(user_file, "mine.py:RIGHT")
    assert done.returncode == 2 and "add --ranks 2" in done.stdout + done.stderr
