"""open_checkpoint: the weights that MODEL means, in safetensors or GGUF files."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from .gguf.files import gguf_file
from .reader import ModelCheckpoint
from .source import WeightSource


def open_checkpoint(place: Path, model: nn.Module) -> WeightSource:
    """The source of the model's weights; raises ValueError for what cannot be read."""
    file = gguf_file(place)
    if file is None:
        return ModelCheckpoint(place, model)
    from .gguf.reader import GgufCheckpoint  # needs the package gguf

    return GgufCheckpoint(file, model)
