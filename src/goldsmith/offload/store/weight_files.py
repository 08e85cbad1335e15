"""The files of a checkpoint folder that hold its weights, by the rule of transformers' `from_pretrained`.

model.safetensors, otherwise the shards of model.safetensors.index.json; whatever else is in the folder is not read. A
folder with one file of another name is read too. goldsmith.hf calls transformers' own resolver, which knows more rules.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from ...core.json_values import parse_json

_OP = "ExpertStore.build"
WHOLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"


def weight_files(folder: Path) -> list[Path]:
    """The files, in transformers' order. Raises ValueError that names them if they are ambiguous or incomplete."""
    if (folder / ADAPTER).is_file():
        raise ValueError(
            f"{_OP}: {folder} holds an adapter ({ADAPTER}), whose weights are not a model's: move its files "
            "(adapter_*) to a folder of their own"
        )
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = folder / INDEX
    if not index.is_file():
        names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{_OP}: {folder} has no safetensors file")
        if len(names) > 1:
            raise ValueError(
                f"{_OP}: {folder} has neither {WHOLE} nor {INDEX}, and several other files, {', '.join(names[:3])}: "
                "it is unclear which of them holds the weights"
            )
        return [folder / names[0]]
    try:
        names = sorted({str(name) for name in parse_json(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_OP}: {index}: not an index of shards: {error}") from error
    for name in names:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{_OP}: {index} names {name}, which is outside of the folder")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{_OP}: {folder}: the shard {missing[0]}, which its index names, is missing")
    return [folder / name for name in names]


def files_of(folder: Path) -> list[Path]:
    """The files of a checkpoint that determine its weights."""
    extra = [folder / name for name in ("config.json", INDEX)]
    return [*weight_files(folder), *(path for path in extra if path.is_file())]
