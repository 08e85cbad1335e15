"""`python -m benchmarks.model_step`: a row for each way to compute a model's step, on the same weights."""

import json
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from hf import hyper_models

if "deepseek_v4" not in hyper_models.PRESENT:
    pytest.skip("transformers has no DeepSeek-V4", allow_module_level=True)
from benchmarks.common import needs
from benchmarks.model_step import command
from goldsmith.core.device import machine

SMALL = "--device cpu --dim 32 --layers 1 --experts 6 --rows 1 --length 8 --steps 2 --no-verify --float32".split()


@pytest.fixture(autouse=True)
def _as_on_a_cpu(monkeypatch):
    monkeypatch.setattr("goldsmith.core.device.triton_interpreted", lambda: False)
    monkeypatch.setattr("goldsmith.Op._chosen", {})
    monkeypatch.setattr(needs, "machine", lambda: replace(machine(), interpreter=False))


def bench(*arguments):
    return CliRunner().invoke(command.app, [*SMALL, "--json", "-", "--commit", "abc1234", *arguments])


def test_ways_train_the_same_model_and_each_has_a_row():
    result = bench("--way", "plain,goldsmith")
    plain, ours = (json.loads(line) for line in result.stdout.splitlines())
    assert result.exit_code == 0 and (plain["peer"], ours["peer"]) == ("plain", "goldsmith")
    assert plain["loss"] == ours["loss"] and "error" not in plain and 0 < ours["error"] < 1
    for row in (plain, ours):
        assert row["runs"] == 2 and row["p10"] <= row["step_ms"] <= row["p90"] and row["commit"] == "abc1234"
        assert min(row["forward_ms"], row["backward_ms"], row["optimizer_ms"]) > 0


@pytest.mark.parametrize("way, why", [("liger", "a GPU|not installed"), ("fast", "known: plain, compiled, liger")])
def test_a_way_that_cannot_run_is_refused(way, why):
    result = bench("--way", way)
    assert result.exit_code == 2 and re.search(f"--way {way}: .*({why})", result.output)
