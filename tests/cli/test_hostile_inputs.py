"""Altered files and folders of unknown origin: one sentence, and nothing of theirs runs."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from transformers import AutoModelForCausalLM

from benchmarks import tiny_models
from cli.finetune_tools import saved_model, saved_place, tiny_trainer
from goldsmith import experts
from goldsmith.core.device import BackendUnavailable
from goldsmith.hf.adapter.reading import read_adapter
from goldsmith.hf.training.data import attention_masks
from goldsmith.hf.training.errors import TrainingError
from goldsmith.hf.training.model import device, loading
from goldsmith.hf.training.options import Options
from goldsmith.offload import attach
from offload.whole_models import check_alike

pytestmark = pytest.mark.sweep(5)


def options(folder, **changes):
    return Options(model=str(folder), data="verse.txt", output="out", **changes)


# altered checkpoints


def moment(state, key):
    return next(name for name in sorted(state) if name.endswith(f"/{key}"))


ALTERED = {
    "moments of another size": lambda s: {moment(s, "exp_avg"): torch.zeros(3)},
    "a step of another size": lambda s: {moment(s, "step"): torch.zeros(4)},
    "integers": lambda s: {moment(s, "exp_avg"): s[moment(s, "exp_avg")].int()},
    "numbers of another precision": lambda s: {moment(s, "exp_avg"): s[moment(s, "exp_avg")].double()},
    "a NaN": lambda s: {moment(s, "exp_avg"): s[moment(s, "exp_avg")] * float("nan")},
    "a negative square": lambda s: {moment(s, "exp_avg_sq"): -s[moment(s, "exp_avg_sq")] - 1},
    "integers as weights": lambda s: {n: t.int() for n, t in s.items() if n.startswith("trained/")},
    "a short random state": lambda s: {"random/0": s["random/0"][:10]},
    "a random state of floats": lambda s: {"random/0": s["random/0"].float()},
    "a random state of zeros": lambda s: {"random/0": torch.full_like(s["random/0"], 255)},
}


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_checkpoint_is_refused_in_a_sentence(what):
    trainer = tiny_trainer()
    trainer.step()
    state = trainer.state()
    with pytest.raises(ValueError, match="in the model|of torch's|has a negative number|has NaN or Inf|expected "):
        tiny_trainer().restore(state | ALTERED[what](state), 1)


def test_a_checkpoint_without_a_moment_or_a_random_state_is_refused():
    trainer = tiny_trainer()
    trainer.step()
    state = trainer.state()
    for name in (moment(state, "exp_avg"), "random/0"):
        with pytest.raises(ValueError, match="is missing"):
            tiny_trainer().restore({key: tensor for key, tensor in state.items() if key != name}, 1)
    tiny_trainer().restore(state, 1)


# folders with code of their own

CODE = "open({path!r}, 'w').write('ran')\nfrom transformers import Qwen3MoeConfig as Config\n"


@pytest.mark.parametrize("command", ["finetune", "generate"])
def test_a_folder_s_own_code_never_runs_even_if_every_question_is_answered_yes(command, tmp_path):
    saved_place(tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {
        "model_type": "their_own",
        "auto_map": {"AutoConfig": "theirs.Config", "AutoTokenizer": ["theirs.T", None]},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "theirs.py").write_text(CODE.format(path=str(tmp_path / "ran")))
    arguments = {
        "finetune": ["--data", str(tmp_path / "verse.txt"), "--output", str(tmp_path / "out"), "--steps", "1"],
        "generate": ["--prompt", "a", "--device", "cpu"],
    }[command]
    done = subprocess.run(
        [sys.executable, "-m", "goldsmith.cli", command, str(tmp_path / "model"), *arguments],
        input="y\n" * 100, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "auto_map" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


# folders without a model


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json: it is not the folder of a transformers model"),
        (lambda f: (f / "config.json").rename(f / "adapter_config.json"), "that of an adapter .adapter_config.json"),
        (lambda f: (f / "config.json").rename(f / "model.gguf"), "but it has model.gguf"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), "config.json: model_type None cannot be read"),
        (lambda f: (f / "config.json").write_text('{"model_type": "vit"}'), "no class with a language model's head"),
    ],
)  # fmt: skip
def test_a_folder_without_a_language_model_is_named_before_its_tokenizer_is_read(spoil, message, tmp_path):
    saved_model(tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(TrainingError, match=message):
        loading.check(options(tmp_path / "model"))
    with pytest.raises(ValueError, match=message):
        attach.from_pretrained(tmp_path / "model", device="cpu")


def test_a_pickle_of_something_else_is_refused(tmp_path):
    saved_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(TrainingError, match="its weights cannot be loaded"):
        loading.load(options(tmp_path / "model"))


def test_a_deeply_nested_adapter_config_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"a":' * 100_000)
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="adapter_config.json: not JSON"):
        read_adapter(tmp_path, "load")


def test_a_missing_gpu_is_named_before_the_dtype(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(TrainingError, match="--device cuda: torch sees 0 CUDA devices here"):
        device.chosen(options("model", device="cuda"))


def test_float64_weights_are_read_by_both_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    folder = saved_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t.double() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float64"}
    (folder / "config.json").write_text(json.dumps(config))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    check_alike(loading.load(options(folder, format="fp32")).model.eval(), plain)
    with attach.from_pretrained(folder, device="cpu", threads=1) as held:
        assert held.model.dtype == torch.float32
        check_alike(held.model, plain)


# operators


def test_integer_products_of_no_slots_are_zeros():
    base = experts.pack(torch.randn(4, 128, 64), torch.randn(4, 64, 64), format="int8", group_size=64)
    none = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0)
    try:
        y = experts.moe(torch.randn(3, 64), *none, base, compute="int8")
    except BackendUnavailable:
        pytest.skip("this processor has no integer products")
    assert torch.equal(y, torch.zeros(3, 64))


def shifted(tensor, by=1):
    """The same tensor in the middle of another one's memory."""
    around = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)
    around[by:].view(torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype).copy_(
        tensor.flatten().view(torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype)
    )
    return around[by:].view(tensor.shape)


