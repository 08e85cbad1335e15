"""Whatever files a folder holds: the weights are those that from_pretrained reads, or one sentence names the files."""

import json
import pickle
import random
import re
import shutil
import warnings

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from hf import models

hf = pytest.importorskip("goldsmith.hf", reason="goldsmith.hf needs transformers and peft")
from goldsmith.hf.checkpoint.files import default_dtype, weight_files
from goldsmith.hf.model_class import config_of, empty_model
from goldsmith.offload.store.expert_store import ExpertStore

INDEX = "model.safetensors.index.json"
FOLDERS = 36


def save(folder, seed, *, shard="1GB", dtype=torch.float32):
    models.model("qwen3_moe", seed=seed, dtype=dtype).save_pretrained(folder, max_shard_size=shard)


def other(tmp_path, seed, **options):
    folder = tmp_path / f"other{seed}"
    save(folder, seed, **options)
    return folder


def changed(path, draw):
    """A file with the names of another one and other numbers."""
    return {name: torch.randn(t.shape, generator=draw).to(t.dtype) for name, t in load_file(path).items()}


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit_index(folder, change):
    path = folder / INDEX
    if path.is_file():
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))


def first_weights(folder):
    return min(path for path in folder.glob("model*.safetensors"))


def stray(name):
    def add(folder, tmp_path, draw):
        save_file(changed(first_weights(folder), draw), folder / name, {"format": "pt"})

    add.__name__ = f"a stray {name}"
    return add


def saved_again_whole(folder, tmp_path, draw):
    shutil.copy(other(tmp_path, 7) / "model.safetensors", folder)


def index_of_older_shards(folder, tmp_path, draw):
    for path in other(tmp_path, 8, shard="20KB").iterdir():
        if path.name != "config.json":
            shutil.copy(path, folder)


def index_without_shards(folder, tmp_path, draw):
    shutil.copy(other(tmp_path, 9, shard="20KB") / INDEX, folder)


def an_adapter(folder, tmp_path, draw):
    plain = models.model("qwen3_moe", seed=0)
    models.with_peft(plain).save_pretrained(folder)


def a_missing_shard(folder, tmp_path, draw):
    sorted(folder.glob("*.safetensors"))[-1].unlink()


def a_truncated_file(folder, tmp_path, draw):
    path = first_weights(folder)
    path.write_bytes(path.read_bytes()[:-30])


def a_truncated_file_and_no_dtype(folder, tmp_path, draw):
    """So that the first tensor's dtype is read before the names of all."""
    a_truncated_file(folder, tmp_path, draw)
    no_dtype_in_the_config(folder, tmp_path, draw)


def a_pickle(folder, tmp_path, draw):
    torch.save(models.model("qwen3_moe", seed=6).state_dict(), folder / "pytorch_model.bin")


def only_a_pickle(folder, tmp_path, draw):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    a_pickle(folder, tmp_path, draw)


def other_file_named_in_the_config(folder, tmp_path, draw):
    save_file(load_file(other(tmp_path, 5) / "model.safetensors"), folder / "other.safetensors", {"format": "pt"})
    edit_config(folder, transformers_weights="other.safetensors")


def no_dtype_in_the_config(folder, tmp_path, draw):
    edit_config(folder, dtype=None)


def another_dtype_in_the_config(folder, tmp_path, draw):
    edit_config(folder, dtype="bfloat16")


def a_shard_outside(folder, tmp_path, draw):
    save_file(changed(first_weights(folder), draw), tmp_path / "outside.safetensors", {"format": "pt"})

    def change(index):
        index["weight_map"]["model.norm.weight"] = "../outside.safetensors"

    edit_index(folder, change)


def tensors_twice(folder, tmp_path, draw):
    """A shard that the index names for one new tensor, but which holds others too."""
    save_file(changed(first_weights(folder), draw), folder / "z.safetensors", {"format": "pt"})
    edit_index(folder, lambda index: index["weight_map"].update({"model.extra": "z.safetensors"}))


def a_tensor_too_few(folder, tmp_path, draw):
    path = first_weights(folder)
    tensors = load_file(path)
    tensors.pop(sorted(tensors)[len(tensors) // 2])
    save_file(tensors, path, {"format": "pt"})


def fused_beside_single_experts(folder, tmp_path, draw):
    """Two kinds of tensors for the same experts, with different numbers."""
    tensors = load_file(first_weights(folder))
    fused = models.model("qwen3_moe", seed=4).state_dict()
    name = next(name for name in fused if name.endswith("experts.down_proj"))
    save_file(tensors | {name: fused[name]}, first_weights(folder), {"format": "pt"})


def a_tensor_under_two_names(folder, tmp_path, draw):
    path = first_weights(folder)
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if name.startswith("model.") and ".experts." not in name)
    save_file(tensors | {name.removeprefix("model."): tensors[name] + 1}, path, {"format": "pt"})


def a_distributed_checkpoint(folder, tmp_path, draw):
    save_file(changed(first_weights(folder), draw), folder / "shard-00000-model-00001-of-00001.safetensors")


def an_index_without_metadata(folder, tmp_path, draw):
    edit_index(folder, lambda index: index.pop("metadata"))


CHANGES = [
    stray("model_ema.safetensors"), stray("consolidated.safetensors"), stray("a.safetensors"),
    saved_again_whole, index_of_older_shards, index_without_shards, an_adapter, a_missing_shard, a_truncated_file,
    a_pickle, only_a_pickle, other_file_named_in_the_config, no_dtype_in_the_config, another_dtype_in_the_config,
    a_shard_outside, tensors_twice, a_tensor_too_few, a_distributed_checkpoint, an_index_without_metadata,
    fused_beside_single_experts, a_tensor_under_two_names,
]  # fmt: skip


def build(folder, tmp_path, number):
    """A random folder, and the names of what was done to it."""
    choose = random.Random(number)
    draw = torch.Generator().manual_seed(number)
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16])
    save(folder, 1, shard=choose.choice(["1GB", "20KB"]), dtype=dtype)
    changes = [CHANGES[number % len(CHANGES)]] + choose.sample(CHANGES, choose.choice([0, 0, 1, 2]))
    for change in dict.fromkeys(changes):
        try:
            change(folder, tmp_path, draw)
        except (IndexError, ValueError, OSError, SafetensorError):
            pass  # an earlier change has removed the file that this one needs
    return [change.__name__ for change in changes]


