"""The loop: losses that packing and accumulation leave alone, checkpoints, and runs that are killed."""

import errno
import json
import os
import signal
import types

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

import torch

from cli.finetune_tools import (
    IDENTITY,
    rows_without_times,
    same,
    session,
    tiny_documents,
    tiny_model,
    tiny_trainer,
    trained,
)
from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.hf.training.data import attention_masks
from goldsmith.hf.training.data.packing import UNTRAINED, RowStream, batch
from goldsmith.hf.training.errors import Diverged, TrainingError
from goldsmith.hf.training.records import journal
from goldsmith.hf.training.run.loss import summed_loss
from goldsmith.hf.training.run.schedule import Schedule, warmup_steps
from goldsmith.hf.training.run.session import LOG, RunCallbacks, TrainingSession, locked
from goldsmith.hf.training.run.trainer import Trainer
from goldsmith.hf.training.run.training_steps import TrainingSteps
from hf import goldens, models


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbs: its folder, and its end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(folder)


# the loss


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "family, changes",
    [
        *((family, {}) for family in models.FAMILIES),
        ("qwen3_moe", {"attn_implementation": "eager"}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
        ("gpt_oss", {"layer_types": ["sliding_attention"], "sliding_window": 3}),
    ],
)
def test_packed_documents_have_the_same_loss_and_gradient_as_alone(family, changes):
    model = models.model(family, **changes)
    documents = tiny_documents(7, vocabulary=48)
    for document in documents[::2]:
        document.trained[: len(document) // 2] = [False] * (len(document) // 2)
    masks = attention_masks.masks(model)
    wide, name = goldens.InItsDtype(model), "model.embed_tokens.weight"

    def loss(rows, embedding, keeps_apart):
        called = lambda **inputs: wide.outputs(embedding.dtype, {name: embedding}, inputs)  # noqa: E731
        return summed_loss(called, batch(rows, pad=0), keeps_apart)

    def packed(embedding):
        halves = [documents[:3], documents[3:]]
        return {"one": loss([documents], embedding, masks), "two": loss(halves, embedding, masks)}

    def alone(embedding):
        return dict.fromkeys(("one", "two"), loss([[d] for d in documents], embedding, attention_masks.no_masks))

    def draw(make):
        return {"embedding": make.normal(*model.get_input_embeddings().weight.shape, std=0.5)}

    target = assay.Target(packed, alone, cases=[Case("documents", draw, {})], name=family)
    assay.check(target, probes=["values", "ensemble"])


def test_a_model_in_which_documents_attend_to_each_other_is_detected(monkeypatch):
    assert attention_masks.keeps_apart(models.model("olmoe"), attention_masks.no_masks)
    leaky = models.model("gpt_oss")
    assert not attention_masks.keeps_apart(leaky, attention_masks.no_masks)
    monkeypatch.setattr(attention_masks, "_by_layer", lambda model, inputs: None)
    with pytest.raises(TrainingError, match="In GptOssForCausalLM a document attends to the one before it.*--no-pack"):
        attention_masks.masks(leaky)


def test_a_document_does_not_attend_to_the_one_before_it():
    model = tiny_model(64)
    first, second = tiny_documents(2, least=5)
    alone = batch([[first, second]], pad=0)
    first.ids[0] = (first.ids[0] + 1) % 60
    other = batch([[first, second]], pad=0)
    with torch.no_grad():
        logits = [
            model(input_ids=b.input_ids, position_ids=b.position_ids, use_cache=False).logits for b in (alone, other)
        ]
    changed = (logits[0] != logits[1]).any(-1)[0]
    assert changed[: len(first)].all() and not changed[len(first) :].any()


class Bigrams(torch.nn.Module):
    """The simplest language model: the logits after a token are its row of a table."""

    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, input_ids, logits_to_keep, **others):
        return types.SimpleNamespace(logits=self.table[input_ids[:, logits_to_keep]])