@pytest.mark.parametrize("by", [1, 2, 3])
@pytest.mark.parametrize("format", ["bf16", "int8", "fp32"])
def test_weights_at_an_odd_storage_offset_are_packed(format, by):
    gate_up, down = torch.randn(2, 128, 64).bfloat16(), torch.randn(2, 64, 64).bfloat16()
    ours = experts.pack(shifted(gate_up, by), shifted(down, by), format=format).unpack()
    assert all(torch.equal(a, b) for a, b in zip(ours, experts.pack(gate_up, down, format=format).unpack()))


@pytest.mark.parametrize("by", [1, 2, 3])
def test_codes_at_an_odd_storage_offset_are_imported(by):
    draw = torch.Generator().manual_seed(0)

    def fp8(out, inputs):
        return torch.randn(2, out, inputs, generator=draw).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)

    parts = [fp8(64, 128), fp8(64, 128), fp8(128, 64)]
    moved = [tuple(shifted(tensor, by) for tensor in part) for part in parts]
    ours, theirs = experts.from_fp8_block(*moved), experts.from_fp8_block(*parts)
    assert all(torch.equal(a, b) for a, b in zip(ours.unpack(), theirs.unpack()))
    blocks = [
        torch.randint(0, 256, size, dtype=torch.uint8, generator=draw) for size in ((2, 128, 4, 16), (2, 128, 2, 16))
    ]
    scales = [torch.full(size, 125, dtype=torch.uint8) for size in ((2, 128, 4), (2, 128, 2))]
    parts = (blocks[0], scales[0], blocks[1], scales[1])
    ours, theirs = experts.from_mxfp4(*(shifted(t, by) for t in parts)), experts.from_mxfp4(*parts)
    assert all(torch.equal(a, b) for a, b in zip(ours.unpack(), theirs.unpack()))


# packed rows


def test_a_leak_across_a_compressed_block_is_found_at_the_length_of_the_run():
    """DeepSeek-V4 compresses 128 tokens into one: documents of 4 tokens do not show that they are mixed."""
    kinds = ["heavily_compressed_attention"] * 2
    model = tiny_models.tiny_model("deepseek_v4", layer_types=kinds, num_hidden_layers=2, sliding_window=8)
    with torch.no_grad():
        assert attention_masks._row_keeps_apart(model, attention_masks.no_masks, (4, 4))
    assert not attention_masks.keeps_apart(model, attention_masks.no_masks, 400)
    with pytest.raises(TrainingError, match="a document attends to the one before it.*--no-pack"):
        attention_masks.masks(model, 400)
