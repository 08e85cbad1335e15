"""`goldsmith finetune` on two ranks: the rows and the bits of one process, and no rank that outlives another."""

import json
import os
import signal

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from safetensors.torch import load_file
from torch.distributed import HashStore
from typer.testing import CliRunner

from cli.finetune_tools import VERSE, rows_without_times, saved_place, tiny_trainer
from cli.rank_processes import RankProcesses, environments
from goldsmith.cli import app
from goldsmith.core import processors
from goldsmith.hf.training.errors import TrainingError
from goldsmith.hf.training.model import device as places
from goldsmith.hf.training.options import Options
from goldsmith.hf.training.ranks import presence
from goldsmith.hf.training.ranks.group import LAUNCH, Ranks, join
from goldsmith.hf.training.run.trainer import Trainer

pytestmark = pytest.mark.forks


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = saved_place(tmp_path_factory.mktemp("ranks"))
    (folder / "held.txt").write_text(VERSE.upper())
    return folder


def words(place, output, *more):
    fixed = ["finetune", place / "model", "--data", place / "verse.txt", "--output", output, "--lr", "0.01"]
    fixed += ["--seq-len", "64", "--batch-size", "1", "--threads", "1", "--save-every", "2"]
    return [str(word) for word in [*fixed, *([] if "--epochs" in more else ["--steps", "6"]), *more]]


def run(place, output, *more):
    return CliRunner().invoke(app, words(place, output, *more))


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_ranks_have_the_bits_of_one_process_with_two_batches_in_a_step(place, tmp_path):
    """A sum of two gradients has the same bits, whether autograd or the ranks add them; 7 rows leave one rank idle."""
    more = ("--epochs", "1", "--eval-data", str(place / "held.txt"), "--lora-modules", "q_proj")
    two = RankProcesses(tmp_path, words(place, tmp_path / "two", *more))
    assert run(place, tmp_path / "one", *more, "--grad-accum", "2").exit_code == 0
    (status, shown), (other_status, other) = two.ended()
    assert (status, other_status, other) == (0, 0, ""), shown + other
    assert "4 steps of 1 row on each of 2 ranks" in " ".join(shown.split()) and "step 4 of 4" in shown
    assert same(adapter(tmp_path / "two"), adapter(tmp_path / "one"))
    assert rows_without_times(tmp_path / "two") == rows_without_times(tmp_path / "one")
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["machine"]["ranks"] == 2 and record["result"]["status"] == "trained"
    refused = run(place, tmp_path / "two", *more)
    assert refused.exit_code == 2 and "the number of ranks was 2 and is 1" in " ".join(refused.output.split())


def killed_at(rank, done):
    """Before a run: kill -9 of this rank when it begins the step after `done`."""

    def before(own):
        step = Trainer.step

        def killed(trainer):
            if own == rank and trainer.done == done:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(trainer)

        Trainer.step = killed

    return before


def test_after_kill_9_of_either_rank_all_end_and_the_same_command_has_the_same_bits(place, tmp_path):
    command = words(place, tmp_path / "whole", "--dropout", "0.1")
    assert [status for status, _ in RankProcesses(tmp_path, command).ended()] == [0, 0]
    command = words(place, tmp_path / "killed", "--dropout", "0.1")
    for rank, done in ((1, 3), (0, 5)):
        ranks = RankProcesses(tmp_path, command, before=killed_at(rank, done))
        ends = ranks.ended()
        assert ends[rank][0] == -signal.SIGKILL and ends[1 - rank][0] == 2
        assert ranks.times[1] - ranks.times[0] < 30
        last = " ".join(ends[1 - rank][1].split())
        assert f"Rank {1 - rank} of 2 ends: rank {rank} (process" in last and "was it killed?" in last, last
    assert [status for status, _ in RankProcesses(tmp_path, command).ended()] == [0, 0]
    assert same(adapter(tmp_path / "killed"), adapter(tmp_path / "whole"))
    assert rows_without_times(tmp_path / "killed") == rows_without_times(tmp_path / "whole")


def test_ranks_with_other_options_or_data_are_named_once(place, tmp_path):
    (tmp_path / "verse.txt").write_text(VERSE.replace("summer", "winter"))
    both = [words(place, tmp_path / "out"), words(place, tmp_path / "out", "--seed", "1")]
    both[1][both[1].index("--data") + 1] = str(tmp_path / "verse.txt")
    texts = [" ".join(text.split()) for status, text in RankProcesses(tmp_path, both).ended() if status == 2]
    message = "Rank 1 was started for another run than rank 0: --seed is 0 on rank 0 and 1 on rank 1; the content of"
    assert sum(message in text for text in texts) == 1 and "--data differs" in " ".join(texts), texts
    assert len(texts) == 2 and not (tmp_path / "out").exists()


def test_a_dry_run_on_one_rank_only_is_named(place, tmp_path):
    command = words(place, tmp_path / "out")
    texts = [" ".join(text.split()) for _, text in RankProcesses(tmp_path, [command, [*command, "--dry-run"]]).ended()]
    assert sum("--dry-run is False on rank 0 and True on rank 1." in text for text in texts) == 1, texts


