"""examples/grpo_kernels.py: TRL's GRPOTrainer learns from verdicts."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_kernels.py"


@pytest.mark.sweep(4, part=2)
def test_a_toy_model_learns_to_write_the_kernel(tmp_path):
    pytest.importorskip("trl", reason="needs trl: pip install trl")
    spec = importlib.util.spec_from_file_location("grpo_kernels", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, tokenizer = example.toy()
    rewards = example.train(tmp_path, model, tokenizer, steps=10, rows=16, length=2, rate=0.03)
    assert len(rewards) == 10
    assert sum(rewards[:3]) / 3 < 0.3 < 0.6 < sum(rewards[-3:]) / 3, rewards
