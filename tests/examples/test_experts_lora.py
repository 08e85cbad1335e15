"""examples/experts_lora.py: it trains, what it saves is a stock adapter, and a folder of one's own is streamed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "experts_lora.py"


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1] / "src")}
    command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep(3, part=0)
def test_the_loss_falls_and_stock_peft_continues_from_the_files(tmp_path):
    out = run("--format", "fp32", "--out", tmp_path / "adapter")
    losses = [float(value) for value in re.findall(r"step +\d+  loss ([\d.]+)", out)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.3
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert float(re.search(r"differ from ours by at most ([\d.e-]+)", out)[1]) < 1e-4  # of logits of about 1
    assert "it goes on: 'To be, o" in out
