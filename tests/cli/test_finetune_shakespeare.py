"""examples/shakespeare-moe, a model that has learnt something, and `goldsmith finetune` on a play it has not seen."""

import contextlib
import json
import math
import os
import random
import signal
import time
from collections import Counter

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from goldsmith.cli import app
from goldsmith.hf import convert, load_adapter
from goldsmith.hf.training.records.journal import rows
from hf import goldens
from repo.tree import ROOT

MODEL, TEXT = ROOT / "examples" / "shakespeare-moe", ROOT / "examples" / "macbeth"


def plain():
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    return model


def going_on(model, text="**MACBETH**  \nIs this a dagger which I see"):
    """The text with what the model adds to it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    words = tokenizer(text, return_tensors="pt")
    generated = model.generate(**words, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    return tokenizer.decode(generated[0])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The folder with some of the play to learn, and some to see what was learnt."""
    folder = tmp_path_factory.mktemp("text")
    for name, lines in (("acts-1-4.txt", 600), ("act-5.txt", 100)):
        (folder / name).write_text("".join((TEXT / name).read_text().splitlines(keepends=True)[:lines]))
    return folder


def command(text, output, *more):
    words = ["finetune", MODEL, "--data", text / "acts-1-4.txt", "--eval-data", text / "act-5.txt", "--output", output]
    words += ["--document", "whole", "--lr", "0.004", "--seq-len", "64", "--batch-size", "4", "--threads", "1"]
    return [str(word) for word in [*words, "--save-every", "2", *more]]


def finished(*words):
    done = CliRunner().invoke(app, command(*words))
    assert done.exit_code == 0, done.output
    return done.output


def killed(*words, when):
    """Begins, and ends by kill -9 as soon as `when` says so; the status of the process."""
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
                CliRunner().invoke(app, command(*words))
        finally:
            os._exit(0)
    while not when():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_the_committed_model_is_small_and_has_a_model_card():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 8 * 2**20
    facts, card = json.loads((MODEL / "training.json").read_text()), (MODEL / "README.md").read_text()
    assert f"{facts['validation_loss']:.4f} nats per token" in card and "macbeth" in facts["held_out"]
    assert "public domain" in card and "MIT licence" in card and "license: apache-2.0" in card
    assert facts["held_out_loss_by_step"][str(facts["best_step"])] == min(facts["held_out_loss_by_step"].values())


def test_stock_transformers_loads_the_model_and_it_beats_token_frequencies():
    model, tokenizer = plain(), AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer((TEXT / "act-5.txt").read_text(), return_tensors="pt", verbose=False).input_ids
    counts = Counter(ids[0].tolist())
    frequencies = -sum(n / ids.numel() * math.log(n / ids.numel()) for n in counts.values())
    with torch.no_grad():
        few = ids[:, :1024]
        assert float(model(few, labels=few).loss) < frequencies - 1  # of the text itself, which flatters them
    text = going_on(model)
    assert text.startswith("**MACBETH**  \nIs this a dagger which I see") and len(set(text.split()[10:])) > 3, text


@pytest.mark.sweep(2, part=0)
@pytest.mark.forks
def test_a_play_is_learnt_despite_kill_9_and_stock_peft_generates_it(text, tmp_path):
    more = ("--steps", "8", "--eval-every", "8")
    finished(text, tmp_path / "whole", *more)
    log = tmp_path / "cut" / "log.jsonl"
    how = killed(
        text, tmp_path / "cut", *more, when=lambda: log.exists() and any("loss" in row for row in rows(log)[3:])
    )
    assert how == signal.SIGKILL
    assert "Resuming after step" in finished(text, tmp_path / "cut", *more)
    whole, cut = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut

    losses = [row["eval_loss"] for row in rows(log) if "eval_loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    loss = [row["loss"] for row in rows(log) if "loss" in row]
    assert len(loss) == 8 and loss[-1] < loss[0]
    assert (tmp_path / "cut" / "loss.html").read_text().count("<svg") == 4

    peft = PeftModel.from_pretrained(plain(), tmp_path / "cut").eval()
    ours = load_adapter(convert(plain(), format="fp32"), tmp_path / "cut").eval()
    goldens.check_alike(ours, peft)
    assert going_on(peft) == going_on(ours)


@pytest.mark.forks
@pytest.mark.slow
def test_kill_9_at_random_moments_changes_no_bit(text, tmp_path, seed):
    more, draw = ("--steps", "24", "--dropout", "0.1", "--lora-modules", "q_proj,v_proj"), random.Random(seed)
    finished(text, tmp_path / "whole", *more)
    for _ in range(12):
        end = time.monotonic() + draw.uniform(0.5, 5)
        if killed(text, tmp_path / "cut", *more, when=lambda end=end: time.monotonic() > end) != signal.SIGKILL:
            break
    finished(text, tmp_path / "cut", *more)
    whole, cut = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
    logs = [
        [(r["step"], r.get("loss"), r.get("eval_loss")) for r in rows(tmp_path / n / "log.jsonl")]
        for n in ("whole", "cut")
    ]
    assert logs[0] == logs[1] and os.path.exists(tmp_path / "cut" / "loss.html")