def test_an_error_of_one_rank_ends_all_with_its_message(place, tmp_path):
    both = [words(place, tmp_path / "out"), words(place, tmp_path / "out")]
    both[1][both[1].index("--data") + 1] = str(tmp_path / "missing.txt")
    (first, shown), (second, own) = RankProcesses(tmp_path, both).ended()
    assert (first, second) == (2, 2)
    assert own.startswith("Rank 1 of 2:") and "missing.txt" in own
    assert "Rank 0 of 2 ends: rank 1 ended: " in " ".join(shown.split()) and "missing.txt" in shown


def test_a_rank_that_does_not_start_is_named():
    with pytest.raises(TrainingError, match="Of 2 ranks, rank 1 did not start within 0 s; rank 0 gives up"):
        Ranks({name: str(value) for name, value in environments(2)[0].items()}, start_s=0.2)


def test_an_incomplete_environment_says_how_ranks_are_started():
    with pytest.raises(TrainingError) as error:
        join({"WORLD_SIZE": "2", "RANK": "0"})
    assert "LOCAL_RANK" in str(error.value) and LAUNCH in str(error.value)
    with pytest.raises(TrainingError, match="RANK is 'x'; expected a number"):
        join({name: "x" for name in environments(2)[0]})
    common = {name: str(value) for name, value in environments(2)[0].items()}
    with pytest.raises(TrainingError, match="RANK is 5, but there are 2 ranks; expected 0 to 1"):
        join({**common, "RANK": "5"})
    assert join({"WORLD_SIZE": "1"}).world == join({}).world == 1


def test_a_rank_that_stands_still_is_noticed(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_S", 0.02)
    monkeypatch.setattr(presence, "LIMIT_S", 0.3)
    monkeypatch.setattr(presence, "GRACE_S", 0.0)
    exits = []
    monkeypatch.setattr(presence.os, "_exit", exits.append)
    store, here = HashStore(), presence.Process.this()
    watches = [presence.Presence(store, rank, [here, here]) for rank in range(2)]
    watches[0].abandon.append(exits.append)
    watches[0].start()  # the second never beats again
    notice = watches[0].wait(10)
    assert str(notice) == f"rank 1 (process {here.number} on {here.host}) has not answered for 0 s"
    watches[0]._thread.join(10)
    assert exits == [notice, 2]
    assert watches[1].leave("ended: another message") == notice  # the first message of all ranks counts


class Unreachable(HashStore):
    """A store that answers no question any more."""

    def check(self, keys):
        raise ConnectionError("connection reset by peer")


class Dying(presence.Process):
    """A killed process that is seen for a moment after its connections have closed."""

    looks = 0

    def gone(self):
        Dying.looks += 1
        return Dying.looks > 3


def test_a_killed_holder_of_the_store_is_named_although_its_connections_close_first(monkeypatch):
    monkeypatch.setattr(presence, "BEAT_S", 0.02)
    monkeypatch.setattr(presence, "GRACE_S", 1.0)
    monkeypatch.setattr(presence.os, "_exit", [].append)
    monkeypatch.setattr(Dying, "looks", 0)
    here = presence.Process.this()
    notices = []
    for first in (Dying(*here), here):
        watch = presence.Presence(Unreachable(), 1, [first, here], first_holds_store=True)
        watch.start()
        notices.append(str(watch.wait(10)))
        watch.close()
        watch._thread.join()  # a watch that outlives the test would end the tests' process
    assert notices[0] == f"rank 0 ({here.place}) has ended without a message; was it killed?"
    assert "rank 0 holds the ranks' store, which no longer answers (connection reset by peer)" in notices[1]


def test_parameters_that_differ_between_ranks_are_named():
    class Another(Ranks):
        world = 2

        def __init__(self):
            pass

        def gathered(self, value):
            return [value, {**value, "lm_head": "another"}]

    trainer = tiny_trainer()
    trainer.parameters = {"lm_head": trainer.parameters.popitem()[1]}
    trainer.ranks = Another()
    with pytest.raises(TrainingError, match="After step 0, lm_head differs between rank 0 and rank 1"):
        trainer.check_ranks()


def test_a_machine_with_several_gpus_says_how_to_use_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = Options(model="m", data="d", output="o", device="cuda")
    assert "torchrun --nproc-per-node 4 -m goldsmith finetune" in places.hint(options)
    assert places.hint(Options(model="m", data="d", output="o", device="cuda:1")) is None
    assert places.of_rank(options, 3, 4).device == "cuda:3"
    with pytest.raises(TrainingError, match="needs a GPU for each of 8 ranks; torch sees 4"):
        places.of_rank(options, 3, 8)
    with pytest.raises(TrainingError, match="--device cuda:1 is one GPU for 4 ranks; give --device cuda"):
        places.of_rank(Options(model="m", data="d", output="o", device="cuda:1"), 3, 4)


def test_ranks_of_a_machine_share_its_processors(monkeypatch):
    bound = []
    monkeypatch.setattr(processors, "allowed", lambda: (0, 1, 2, 3, 4))
    monkeypatch.setattr(processors.allowed, "cache_clear", lambda: None, raising=False)
    monkeypatch.setattr(processors, "_location", lambda processor: (0, 0, processor % 2, processor))  # hyperthreads
    monkeypatch.setattr(processors.os, "sched_setaffinity", lambda process, some: bound.append(some))
    for index in range(2):
        processors.bind(index, 2)
    assert bound == [[0, 2], [4, 1, 3]]
    processors.bind(0, 6)  # fewer processors than ranks
    assert len(bound) == 2
