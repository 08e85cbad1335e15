"""The config and the class of the model in a folder, without running code from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from ..core.json_values import parse_json
from .checkpoint.foreign_errors import brief, explained
from .checkpoint.gguf.files import check_architecture, config_of_file, gguf_file

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MOST_LAYERS = 10_000
IS_A_FILE = "is a file; expected the folder of a model, or a .gguf file"
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # the config's name for it, by model
# the auto classes that give a model with logits over tokens, in order of preference
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")


def config_of(folder: Path) -> PreTrainedConfig:
    """The config of a model's folder, or of a GGUF file: a config.json beside it comes before its metadata.

    Raises ValueError for a config that cannot be read or needs the folder's code, and for a GGUF file that is damaged
    or of an unsupported architecture.
    """
    from transformers import AutoConfig

    file = gguf_file(folder)
    if file is not None:
        check_architecture(file)
        folder = file.parent
        if not (folder / "config.json").is_file():
            return config_of_file(file)
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(no_model(folder))
    try:
        content = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {brief(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it is not a JSON object")
    model_type = content.get("model_type")
    try:
        with explained(f"{path}: model_type {model_type!r} cannot be read"):
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        if content.get("auto_map"):
            raise ValueError(
                f"{path}: model_type {model_type!r} is defined by Python code in the folder (auto_map), which "
                "goldsmith never runs, and this transformers has no class for it"
            ) from error
        raise


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the part that reads and writes text, if the whole model has no forward (Qwen3-Omni)."""
    if "thinker_config" not in (config.sub_configs or {}):
        return config
    thinker = config.thinker_config
    if getattr(config, "quantization_config", None) is not None:
        thinker.quantization_config = config.quantization_config
    return thinker


def class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of transformers that the config names, if it gives logits; otherwise that of an auto class.

    Raises ValueError for a model that is not a language model.
    """
    import transformers

    config = language_config(config)
    named_classes = getattr(config, "architectures", None)
    for name in named_classes if isinstance(named_classes, list) else ():
        named = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
        if isinstance(named, type) and _fits(named, config):
            return named
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            mapped = auto._model_mapping[type(config)]
            return cast("type[PreTrainedModel]", mapped[0] if isinstance(mapped, tuple) else mapped)
    raise ValueError(
        f"transformers has no class with a language model's head for the model type {config.model_type!r} "
        f"({type(config).__name__})"
    )


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, in a dtype. Raises ValueError for a config of which no model can be made."""
    model_class: Any = class_of(config)
    config = language_config(config)
    _check_counts(config)
    text = config.sub_configs.get("text_config")
    if text is not None and model_class.config_class is text and type(config) is not text:
        whole, config = config, config.get_text_config()
        if getattr(whole, "quantization_config", None) is not None:
            config.quantization_config = whole.quantization_config
    with explained(f"no {model_class.__name__} can be made of the values in config.json"), torch.device("meta"):
        return model_class._from_config(config, dtype=dtype)


def _check_counts(config: PreTrainedConfig) -> None:
    """Raises ValueError for counts that no model has: transformers would build a billion layers without end."""
    text = config.get_text_config()
    layers, chosen = (getattr(text, name, None) for name in ("num_hidden_layers", "num_experts_per_tok"))
    if type(layers) is int and layers > MOST_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers is {layers:,}; at most {MOST_LAYERS:,} are supported")
    experts = next((n for name in EXPERT_COUNTS if type(n := getattr(text, name, None)) is int), None)
    if type(chosen) is int and experts is not None and not 0 < chosen <= experts:
        raise ValueError(f"config.json: num_experts_per_tok is {chosen:,}, but the model has {experts:,} experts")


def load_whole(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model in memory, by transformers alone: for pickles, which are read with weights_only."""
    with explained(f"{folder}: its weights cannot be loaded"):
        return class_of(config).from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def _fits(named: type, config: PreTrainedConfig) -> bool:
    from transformers import PreTrainedModel
    from transformers.generation.utils import GenerationMixin

    return (
        issubclass(named, PreTrainedModel)
        and issubclass(named, GenerationMixin)
        and named.config_class is type(config)
        and "forward" in {name for one in named.__mro__[: named.__mro__.index(PreTrainedModel)] for name in vars(one)}
    )


def no_model(folder: Path) -> str:
    """The message about a folder without config.json; it says what the folder seems to hold."""
    text = f"{folder} has no config.json: it is not the folder of a transformers model"
    if (folder / "adapter_config.json").is_file():
        return f"{text}, but that of an adapter (adapter_config.json): give its base model"
    gguf = sorted(folder.glob("*.gguf"))
    return f"{text}, but it has {gguf[0].name}" if gguf else text
