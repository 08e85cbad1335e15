"""examples/train_tiny_moe.py: on two small plays; a stopped run resumes and reaches the same weights."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_moe.py"
PLAY = "# A play\n\n**FIRST**\nWho's there?\n\n**SECOND**\nNay, answer me: stand, and unfold yourself.\n\n"


@pytest.fixture
def example(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_tiny_moe", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    texts = {"one": PLAY * 20, "two": PLAY[::-1] * 20, module.HELD_OUT[0]: PLAY * 3, module.HELD_OUT[1]: PLAY * 2}
    monkeypatch.setattr(module, "plays", lambda: texts)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda name: "3.0.0")

    def run(output, steps=4):
        words = f"--steps {steps} --batch 2 --length 16 --hidden 64 --intermediate 16 --experts 4 --layers 1"
        words += f" --vocabulary 300 --save-every 1 --check-every 2 --device cpu --output {output}"
        monkeypatch.setattr(sys, "argv", ["train_tiny_moe.py", *words.split()])
        module.main()
        return (output / "model.safetensors").read_bytes()

    module.run = run
    return module


def test_transformers_reads_the_written_model(example, tmp_path):
    example.run(tmp_path / "new" / "moe")
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "new" / "moe") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert model.dtype == torch.bfloat16 and tokenizer.decode(tokenizer(PLAY)["input_ids"]) == PLAY
    words = tokenizer("**FIRST**\n", return_tensors="pt")
    assert model.generate(**words, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape[1] > 3
    facts = json.loads((tmp_path / "new" / "moe" / "training.json").read_text())
    assert facts["steps_done"] == 4 and facts["arguments"]["seed"] == 0 and facts["validation_loss"] > 0
    card = (tmp_path / "new" / "moe" / "README.md").read_text()
    assert list(facts["held_out_loss_by_step"]) == ["2", "4"]
    assert "MIT licence" in card and "--steps 4 --batch 2" in card and f"{facts['validation_loss']:.4f}" in card


def test_a_stopped_run_resumes_and_reaches_the_same_weights(example, tmp_path, monkeypatch):
    whole, real = example.run(tmp_path / "whole"), example.rate

    def rate(step, args):
        if step == 3:
            raise KeyboardInterrupt
        return real(step, args)

    monkeypatch.setattr(example, "rate", rate)
    with pytest.raises(KeyboardInterrupt):
        example.run(tmp_path / "stopped")
    monkeypatch.setattr(example, "rate", real)
    assert example.run(tmp_path / "stopped") == whole
    with pytest.raises(SystemExit, match="is of a run with other arguments"):
        example.run(tmp_path / "stopped", steps=5)


def test_the_state_with_the_lowest_loss_is_written(example, tmp_path, monkeypatch):
    losses, seen, real = [3.0, 1.0, 2.0], [], example.validate

    def validate(model, tokens, args):
        seen.append({name: p.detach().to(torch.bfloat16, copy=True) for name, p in model.named_parameters()})
        return losses[len(seen) - 1] if len(seen) <= len(losses) else real(model, tokens, args)

    monkeypatch.setattr(example, "validate", validate)
    example.run(tmp_path / "moe", steps=6)
    written = load_file(tmp_path / "moe" / "model.safetensors")
    assert all(torch.equal(written[name], seen[1][name]) for name in written) and len(seen) == 4
    assert any(not torch.equal(written[name], seen[2][name]) for name in written)
    facts = json.loads((tmp_path / "moe" / "training.json").read_text())
    assert facts["best_step"] == 4 and facts["held_out_loss_by_step"] == {"2": 3.0, "4": 1.0, "6": 2.0}
    assert "the one of step 4: the lowest of 3 losses" in (tmp_path / "moe" / "README.md").read_text()
