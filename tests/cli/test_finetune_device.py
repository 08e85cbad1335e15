"""`goldsmith finetune --device`: what a GPU does not take, and the way there, which a CPU can go as well."""

import json

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")
pytest.importorskip("peft", reason="comes with the extra hf")

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cli.finetune_tools import saved_place
from goldsmith.cli import app
from goldsmith.hf.training.model import device


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return saved_place(tmp_path_factory.mktemp("finetune"))


def run(place, output, *more):
    words = ["finetune", place / "model", "--data", place / "verse.txt", "--output", output, "--lr", "0.01"]
    words += ["--seq-len", "128", "--batch-size", "2", "--steps", "4", "--dropout", "0.1", "--dtype", "bf16", *more]
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(
    "more, message",
    [
        (("--device", "tpu"), "--device is tpu; expected cpu, cuda, or one of several as cuda:1."),
        (("--device", "mps"), "--device is mps; expected cpu, cuda"),
        (("--device", "cuda", "--dtype", "fp32"), "computes everything in bfloat16, and --dtype is fp32: give --dtype"),
        (("--device", "cuda", "--format", "int4"), "and --format is int4: leave it out"),
        (("--device", "cuda", "--partitions", "2"), "and --partitions is 2, which is only for the CPU: leave"),
        (("--device", "cuda", "--train-router"), "--train-router trains in float32: leave --train-router or --device"),
        (("--device", "cuda:77"), "CUDA devices here; on a CPU leave --device out."),
    ],
)
def test_options_that_a_gpu_does_not_support_are_reported_before_anything_is_read(
    place, tmp_path, more, message, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = run(place, tmp_path / "out", *more, "--data", "nosuch.txt")
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert not (tmp_path / "out").exists()


def test_experts_as_plain_tensors_train_as_packed_ones_do(place, tmp_path, monkeypatch):
    """All of --device cuda but the card: here the plain experts stay on the CPU, and its own backend takes them."""
    assert run(place, tmp_path / "packed").exit_code == 0
    monkeypatch.setattr(device, "chosen", lambda options: torch.device("cpu"))
    monkeypatch.setattr(device, "on_gpu", lambda value: True)
    monkeypatch.setattr(device, "ON_GPU", "auto")
    moved, real = [], device.move_experts

    def move(module, *words):
        real(module, *words)
        moved.append(module.base)

    monkeypatch.setattr(device, "move_experts", move)
    result = run(place, tmp_path / "plain", "--device", "cuda", "--json")
    assert result.exit_code == 0, result.output
    assert [len(base) for base in moved] == [2, 2] and all(t.dtype == torch.bfloat16 for b in moved for t in b)
    packed, plain = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("packed", "plain"))
    assert packed.keys() == plain.keys() and all(torch.equal(packed[name], plain[name]) for name in packed)
    content, before = json.loads(result.stdout), json.loads((tmp_path / "packed" / "run.json").read_text())
    assert content["format"] == "bf16" and content["bytes"]["activations"] == before["bytes"]["activations"]


def test_a_quantised_checkpoint_is_trained_on_the_cpu_only():
    from goldsmith import experts

    class Converted:
        base = experts.pack(torch.zeros(1, 64, 32), torch.zeros(1, 32, 32), format="int4")

    with pytest.raises(device.TrainingError, match="MODEL big is a checkpoint in int4; on a GPU"):
        device.move_experts(Converted(), torch.device("cpu"), "big")


@pytest.mark.gpu
def test_on_a_gpu_the_loss_falls_and_the_same_command_continues(place, tmp_path):
    words = ("--device", "cuda", "--lora-modules", "q_proj", "--schedule", "constant", "--warmup", "1")
    assert run(place, tmp_path, *words).exit_code == 0
    result = run(place, tmp_path, *words, "--steps", "16", "--json")
    assert result.exit_code == 0 and "Resuming after step 4 of 16" in result.output, result.output
    content = json.loads(result.stdout)
    assert content["status"] == "trained" and content["loss"]["last"] < content["loss"]["first"] - 0.1
    assert all(t.isfinite().all() for t in load_file(tmp_path / "adapter_model.safetensors").values())