@pytest.mark.parametrize("batch_size, grad_accum", [(4, 1), (1, 4), (3, 2)])
def test_accumulated_small_batches_equal_one_large_batch(batch_size, grad_accum):
    stream = RowStream(tiny_documents(), 16, packed=True, seed=0)
    assert len({stream.batch(k, 1).targets for k in range(4)}) > 1  # a mean of means is another number

    def step(table):
        model, by_name = Bigrams(table), {}
        training_steps = TrainingSteps(
            1, batch_size, grad_accum, Schedule("cosine", 1.0, 1, 1), limit=4, max_grad_norm=0.0
        )
        trainer = Trainer(model, dict(model.named_parameters()), stream, training_steps)
        trainer.optimizer.step = lambda: by_name.update(gradient=model.table.grad.clone())
        with torch.enable_grad():
            row = trainer.step()
        return row["loss"], row["grad_norm"], by_name["gradient"]

    def golden(table):
        whole = stream.batch(0, 4)
        of, to = whole.input_ids[:, :-1], whole.labels[:, 1:]
        table = table.detach().requires_grad_()
        lost = -table[of].log_softmax(-1).gather(-1, to.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        loss = lost[to != UNTRAINED].sum() / int((to != UNTRAINED).sum())
        (gradient,) = torch.autograd.grad(loss, table)
        return loss, gradient.square().sum().sqrt(), gradient

    def draw(make):
        return {"table": make.normal(64, 64)}

    target = assay.Target(step, golden, cases=[Case("table", draw, {})], backward=None)
    assay.check(target, probes=["values", "ensemble", "statistics"])


def test_the_last_step_of_an_epoch_has_the_remaining_rows():
    trainer = tiny_trainer(batch_size=2)
    rows = len(trainer.stream)
    trainer.training = TrainingSteps(2, rows - 1, 1, trainer.training.schedule, limit=rows)
    trainer.done = 1
    assert [b.input_ids.shape[0] for b in trainer._window()] == [1]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    stream = RowStream(tiny_documents(40), 16, packed=True, seed=3)
    orders = [[stream._place(epoch * len(stream) + k) for k in range(len(stream))] for epoch in range(3)]
    assert all(sorted(order) == list(range(len(stream))) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert sorted(k for row in stream.rows for k in row) == list(range(40))
    assert all(sum(len(stream.documents[k]) for k in row) <= 16 for row in stream.rows)


def test_the_learning_rate_follows_its_schedule():
    schedule = Schedule("linear", 1.0, warmup_steps(0.2, 10), 10)
    assert [schedule.at(k) for k in (1, 2, 3, 10)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1 / 8])
    assert Schedule("cosine", 1.0, 0, 4).at(3) == pytest.approx(0.5)
    assert warmup_steps(3, 10) == 3 and warmup_steps(30, 10) == 9


# checkpoints


def test_a_continued_run_has_the_bits_and_the_log_of_an_uninterrupted_one(tmp_path, whole):
    for done in (1, 4):
        folder = tmp_path / str(done)
        stops = iter([False] * done + [True])
        first = session(folder)
        first.output.mkdir()
        first.run(
            tiny_trainer(),
            RunCallbacks(stop=stops.__next__),
            evaluation=RowStream(tiny_documents(4, seed=9), 16, packed=True, seed=0),
        )
        assert same(trained(folder), whole[1])
        assert rows_without_times(folder) == rows_without_times(whole[0])


def in_a_child(work):
    """Runs `work` in a fork; returns how it ended."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitpid(child, 0)[1]


def killed_after(folder, calls, steps=6):
    """Trains in a child that kill -9 ends at its `calls`-th call of the system that touches a file."""
    count = 0

    def counted(real):
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            if count == calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return wrapper

    def work():
        for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "open"):
            setattr(os, name, counted(getattr(os, name)))
        trained(folder, steps, keep=1, save_every=3)
        os._exit(0)

    return in_a_child(work)


@pytest.mark.forks
def test_after_kill_9_at_any_file_operation_the_same_command_has_the_same_result(tmp_path, whole):
    ended, calls = signal.SIGKILL, 0
    while ended == signal.SIGKILL:
        calls += 1
        folder = tmp_path / str(calls)
        folder.mkdir()
        ended = killed_after(folder, calls)
        assert same(trained(folder, keep=1, save_every=3), whole[1]), calls
        assert rows_without_times(folder) == rows_without_times(whole[0]), calls
        assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000006"]
    assert ended == 0 and calls > 20


@pytest.mark.forks
def test_a_run_that_is_killed_repeatedly_has_the_same_result(tmp_path, whole):
    ended, calls = signal.SIGKILL, 14
    while ended == signal.SIGKILL:
        ended = killed_after(tmp_path, calls)
        calls += 1
    assert same(trained(tmp_path), whole[1]) and rows_without_times(tmp_path) == rows_without_times(whole[0])


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path, whole, monkeypatch):
    real, count = os.fsync, 0

    def full(handle):
        nonlocal count
        count += 1
        if count == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingError, match="After step 4, .*: No space left on device; the checkpoint of step 2"):
        trained(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.undo()
    assert same(trained(tmp_path), whole[1]) and rows_without_times(tmp_path) == rows_without_times(whole[0])


def test_a_run_with_other_threads_continues_with_a_note(tmp_path):
    trained(tmp_path)
    notes = []
    other = TrainingSession(tmp_path, IDENTITY, {"threads": 2})
    assert other.find("auto", RunCallbacks(note=notes.append)).step == 6
    (note,) = notes
    assert note.startswith("threads was 1 and is 2: ") and "not bit for bit" in note


def test_starting_over_keeps_earlier_files(tmp_path, whole):
    trained(tmp_path)
    assert same(trained(tmp_path, resume="never"), whole[1])
    earlier = tmp_path / "earlier-1"
    assert sorted(p.name for p in earlier.rglob("*") if p.parent.name != "step-000004") == sorted(
        ["checkpoints", LOG, "step-000004", "step-000006", "state.json", "state.safetensors"]
    )
    assert rows_without_times(tmp_path) == rows_without_times(whole[0]) == rows_without_times(earlier)


def test_a_run_continues_from_the_named_checkpoint(tmp_path, whole):
    trained(tmp_path / "a")
    (tmp_path / "b").mkdir()
    again = trained(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoints" / "step-000004"))
    assert same(again, whole[1]) and rows_without_times(tmp_path / "b") == rows_without_times(whole[0])
    with pytest.raises(TrainingError, match="is not a checkpoint: state.json is missing"):
        trained(tmp_path / "b", resume=str(tmp_path))


def test_a_checkpoint_of_another_model_is_rejected_with_the_parameters_name(tmp_path):
    trained(tmp_path)
    checkpoint = session(tmp_path).find("auto", RunCallbacks())
    trainer = tiny_trainer()
    trainer.parameters.pop("model.layers.0.mlp.gate.weight")
    with pytest.raises(TrainingError, match=r"does not fit this model: model.layers.0.mlp.gate.weight is \(4, 32\)"):
        session(tmp_path).run(trainer, RunCallbacks(), start=checkpoint)


def test_two_runs_cannot_write_to_one_folder(tmp_path):
    with locked(tmp_path), pytest.raises(TrainingError, match="Another run is writing to"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_run_that_writes_nothing_leaves_no_folder(tmp_path):
    (tmp_path / "there").mkdir()
    with locked(tmp_path / "there"), locked(tmp_path / "new" / "run"), locked(tmp_path / "used"):
        (tmp_path / "used" / "log.jsonl").write_text("")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "there", "used", "used/.lock", "used/log.jsonl",
    ]  # fmt: skip


def test_a_log_whose_last_line_was_cut_short_is_read(tmp_path):
    path = tmp_path / LOG
    path.write_text(json.dumps({"step": 1, "loss": 2.0}) + '\n{"step": 2, "lo')
    assert journal.rows(path) == [{"step": 1, "loss": 2.0}]


# what goes wrong


def test_a_loss_that_is_not_finite_names_the_step_and_the_module_and_changes_nothing(tmp_path):
    trainer = tiny_trainer()
    trainer.step()
    before = trainer.state()
    with torch.no_grad():
        trainer.model.model.layers[0].self_attn.o_proj.weight[0, 0] = torch.inf
    with pytest.raises(Diverged, match=r"Step 2: the loss is nan.*first non-finite value is in model\.layers\.0"):
        trainer.step()
    assert same(trainer.state(), before) and trainer.done == 1
    assert all(p.grad is None for p in trainer.parameters.values())


def test_a_gradient_that_is_not_finite_stops_as_well():
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.inf

    trainer = tiny_trainer()
    trainer.model.model.norm.register_forward_hook(lambda module, args, out: Steep.apply(out))
    with pytest.raises(Diverged, match="Step 1: the gradient's norm is (nan|inf)"):
        trainer.step()
    assert trainer.done == 0


def test_ctrl_c_between_steps_leaves_a_checkpoint_of_the_step(tmp_path):
    stops = iter([False, False, False, True])
    saved = []
    session(tmp_path).run(
        tiny_trainer(), RunCallbacks(stop=lambda: next(stops), saved=lambda rows: saved.append(len(rows)))
    )
    assert saved == [2, 3]


def test_a_trainer_before_its_first_step_has_nothing_to_save(tmp_path):
    session(tmp_path).run(tiny_trainer(), RunCallbacks(stop=lambda: True))
    assert not (tmp_path / "checkpoints").exists()
    assert isinstance(tiny_trainer(), Trainer)
