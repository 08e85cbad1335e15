"""Loads a model and its tokenizer for training, with LoRA on its experts; saves its adapter."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ....experts.packed.files import mode_for
from ...checkpoint.files import weight_files
from ...checkpoint.foreign_errors import brief
from ...checkpoint.gguf.files import SUFFIX, gguf_file
from ...checkpoint.opening import open_checkpoint
from ...converted_experts import ConvertedExperts
from ...model_class import IS_A_FILE, class_of, config_of, empty_model, load_whole
from ...model_types import Tokenizer
from ...routers import router_weights
from ..errors import TrainingError, about_model
from ..options import Options
from ..records.checkpoints import UNFINISHED
from . import device as places
from . import extra_targets

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from ...convert import Share

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model to train, and its trained parameters by name, each once."""

    model: PreTrainedModel
    parameters: dict[str, nn.Parameter]


@functools.cache
def folder(name: str) -> Path:
    """The model's folder or GGUF file: `name` itself, or the hub's copy on this disk, which is downloaded if missing.

    Raises TrainingError if there is neither.
    """
    if not name:
        raise TrainingError("MODEL is empty; give a folder, or the name of a model on the hub.")
    if Path(name).is_dir() or Path(name).is_file() and Path(name).suffix == SUFFIX:
        try:
            if gguf_file(name) is not None:
                config_of(Path(name))  # a damaged file is reported as one, not as a model without a tokenizer
        except (OSError, ValueError) as error:
            raise about_model(name, error) from error
        return Path(name)
    if Path(name).is_file():
        raise TrainingError(f"MODEL {name} {IS_A_FILE}.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise TrainingError(f"MODEL {name}: there is no such folder.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"MODEL {name} is not a folder here, and fetching it from the hub failed: {brief(error)}."
        ) from error


def tokenizer(name: str) -> Tokenizer:
    """The model's tokenizer; raises TrainingError if there is none."""
    from ...offload.generation import tokenizer_of

    try:
        return tokenizer_of(folder(name))
    except ValueError as error:
        raise about_model(name, error) from error


def check(options: Options) -> None:
    """Raises TrainingError, before anything is written, for what a run could not use; reads no weights.

    A folder without a model, a kind of quantisation that is not supported, or --lora-modules or --train-router that
    match nothing in the model.
    """
    try:
        place = folder(options.model)
        config = config_of(place)  # before the tokenizer: an adapter's folder has one too
        class_of(config)
        bare = empty_model(config, torch.float32)
        extra_targets.check(bare, options)
        if not _pickled(place, config):
            open_checkpoint(place, bare)
    except (OSError, ValueError) as error:
        raise about_model(options.model, error) from error


def load(options: Options, progress: Progress | None = None, share: Share | None = None) -> LoadedModel:
    """Seeds torch, loads the model, packs its experts, adds LoRA, and freezes everything else.

    A folder of safetensors files is streamed: at most one layer's experts exist unpacked. `share` is that of `convert`.
    Raises TrainingError with the reason.
    """
    from ... import convert

    path, device = folder(options.model), places.chosen(options)

    def report(done: int, total: int, path: str) -> None:
        if places.on_gpu(device):  # layer by layer, so that host memory holds only one
            places.move_experts(cast("ConvertedExperts", bare.get_submodule(path)), device, options.model)
        if progress is not None:
            progress(done, total, path)

    torch.manual_seed(options.seed)
    lora = {
        "rank": options.rank,
        "alpha": options.alpha,
        "targets": options.targets,
        "dropout": options.dropout,
        "shared_a": options.shared_a,
    }
    try:
        bare, checkpoint = _skeleton(path, options)
        extra_targets.check(bare, options)
        router_parameters = router_weights(bare) if options.train_router else {}
        # without parameters that the model does not train, such as ERNIE's bias
        router_names = [name for name, p in router_parameters.items() if p.requires_grad]
        model = cast(
            "PreTrainedModel",
            convert(
                bare,
                format=options.format,
                group_size=options.group_size,
                lora=lora,
                partitions=options.partitions,
                checkpoint=checkpoint,
                progress=report,
                share=share,
            ),
        )
        model.config._name_or_path = options.model  # the adapter refers to it as its base
        extra_targets.add_lora(model, options)
        nn.Module.to(model, device)
    except (OSError, ValueError, TypeError) as error:
        raise about_model(options.model, error) from error
    for name in router_names:
        parameter = model.get_parameter(name)
        if parameter.dtype != torch.float32:
            raise TrainingError(f"--train-router trains {name} itself, in float32: give --dtype fp32 with it.")
        parameter.requires_grad_(True)
    if options.checkpointing:
        checkpoint_layers(model)
    return LoadedModel(model, {name: p for name, p in model.named_parameters() if p.requires_grad})


def checkpoint_layers(model: PreTrainedModel, on: bool = True) -> None:
    """Turns activation checkpointing on or off: each layer's activations are recomputed in the backward."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"  # before transformers 5.23
    if on:
        getattr(model, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def _skeleton(place: Path, options: Options) -> tuple[PreTrainedModel, Path | None]:
    """The model, and the folder from which its weights are still to be read, None if they are loaded."""
    dtype = DTYPES[options.dtype]
    config = config_of(place)
    if _pickled(place, config):
        return load_whole(place, config, dtype), None
    return empty_model(config, dtype), place


def _pickled(place: Path, config: PreTrainedConfig) -> bool:
    """Whether the weights are pickles, which only transformers reads, and not expert by expert."""
    return gguf_file(place) is None and weight_files(place, config).pickled


def save_adapter(loaded: LoadedModel, folder: Path) -> None:
    """Writes peft's two files, each atomically; a trained router is under `modules_to_save`."""
    from ... import save_adapter as write

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{UNFINISHED}adapter"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write(loaded.model, temporary)
        extra_targets.add_routers(temporary, loaded.model, set(router_weights(loaded.model)) & set(loaded.parameters))
        for name in ADAPTER:
            os.chmod(temporary / name, mode_for(folder / name))
            os.replace(temporary / name, folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
