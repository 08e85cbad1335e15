"""Loading a model for offload: experts into a store, everything else onto the device, nothing read twice."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...core.shapes import check_choice, kind
from ...experts.packed.formats import FORMATS
from ...offload.engine import Engine
from ...offload.settings import check_int8, chosen_device, parse_budget
from ...offload.store.expert_store import ExpertStore
from ...offload.store.source import CodedExperts, Weights
from ..checkpoint.experts import packed_from
from ..checkpoint.files import default_dtype, weight_files
from ..checkpoint.foreign_errors import explained
from ..checkpoint.gguf.files import SUFFIX, gguf_file
from ..checkpoint.loading import load_other_weights
from ..checkpoint.opening import open_checkpoint
from ..checkpoint.source import stored_format, warn_decoded
from ..dispatch import ENGINE
from ..model_class import IS_A_FILE, config_of, empty_model, load_whole, no_model
from . import adapters as reading
from .adapters import AdapterArgument, ModelAdapters, OffloadedAdapter
from .attachment import Attached, LayerSource, Progress, open_store
from .budget import check_fits
from .dense_format import EXACT as EXACT_DENSE
from .dense_format import check_dense_format, pack_dense, packers
from .layers import ExpertsLayer, layers_of
from .memory_needs import MemoryNeeds, check_memory, memory_needs
from .weights import coded_experts, decoded_experts, from_checkpoint, from_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT = {torch.bfloat16: ("bf16", "fp32"), torch.float32: ("fp32",), torch.float16: ("fp32",)}


def attach(
    model: PreTrainedModel,
    *,
    store: ExpertStore | str | Path | None = None,
    adapter: AdapterArgument = None,
    cpu_format: str = "auto",
    dense_format: str = EXACT_DENSE,
    batch: int = 1,
    max_length: int | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Attached:
    """Moves the experts of a model in memory into a store, and puts an engine in their place."""
    _check_room(cpu_format, batch, max_length, options)
    _check_store(store)
    check_dense_format(dense_format, _checked(options), adapter)
    if not isinstance(model, nn.Module):
        raise TypeError(f"offload: model is {kind(model)}, expected a model of transformers (torch.nn.Module)")
    layers = layers_of(model)
    if any(ENGINE in layer.module.__dict__ for layer in layers):
        raise ValueError(
            "offload: this model's experts are already in a store: detach() on what offload() returned gives the plain "
            "model back; after its close() the model must be loaded again"
        )
    if any(parameter.is_meta for layer in layers for parameter in layer.module.parameters()):
        raise ValueError(
            "offload: the experts are on the meta device, which holds no numbers: "
            "goldsmith.offload.from_pretrained(folder) reads them from the checkpoint"
        )
    home = next(layers[0].module.parameters()).device
    with torch.no_grad():
        adapters = _read_adapters(model, layers, adapter)
        source = LayerSource(layers, from_module)
        formats = cpu_format, dense_format
        return _begin(model, layers, source, store, formats, home, progress, options, (batch, max_length), adapters)


def load(
    path: str | Path,
    *,
    store: ExpertStore | str | Path | None = None,
    dtype: torch.dtype | None = None,
    adapter: AdapterArgument = None,
    cpu_format: str = "auto",
    dense_format: str = EXACT_DENSE,
    batch: int = 1,
    max_length: int | None = None,
    progress: Progress | None = None,
    on_memory: Callable[[MemoryNeeds], None] | None = None,
    **options: object,
) -> Attached:
    """Loads a model from its folder, with an engine in place of its experts."""
    from transformers import GenerationConfig

    _check_room(cpu_format, batch, max_length, options)
    _check_store(store)
    if dtype is not None and dtype not in EXACT:
        raise ValueError(
            f"offload: dtype={dtype!r}, expected one of {', '.join(map(str, EXACT))}, or None for the files' own"
        )
    check_dense_format(dense_format, _checked(options), adapter)
    model_folder = folder(path)
    config = config_of(model_folder)
    files = None if gguf_file(model_folder) else weight_files(model_folder, config)
    wanted = dtype or default_dtype(files, config)
    if wanted not in EXACT:
        wanted = torch.float32  # float64, which no lane computes in
    if files is not None and files.pickled:
        return attach(
            load_whole(model_folder, config, wanted),
            store=store, adapter=adapter, cpu_format=cpu_format, dense_format=dense_format, batch=batch,
            max_length=max_length, progress=progress, **options,
        )  # fmt: skip
    model = empty_model(config, wanted)
    model.config._name_or_path = str(path)
    layers = layers_of(model)
    needs = memory_needs(model, layers, cpu_format, dense_format)
    if on_memory is not None:
        on_memory(needs)
    check_memory(needs)
    adapters = _read_adapters(model, layers, adapter)
    checkpoint = open_checkpoint(model_folder, model)
    specs = {layer.path: layer.spec for layer in layers}
    stored_format(checkpoint, specs, alike=True)
    warn_decoded(checkpoint, cpu_format, specs)

    kept: dict[str, CodedExperts] = {}  # the key, the samples and the store each need them

    def read(layer: ExpertsLayer) -> Weights:
        coded = checkpoint.experts(layer.path, layer.spec)
        if coded is not None and isinstance(coded.target, str):
            return decoded_experts(coded, wanted)
        if coded is not None:
            kept[layer.path] = kept.get(layer.path) or coded_experts(coded)
            return kept[layer.path]
        if checkpoint.method == "mxfp4":
            return packed_from(checkpoint, layer.path, layer.spec, "auto", None, 1)
        return from_checkpoint(checkpoint, layer, wanted)

    skip, replace = [layer.path for layer in layers], packers(model, layers, dense_format)
    load_other_weights(model, checkpoint, skip=skip, progress=progress, replace=replace)
    model.eval()
    if (model_folder / "generation_config.json").is_file():
        with explained(f"{model_folder / 'generation_config.json'} cannot be read"):
            model.generation_config = GenerationConfig.from_pretrained(model_folder)
    home = torch.device("cpu")
    source = LayerSource(layers, read, checkpoint.sources)
    formats = cpu_format, dense_format
    return _begin(model, layers, source, store, formats, home, progress, options, (batch, max_length), adapters)


def _read_adapters(
    model: PreTrainedModel, layers: list[ExpertsLayer], adapter: AdapterArgument
) -> dict[str, OffloadedAdapter]:
    """The adapters of this argument by name, read and checked before a store is built."""
    return {name: reading.read(model, layers, path) for name, path in reading.folders_of(adapter).items()}


def _begin(
    model: PreTrainedModel,
    layers: list[ExpertsLayer],
    source: LayerSource,
    store: ExpertStore | str | Path | None,
    formats: tuple[str, str],
    home: torch.device,
    progress: Progress | None,
    options: dict[str, Any],
    text_room: tuple[int, int | None],
    adapters: dict[str, OffloadedAdapter],
) -> Attached:
    (cpu_format, dense_format), exact = formats, options.get("exact", True)
    check_fits(model, _checked(options))
    if exact and not (isinstance(store, ExpertStore) or store is not None and Path(store).exists()):
        check_exact(source[layers[0].index], cpu_format)
    expert_store, owned = open_store(source, store, layers, cpu_format, exact, progress)
    attached = Attached(model, layers, expert_store, owned, home)
    attached.adapters = ModelAdapters(model, adapters)
    attached.dense_format = dense_format
    try:
        pack_dense(model, layers, dense_format)
        attached.begin(options, *text_room)
    except BaseException:
        if owned:
            expert_store.close()
        raise
    return attached


def _checked(options: dict[str, Any]) -> torch.device:
    """The device, after a check of all keywords: building a store first may take minutes."""
    known = [name for name in list(inspect.signature(Engine).parameters)[1:] if name != "adapters"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"offload: unknown keyword {unknown[0]!r}; the keywords of Engine are {', '.join(known)}")
    parse_budget(options.get("gpu_budget", "auto"))
    return chosen_device(options.get("device", "auto"))


def _check_store(store: object) -> None:
    if not (store is None or isinstance(store, (ExpertStore, str, os.PathLike))):
        raise TypeError(f"offload: store is {kind(store)}, expected an ExpertStore, the path of one, or None")


def _check_room(cpu_format: str, batch: object, max_length: object, options: Mapping[str, object]) -> None:
    """Checks the format and the amount of text for which a GPU keeps memory free."""
    check_choice("offload", "cpu_format", cpu_format, ("auto", *FORMATS))
    if options.get("compute") == "int8" and cpu_format != "auto":
        check_int8(cpu_format)
    for name, value in (("batch", batch), ("max_length", 1 if max_length is None else max_length)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"offload: {name}={value!r}, expected a whole number of at least 1")
        if value < 1:
            raise ValueError(f"offload: {name}={value}, expected a whole number of at least 1")


def check_exact(weights: Weights, cpu_format: str) -> None:
    """Raises ValueError if the format does not hold these weights exactly."""
    if cpu_format == "auto":
        return
    if not isinstance(weights, Mapping):  # the codes of a quantised checkpoint
        allowed: tuple[str, ...] = (weights.format,)
    else:
        first = weights["gate_up"]
        allowed = EXACT[(first[0] if isinstance(first, tuple) else first).dtype]
    if cpu_format not in allowed:
        raise ValueError(
            f'offload: cpu_format="{cpu_format}" does not hold these weights exactly ({" and ".join(allowed)} would): '
            'pass exact=False to allow quantisation, or cpu_format="auto"'
        )


def folder(name: str | Path) -> Path:
    """The model's folder or GGUF file, or this machine's copy of a model from the hub; ValueError if there is none."""
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"offload: path is {kind(name)}, expected a model's folder, or its name on the hub")
    if str(name) and Path(name).is_file() and Path(name).suffix == SUFFIX:
        return Path(name)
    if str(name) and Path(name).is_dir():
        if not (Path(name) / "config.json").is_file() and gguf_file(name) is None:
            raise ValueError(f"offload: {no_model(Path(name))}")
        return Path(name)
    model_name = str(name)
    is_path = not model_name or model_name.startswith((".", "/", "~")) or model_name.count("/") > 1
    if os.path.isfile(model_name):
        raise ValueError(f"offload: {model_name} {IS_A_FILE}")
    if is_path:
        raise ValueError(f"offload: there is no folder {model_name!r}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"offload: {model_name} is not a folder here, and this machine has no copy of a hub model with that name: "
            f"`hf download {model_name}` fetches it"
        ) from error
