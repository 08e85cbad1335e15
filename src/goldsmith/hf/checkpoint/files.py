"""The files of a model's folder that hold its weights: exactly those that `from_pretrained` reads, or a refusal.

transformers' own resolver chooses among the files. Whatever else is in the folder is not read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ...core.json_values import parse_json
from .foreign_errors import brief

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ADAPTER_CONFIG = "adapter_config.json"
INDEX = ".index.json"


@dataclass(frozen=True)
class WeightFiles:
    """The files with a model's weights, in the order in which transformers reads them, and their index if any."""

    folder: Path
    paths: list[Path]
    index: Path | None
    metadata: dict[str, object] | None

    @property
    def pickled(self) -> bool:
        """Whether they are pickles (pytorch_model.bin), which only transformers reads."""
        return not all(path.suffix == ".safetensors" for path in self.paths)

    @property
    def sources(self) -> list[Path]:
        """All files that determine the weights."""
        extra = [self.folder / "config.json", self.index]
        return [*self.paths, *(path for path in extra if path is not None and path.is_file())]


def weight_files(folder: Path, config: PreTrainedConfig) -> WeightFiles:
    """The weight files of a folder. Raises ValueError that names the files where they are ambiguous or incomplete."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    _refuse_other_layouts(folder)
    try:
        names, metadata = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=str(folder),
            variant=None,
            gguf_file=None,
            use_safetensors=None,
            user_agent=None,
            is_remote_code=False,
            transformers_explicit_filename=getattr(config, "transformers_weights", None),
            download_kwargs={"local_files_only": True},
        )
    except OSError as error:
        raise ValueError(
            f"{folder}: no file with weights under a name that transformers reads (model.safetensors, "
            f"model.safetensors.index.json with its shards){_others(folder)}"
        ) from error
    except Exception as error:  # a damaged index raises errors of many classes
        lacks = f"it has no {error}" if isinstance(error, KeyError) else brief(error)
        raise ValueError(f"{_index_of(folder) or folder}: not an index with a weight_map: {lacks}") from error
    paths = [Path(name) for name in names or []]
    for name in getattr(type(config), "extra_files", ()):  # weights that a class keeps in files of their own
        if (folder / name).is_file() and folder / name not in paths:
            paths.append(folder / name)
    index = _index_of(folder) if metadata is not None else None
    _check(folder, paths, index)
    return WeightFiles(folder, paths, index, metadata)


def default_dtype(files: WeightFiles | None, config: PreTrainedConfig) -> torch.dtype:
    """The dtype that `from_pretrained` chooses: the config's, otherwise that of the first weight in floating point.

    float32 for a GGUF file (None), whose config has no dtype.
    """
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if own is not None:
        dtype = getattr(torch, own, None) if isinstance(own, str) else own
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"config.json: dtype is {own!r}, expected the name of one of torch's dtypes")
        return dtype
    if files is not None and not files.pickled:
        with _opened(files.paths[0]) as file:
            for name in file.keys():
                dtype = file.get_tensor(name).dtype
                if dtype.is_floating_point:
                    return dtype
    return torch.float32


def _refuse_other_layouts(folder: Path) -> None:
    if (folder / ADAPTER_CONFIG).is_file():
        if (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} holds a model and an adapter ({ADAPTER_CONFIG}), and transformers would load both: move the "
                "adapter's files (adapter_*) to a folder of their own"
            )
        raise ValueError(
            f"{folder} is the folder of an adapter ({ADAPTER_CONFIG}), not of a model: its base model is "
            f"{_base_of_adapter(folder)!r}"
        )
    shards = sorted(folder.glob("shard-*-model-*-of-*.safetensors"))
    if shards:
        raise ValueError(
            f"{folder} holds a distributed checkpoint ({shards[0].name}), of which each rank has a part: load it with "
            "from_pretrained and write it with save_pretrained"
        )


def _base_of_adapter(folder: Path) -> str:
    try:
        return str(parse_json((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown"


def _index_of(folder: Path) -> Path | None:
    return next((folder / name for name in _index_names() if (folder / name).is_file()), None)


def _index_names() -> tuple[str, ...]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

    return SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME


def _check(folder: Path, paths: list[Path], index: Path | None) -> None:
    outside = [path for path in paths if not _inside(path, folder)]
    if outside:
        raise ValueError(f"{index or folder}: names the file {outside[0]}, which is outside of the folder")
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        number = f"{len(missing)} shards of its index are" if len(missing) > 1 else "1 shard of its index is"
        raise ValueError(f"{folder}: {number} missing, first {missing[0]}")
    if not paths:
        raise ValueError(f"{index or folder}: names no file with weights")


def _inside(path: Path, folder: Path) -> bool:
    """By its name; a link is followed, because the hub's cache consists of links."""
    try:
        relative = PurePosixPath(path.relative_to(folder).as_posix())
    except ValueError:
        return False
    return ".." not in relative.parts


def _others(folder: Path) -> str:
    """The files with weights that transformers does not read, for a message."""
    names = sorted(path.name for end in ("safetensors", "gguf", "bin", "pt", "pth") for path in folder.glob(f"*.{end}"))
    return f"; it has {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""


def keys_of(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    with _opened(path) as file:
        return list(file.keys())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with open(path, "rb"):  # safetensors reports an unreadable file as missing
            pass
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read, not a whole safetensors file: {error}") from error