def by_transformers(folder):
    """The model's tensors, or None if transformers refuses the folder or leaves some of them random."""
    try:
        model, info = models.transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    except (Exception, CheckpointException):  # noqa: BLE001  of many classes, and the last one is no Exception
        return None
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    return None if info["missing_keys"] else merged.state_dict()


def by_goldsmith(folder):
    """The model's tensors as `convert` streams them, or the refusal."""
    try:
        config = config_of(folder)
        model = empty_model(config, default_dtype(weight_files(folder, config), config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf.convert(model, format="fp32", checkpoint=folder)
    except ValueError as error:
        return str(error)
    tensors = dict(model.state_dict())
    for path, module in model.named_modules():
        if path.endswith("mlp.experts"):
            gate_up, down = module.base.unpack()
            tensors |= {f"{path}.gate_up_proj": gate_up, f"{path}.down_proj": down}
    return tensors


@pytest.mark.parametrize("number", range(FOLDERS))
def test_a_random_folder_gives_the_weights_of_from_pretrained_or_a_refusal(number, tmp_path):
    folder = tmp_path / "model"
    changes = build(folder, tmp_path, number)
    ours, theirs = by_goldsmith(folder), by_transformers(folder)
    if isinstance(ours, str):
        assert str(folder) in ours and len(ours) < 500 and "\n" not in ours, ours
        return
    assert theirs is not None, f"{changes}: transformers refuses this folder, and goldsmith reads it"
    assert ours.keys() == theirs.keys(), changes
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].to(tensor.dtype), tensor), f"{changes}: {name}"
        assert ours[name].dtype == tensor.dtype or ".experts." in name, f"{changes}: {name}"


@pytest.mark.parametrize(
    "change, message",
    [
        (stray("model_ema.safetensors"), None),
        (saved_again_whole, None),
        (index_of_older_shards, None),
        (index_without_shards, None),
        (other_file_named_in_the_config, None),
        (no_dtype_in_the_config, None),
        (another_dtype_in_the_config, None),
        (a_pickle, None),
        (an_adapter, "holds a model and an adapter .adapter_config.json."),
        (only_a_pickle, "pytorch_model.bin, a pickle"),
        (a_distributed_checkpoint, "distributed checkpoint .shard-00000-model"),
        (a_truncated_file, "model.safetensors: cannot be read"),
        (a_truncated_file_and_no_dtype, "model.safetensors: cannot be read"),
        (
            fused_beside_single_experts,
            r"and model.*experts.down_proj \(in model.safetensors\) both give model.*down_proj",
        ),
        (a_tensor_under_two_names, r"\(in model.safetensors\) both give"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_kind_of_folder_is_read_or_refused_as_intended(change, message, tmp_path):
    folder = tmp_path / "model"
    save(folder, 1)
    change(folder, tmp_path, torch.Generator().manual_seed(0))
    ours = by_goldsmith(folder)
    if message is not None:
        assert isinstance(ours, str)
        assert re.search(message, ours), ours
        return
    theirs = by_transformers(folder)
    assert not isinstance(ours, str), ours
    assert all(torch.equal(ours[name].to(t.dtype), t) for name, t in theirs.items())


def test_a_shard_outside_of_the_folder_is_not_read(tmp_path):
    folder = tmp_path / "model"
    save(folder, 1, shard="20KB")
    a_shard_outside(folder, tmp_path, torch.Generator().manual_seed(0))
    assert "outside.safetensors, which is outside of the folder" in by_goldsmith(folder)


def test_a_pickle_that_runs_code_is_refused_unread(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    folder = tmp_path / "model"
    save(folder, 1)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    from goldsmith.offload import attach

    with pytest.raises(ValueError, match="weights cannot be loaded"):
        attach.from_pretrained(folder, device="cpu")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change", [saved_again_whole, index_of_older_shards, index_without_shards, stray("z.safetensors")]
)
def test_a_store_is_built_from_the_same_files(change, tmp_path):
    """`ExpertStore.build` of a folder knows no transformers, but the same rule."""
    folder = tmp_path / "model"
    save(folder, 1)
    change(folder, tmp_path, torch.Generator().manual_seed(0))
    theirs = by_transformers(folder)
    ExpertStore.build(folder, tmp_path / "store", format="fp32")
    with ExpertStore.open(tmp_path / "store") as store:
        for layer in store.layers:
            decoded = store.dequantize(layer, 0)
            wanted = theirs[f"model.layers.{layer}.mlp.experts.gate_up_proj"][0]
            assert torch.equal(decoded["gate_up"], wanted)


def test_a_folder_with_several_files_of_unknown_names_is_refused(tmp_path):
    folder = tmp_path / "model"
    save(folder, 1)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(ValueError, match="a.safetensors, b.safetensors"):
        ExpertStore.build(folder, tmp_path / "store", format="fp32")
    assert "it has a.safetensors, b.safetensors" in by_goldsmith(folder)
