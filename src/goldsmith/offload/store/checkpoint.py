"""A folder of safetensors files as a source; the names of the tensors decide which are experts.

    ...layers.3.<anything>experts.7.{gate_proj,up_proj,down_proj}.weight      also w1, w3, w2 (Mixtral)
    ...layers.3.<anything>experts.{gate_up_proj,down_proj}[_bias]             fused, [E, 2I, H] and [E, H, I]

Tensors are read on demand, one expert at a time. goldsmith.hf converts other forms: transposed or interleaved weights
(gpt-oss), and the codes of quantised checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .weight_files import files_of, weight_files

_OP = "ExpertStore.build"
_PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_ONE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(\w+)\.weight")
_ALL = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?experts\.(gate_up_proj|down_proj)(_bias)?")
_ANY = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?experts\.(.+)")


class CheckpointSource(Mapping[int, dict[str, Any]]):
    """A mapping of layer to its experts, for every layer that has experts.

    Raises ValueError for a folder without safetensors, a missing shard or tensor, and an unknown name among experts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, object] = {}
        self._file_of = self._index()
        self._layers = self._sorted()
        if not self._layers:
            raise ValueError(
                f"{_OP}: {folder} has no experts: none of its {len(self._file_of)} tensors has the name of an expert"
            )

    @property
    def files(self) -> list[Path]:
        """All files from which the weights are read."""
        return files_of(self.folder)

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._layers))

    def __getitem__(self, layer: int) -> dict[str, Any]:
        names = self._layers[layer]
        if "gate_up" in names or "down" in names:
            missing = [name for name in ("gate_up", "down") if name not in names]
            if missing:
                raise ValueError(f"{_OP}: {self.folder}: layer {layer} lacks {missing[0]}_proj of its experts")
            return {name: _LazyExperts(self._slice(key), self._experts(key)) for name, key in names.items()}
        last = max(expert for _, expert in names)
        for expert in range(last + 1):
            for part in ("gate", "up", "down"):
                if (part, expert) not in names:
                    raise ValueError(
                        f"{_OP}: {self.folder}: layer {layer}, expert {expert} lacks the {part} projection"
                    )
        gate, up, down = (
            _LazyExperts(self._reader([names[part, expert] for expert in range(last + 1)]), last + 1)
            for part in ("gate", "up", "down")
        )
        return {"gate_up": (gate, up), "down": down}

    def _reader(self, keys: list[str]) -> Callable[[int], Tensor]:
        return lambda expert: self._get(keys[expert])

    def _slice(self, key: str) -> Callable[[int], Tensor]:
        def read(expert: int) -> Tensor:
            with torch.device("cpu"):  # safetensors puts a slice on torch's default device
                return self._shard(self._file_of[key]).get_slice(key)[expert]

        return read

    def _experts(self, key: str) -> int:
        return self._shard(self._file_of[key]).get_slice(key).get_shape()[0]

    def _get(self, key: str) -> Tensor:
        from safetensors import SafetensorError

        try:
            return self._shard(self._file_of[key]).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{_OP}: {self.folder / self._file_of[key]}: {key} cannot be read: {error}") from error

    def _shard(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                with open(self.folder / file, "rb"):  # safetensors reports an unreadable file as missing
                    pass
                self._open[file] = safe_open(self.folder / file, "pt")
            except PermissionError as error:
                raise ValueError(f"{_OP}: {self.folder / file} cannot be read: {error.strerror}") from error
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{_OP}: {self.folder / file}: not a complete safetensors file: {error}") from error
        return self._open[file]

    def _index(self) -> dict[str, str]:
        """Name of a tensor -> its file; a name in two shards has the last one's tensor, as in transformers."""
        names = [path.name for path in weight_files(self.folder)]
        return {key: name for name in names for key in self._shard(name).keys()}

    def _sorted(self) -> dict[int, dict[Any, str]]:
        """Layer -> ((projection, expert) or the fused tensor's name -> name in the files)."""
        names_of: dict[int, dict[Any, str]] = {}
        for key in self._file_of:
            part: object
            if one := _ONE.fullmatch(key):
                if one[3] not in _PROJECTIONS:
                    raise self._unknown_name(key)
                layer, part = int(one[1]), (_PROJECTIONS[one[3]], int(one[2]))
            elif whole := _ALL.fullmatch(key):
                layer, part = int(whole[1]), whole[2].removesuffix("_proj") + (whole[3] or "")
            elif _ANY.fullmatch(key):
                raise self._unknown_name(key)
            else:
                continue
            names_of.setdefault(layer, {})[part] = key
        for layer, names in names_of.items():
            if len({isinstance(part, str) for part in names}) > 1:
                raise ValueError(f"{_OP}: {self.folder}: layer {layer} has both fused and separate experts")
        return names_of

    def _unknown_name(self, key: str) -> ValueError:
        return ValueError(
            f"{_OP}: {self.folder}: {key} is not a known name of plain expert weights; "
            "goldsmith.offload.from_pretrained reads more kinds of checkpoints (pip install 'transformers>=5' peft)"
        )


class _LazyExperts:
    """One tensor per expert, read when it is requested."""

    def __init__(self, read: Callable[[int], Tensor], count: int) -> None:
        self._read, self._count = read, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        return (self._read(expert) for expert in range(self._count))
