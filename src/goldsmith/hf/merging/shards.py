"""ShardWriter: a checkpoint written shard by shard into a folder that appears only when it is complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.foreign_errors import writing

SHARD = 1 << 29  # bytes after which a shard is closed; a layer is never divided
# suffixes of the files that are copied from the base's folder
COPIED = (".json", ".jinja", ".model", ".txt", ".md", ".tiktoken")
LEFT = ("adapter_config.json", "config.json")  # files with such a suffix that are not copied


class ShardWriter:
    """A context manager that writes a folder, which appears at `output` when the block ends, and never after an error.

    Raises ValueError if `output` exists and is not an empty folder.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        check_output(output)
        self._shard: dict[str, Tensor] = {}
        self._bytes = self.total = 0
        self._keys: list[list[str]] = []  # of each shard that is written
        self._folder: Path | None = None

    def __enter__(self) -> ShardWriter:
        with writing(self.output):
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.output.name}.", dir=self.output.parent))
        return self

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise ValueError("goldsmith.hf.merge: the output folder is not open")
        return self._folder

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that stay together."""
        for name, tensor in tensors.items():
            self._shard[name] = tensor.contiguous()
            self._bytes += tensor.nbytes

    def close_layer(self) -> None:
        """Marks a layer as complete, and writes the shard if it is large enough."""
        if self._bytes >= SHARD:
            self._write()

    def finish(self, source: Path | None, config: Mapping[str, object]) -> None:
        """Writes the last shard, the index, config.json, and copies of the other files in `source`, if given."""
        self._write()
        count = len(self._keys)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        )
        for i, name in enumerate(names):
            os.replace(self.folder / _unnamed(i), self.folder / name)
        if count > 1:
            weight_map = {key: name for name, keys in zip(names, self._keys) for key in keys}
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            with writing(self.output):
                _write_json(self.folder / "model.safetensors.index.json", index)
        with writing(self.output):
            for path in sorted(source.iterdir()) if source is not None else ():
                if (
                    path.is_file()
                    and path.suffix in COPIED
                    and path.name not in LEFT
                    and not path.name.endswith(".index.json")
                ):
                    shutil.copyfile(path, self.folder / path.name)
            _write_json(self.folder / "config.json", config)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._shard.clear()
        if kind is None:
            if self.output.is_dir():
                self.output.rmdir()  # it is empty
            os.chmod(self.folder, 0o777 & ~_umask())
            os.replace(self.folder, self.output)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self) -> None:
        if not self._shard:
            return
        path = self.folder / _unnamed(len(self._keys))
        with writing(self.output):
            save_file(self._shard, path, metadata={"format": "pt"})
            os.chmod(path, 0o666 & ~_umask())  # safetensors gives its files mode 600
        self._keys.append(list(self._shard))
        self.total += self._bytes
        self._shard, self._bytes = {}, 0


def check_output(output: Path) -> None:
    """Raises ValueError unless the folder can be written: it does not exist, or is empty."""
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise ValueError(f"output {output} exists and is not an empty folder: give another, or remove it first")


def _unnamed(index: int) -> str:
    return f"shard-{index:05}.unfinished"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
