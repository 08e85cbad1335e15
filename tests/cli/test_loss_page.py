"""The page of a training run: what it leads with, and the units of its axes."""

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

from goldsmith.hf.training.records import loss_page


def test_the_page_leads_with_the_held_out_loss_and_its_axes_have_units():
    loss = [(k, 2.0 - k / 10) for k in range(1, 6)]
    training = "The training loss fell from 1.900 to 1.500"
    assert loss_page.headline(loss, 9) == f"{training} nats per token in 5 of 9 steps."
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
