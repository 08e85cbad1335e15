"""Which GGUF file MODEL means, and how transformers reads its config and its tokenizer."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..foreign_errors import explained
from .header import GgufHeader, check_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUFFIX = ".gguf"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
LAYER = re.compile(r"blk\.(\d+)\.")
SIZES = (
    *("block_count", "context_length", "embedding_length", "expert_count", "expert_used_count"),
    *("attention.head_count", "attention.head_count_kv"),
)
OPTIONAL_SIZES = ("attention.key_length", "expert_feed_forward_length", "expert_shared_feed_forward_length")
LARGEST = 2**31
TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# general.architecture -> the keys of its metadata that transformers 5.23 leaves out of the config
ARCHITECTURES: dict[str, dict[str, str]] = {
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen35moe": {},
    "gpt-oss": {},
}
WITHOUT_CONFIG = ("gpt-oss",)  # transformers reads neither its head size nor its rotary scaling from the metadata


def gguf_file(model: str | Path) -> Path | None:
    """The GGUF file that MODEL means, the first of a split one; None if it means anything else.

    MODEL is the file, or a folder without other weights and with one GGUF file. Raises ValueError for a folder with
    several, for a missing part, and if the package gguf is not installed.
    """
    path = Path(model)
    if path.is_file() and path.suffix == SUFFIX:
        files = [path]
    elif path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        files = sorted(path.glob(f"*{SUFFIX}"))
    else:
        return None
    models = {_first(file) for file in files}
    if not models:
        return None
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models))
        raise ValueError(f"{path} holds several GGUF files ({names}): give the path of one")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{path} is a GGUF file, and reading it needs the package gguf: pip install gguf")
    return models.pop()


def parts_of(file: Path) -> list[Path]:
    """All files of a model whose first file this is; raises ValueError for a missing one."""
    match = PART.fullmatch(file.name)
    if match is None:
        return [file]
    parts = [file.with_name(f"{match[1]}-{k:05}-of-{match[3]}.gguf") for k in range(1, int(match[3]) + 1)]
    missing = next((part for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ValueError(f"{file.parent}: the part {missing.name} of {file.name} is missing")
    return parts


def check_architecture(file: Path) -> None:
    """Raises ValueError for a damaged file and for an architecture that is not supported."""
    architecture = check_header(file).architecture
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file}: the GGUF architecture {architecture!r} is not supported; mixtures of experts that are: "
            f"{', '.join(ARCHITECTURES)}"
        )


def config_of_file(file: Path) -> PreTrainedConfig:
    """The config that transformers makes of a file's metadata, with the sizes that it leaves out."""
    from transformers import AutoConfig

    header = check_header(file)
    if header.architecture in WITHOUT_CONFIG:
        raise ValueError(
            f"{file}: transformers does not read the whole config of {header.architecture!r} from a GGUF file: put the "
            "model's config.json beside it"
        )
    names = {name for part in parts_of(file) for name in check_header(part).tensors}
    _check_sizes(file, header, names)
    with explained(f"{file}: its metadata does not describe a model"):
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    text = config.get_text_config()
    for key, name in ARCHITECTURES[header.architecture].items():
        value = header.fields.get(f"{header.architecture}.{key}")
        if value is not None:
            setattr(text, name, value)
    config.tie_word_embeddings = "output.weight" not in names  # transformers looks at the first part alone
    return config


def _check_sizes(file: Path, header: GgufHeader, names: set[str]) -> None:
    """Raises ValueError for sizes that no model can have: one changed byte may ask for a billion layers."""
    for key in (*SIZES, *OPTIONAL_SIZES):
        value = header.fields.get(f"{header.architecture}.{key}")
        if key in OPTIONAL_SIZES and value is None:
            continue
        if type(value) is not int or not 0 < value < LARGEST:
            raise ValueError(f"{file}: its metadata says {key} {value}, expected a whole number of at least 1")
    layers = {match[1] for name in names if (match := LAYER.match(name))}
    count = header.fields[f"{header.architecture}.block_count"]
    if count != len(layers):
        raise ValueError(f"{file}: its metadata says {count} layers, but its tensors belong to {len(layers)}")


def tokenizer_arguments(place: Path) -> tuple[Path, dict[str, str]]:
    """The arguments of AutoTokenizer.from_pretrained: tokenizer files beside a GGUF file come before its own."""
    file = gguf_file(place)
    if file is None:
        return place, {}
    if any((file.parent / name).is_file() for name in TOKENIZER):
        return file.parent, {}
    if "tokenizer.ggml.tokens" not in check_header(file).fields:
        raise ValueError(f"{file} has no tokenizer in its metadata: put the model's tokenizer.json beside it")
    return file.parent, {"gguf_file": file.name}


def _first(file: Path) -> Path:
    match = PART.fullmatch(file.name)
    return file.with_name(f"{match[1]}-00001-of-{match[3]}.gguf") if match else file
