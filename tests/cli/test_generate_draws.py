"""`goldsmith generate --temperature`: logits that nothing can be drawn by are told in a paragraph."""

import json

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from cli.finetune_tools import saved_model
from goldsmith.cli import app
from goldsmith.hf.offload.generation import FiniteLogits, NothingToDraw


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("draws") / "model")


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = saved_model(tmp_path_factory.mktemp("draws") / "bad")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def run(folder, *words, monkeypatch, tmp_path):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    fixed = ["--prompt", "x", "--device", "cpu", "--max-new-tokens", "2"]
    done = CliRunner().invoke(app, ["generate", str(folder), *fixed, *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done, " ".join(done.stderr.split())


@pytest.mark.parametrize("guard", ["warn", "off"])
def test_a_nan_that_the_guard_ignores_ends_the_run_at_sampling(bad, guard, monkeypatch, tmp_path):
    at = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    assert run(bad, "--guard", guard, **at)[0].exit_code == 0  # greedy: some token is the greatest
    done, output = run(bad, "--guard", guard, "--temperature", "0.8", **at)
    assert done.exit_code == 1 and "The largest logit of prompt 1 is nan: there are no probabilities" in output
    assert f"--guard {guard} does not stop at a NaN or Inf; --guard raise names its origin." in output
    done, _ = run(bad, "--guard", guard, "--temperature", "0.8", "--json", **at)
    content = json.loads(done.stdout)
    assert done.exit_code == 1 and "is nan" in content["error"]["error"] and content["outputs"][0]["tokens"] == []


def test_the_guard_reports_a_nan_before_sampling_does(bad, monkeypatch, tmp_path):
    done, output = run(bad, "--temperature", "0.8", monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert done.exit_code == 1 and "NaN after the last layer of experts" in output and "to draw" not in output


def test_a_temperature_too_low_for_the_logits_is_blamed_on_the_option(model, monkeypatch, tmp_path):
    done, output = run(model, "--temperature", "1e-42", monkeypatch=monkeypatch, tmp_path=tmp_path)
    assert done.exit_code == 2 and not done.stdout.strip()
    assert ", then model --temperature 1e-42: the largest logit of prompt 1 is " in output
    assert "which divided by 1e-42 does not fit float32" in output and output.endswith("Give a higher one, or 0.")


def test_sampling_works_with_masked_tokens_and_large_logits():
    there, ids = FiniteLogits(0.5), torch.zeros(2, 1, dtype=torch.int64)
    scores = torch.tensor([[-torch.inf, 3.0, -torch.inf], [1e37, -1e38, 0.0]])
    assert there(ids, scores) is scores
    for row, worst in ((0, torch.nan), (1, torch.inf), (1, -torch.inf)):
        wrong = scores.clone()
        wrong[row] = worst if worst == -torch.inf else wrong[row].index_fill(0, torch.tensor([2]), worst)
        with pytest.raises(NothingToDraw, match=f"the largest logit of prompt {row + 1} is") as raised:
            there(ids, wrong)
        assert not raised.value.scaled
