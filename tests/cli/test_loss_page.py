"""The page of a training run: what it leads with, and the units of its axes."""

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

from goldsmith.cli.finetune.record import result_of
from goldsmith.hf.training.records import loss_page


def test_the_page_leads_with_the_held_out_loss_and_its_axes_have_units():
    loss = [(k, 2.0 - k / 10) for k in range(1, 6)]
    training = "The training loss was 1.900 at the first step and 1.500 at the last"
    alone = "The training loss was 1.900 nats per token at the first step and 1.500 after 5 of 9 steps."
    assert loss_page.headline(loss, 9) == alone
    heldout = [(1, 2.5), (3, 2.0), (5, 2.25)]
    first = "The held-out loss fell from 2.500 to 2.250 nats per token in 5 of 9 steps."
    assert loss_page.headline(loss, 9, heldout) == first
    rows = [
        {"step": k, "loss": v, "lr": 1e-4, "grad_norm": 1.0, "seconds": 1.0, "tokens": 9, "tokens_per_s": 9.0}
        for k, v in loss
    ]
    rows += [{"step": k, "eval_loss": v} for k, v in heldout]
    text = loss_page.page(rows, 9, title="m", trained=[], run=[])
    assert f"<h1>{first}</h1>" in text and f"The lowest held-out loss, 2.000, was at step 3. {training}." in text
    assert text.count('<span class="unit-x">step</span>') == 4
    for unit in ("nats per token", "tokens per second"):
        assert f'<span class="unit">{unit}</span>' in text
    alone = loss_page.page(rows[:5], 9, title="m", trained=[], run=[])
    assert "No held-out text was given (--eval-data)" in alone and "held-out text</span>" not in alone


def test_a_training_loss_rises_or_falls_only_in_the_mean_of_several_steps():
    few, many = [(k, 4.0 + k % 2) for k in range(1, 20)], [(k, 5.0 - k / 40) for k in range(1, 41)]
    assert "rose" not in loss_page.headline(few, 19) and "fell" not in loss_page.headline(few, 19)
    assert loss_page.headline(many, 40) == "The training loss fell from 4.938 to 4.037 nats per token in 40 steps."
    more = {"lr": 1e-4, "grad_norm": 1.0, "seconds": 1.0, "tokens": 9, "tokens_per_s": 9.0}
    rows = [{"step": k, "loss": v, **more} for k, v in many] + [{"step": 40, "eval_loss": 4.5}]
    text = loss_page.page(rows, 40, title="m", trained=[], run=[])
    assert "The training loss fell from 4.938 to 4.037 (means of 4 steps)." in text


def test_the_command_shows_the_numbers_of_the_page():
    """A single step's loss is noise: the first and the last of these rise while training falls."""
    rows = [{"step": k, "loss": 3.0 - k / 20 + ((k == 20) - (k == 1)) / 2} for k in range(1, 21)]
    result = result_of([*rows, {"step": 20, "eval_loss": 2.5}], 20, 20)
    first, last = result["loss"]["first"], result["loss"]["last"]
    assert rows[0]["loss"] < rows[-1]["loss"] and first > last and result["loss"]["steps"] == 2
    course = f"The training loss fell from {first:.3f} to {last:.3f} nats per token in 20 steps."
    assert loss_page.headline([(row["step"], row["loss"]) for row in rows], 20) == course
    assert result["eval_loss"] == {"first": 2.5, "last": 2.5} and result["eval_perplexity"] is None
    assert result["status"] == "trained" and result_of([], 0, 20)["loss"] is None
