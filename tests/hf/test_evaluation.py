"""lm-eval's model "goldsmith": transformers' harness class over the offloaded model."""

import pytest
import torch

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from transformers import AutoModelForCausalLM

from cli.finetune_tools import saved_model
from goldsmith.hf import evaluation
from offload.whole_models import check_alike


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    return saved_model(tmp_path / "model")


def test_the_harness_computes_with_the_offloaded_model(folder):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm-eval")
    from lm_eval.api.registry import get_model

    harness = evaluation.register_lm_eval()
    assert get_model("goldsmith") is harness
    made = harness.create_from_arg_string(
        f"pretrained={folder},dtype=float32,threads=1,max_length=64", {"batch_size": 2}
    )
    try:
        assert made.model is made.offloaded.model and made.batch_size == 2 and made.max_length == 64
        check_alike(
            made.model,
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval(),
        )
    finally:
        made.close()
    with pytest.raises(TypeError, match="unknown keyword 'colour'"):
        harness(str(folder), colour=1)
    with pytest.raises(ValueError, match="dtype='halves'; expected auto, float32"):
        harness(str(folder), dtype="halves")


@pytest.mark.slow
def test_the_parity_table_compares_answers_of_all_three_kinds_of_requests(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm-eval")
    from benchmarks.evaluation import KINDS, figures

    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path))
    rows = {(row["task"], row["metric"]): row for row in figures(limit=2)}
    assert {task for task, _ in rows} == {f"macbeth_{kind}" for kind in KINDS}
    assert {row["same_answers"] for row in rows.values()} == {None, 2}


def test_a_missing_harness_is_named(monkeypatch):
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    monkeypatch.setattr(evaluation, "register_lm_eval", evaluation.register_lm_eval.__wrapped__)
    with pytest.raises(SystemExit, match="needs lm-eval, which is not installed: pip install lm-eval"):
        evaluation.main()
