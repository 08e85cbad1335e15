"""Every mixture-of-experts class of the installed transformers: dispatch, convert, finetune and generate."""

import json

import pytest
import torch

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")

from benchmarks import coverage, tiny_models

RECORDED = json.loads(coverage.RESULTS.read_text())["models"]
TYPES = list(tiny_models.model_types())
ALWAYS = ("lfm2_moe", "nemotron_h", "llama4_text", "kimi_linear", "deepseek_ocr2", "qwen3_5_moe")  # faults of their own


def check(rows):
    """No crash, no wrong number, and nothing that worked when the table was written is refused."""
    for name, row in rows.items():
        for column in coverage.COLUMNS:
            assert row[column] in ("equal", "refused"), (name, column, row)
            if RECORDED.get(name, {}).get(column) == "equal":
                assert row[column] == "equal", (name, column, row)
            if row[column] == "refused":
                assert row["why"] and "\n" not in row["why"] and len(row["why"]) < 600, row


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ALWAYS)
def test_a_model_with_a_peculiarity_is_equal_in_all_four(name):
    row = coverage.examine(name)
    assert [row[column] for column in coverage.COLUMNS] == ["equal"] * 4, row


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", sorted(set(TYPES) - set(ALWAYS)))
def test_a_model_agrees_with_the_table(name):
    check(coverage.coverage([name]))


def test_at_least_seventy_are_equal_and_none_is_wrong():
    equal = [n for n, row in RECORDED.items() if all(row[column] == "equal" for column in coverage.COLUMNS)]
    assert len(equal) >= 70
    assert {row[column] for row in RECORDED.values() for column in coverage.COLUMNS} <= {"equal", "refused"}
    assert set(RECORDED) == set(TYPES)


def test_the_comparison_finds_a_small_difference(tmp_path):
    """The judge of the table is no formality: a relative error of 1e-4 is wrong."""
    plain = tiny_models.tiny_model("mixtral")
    plain.set_experts_implementation("eager")
    trial = coverage.Trial(plain, tmp_path)
    trial.compare(lambda ids: coverage.logits(trial.plain, ids))
    with pytest.raises(AssertionError, match="the error is"):
        trial.compare(lambda ids: coverage.logits(trial.plain, ids) * (1 + 1e-4))


def test_the_command_refuses_an_unknown_type():
    with pytest.raises(SystemExit, match="gpt2 is no model type with experts; known are afmoe"):
        coverage.coverage(["gpt2"])


@pytest.mark.parametrize("name", ["nemotron_h", "llama4_text"])
def test_the_experts_are_saved_in_their_own_layout(name, tmp_path):
    from goldsmith import hf

    plain = tiny_models.tiny_model(name)
    wanted = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    hf.convert(plain, format="fp32").save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path).state_dict()
    assert again.keys() == wanted.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in wanted.items())


@pytest.mark.parametrize("name", ["nemotron_h", "llama4_text", "step3p7"])
def test_detaching_gives_the_plain_experts_back(name):
    from goldsmith import offload

    plain = tiny_models.tiny_model(name)
    wanted = {key: tensor.clone() for key, tensor in plain.state_dict().items()}
    attached = offload.offload(plain, device="cpu", threads=1)
    again = attached.detach().state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in wanted.items())
    assert not any("forward" in module.__dict__ for module in plain.modules())
