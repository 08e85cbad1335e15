"""Our classes have the names of transformers' classes: lists of layers to shard, and printed models, go by name."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

PREFIX = "Applied"  # in the source, where pickle finds a class by its qualified name

Class = TypeVar("Class", bound=type[nn.Module])


def under_its_name(cls: Class) -> Class:
    """The class, whose `__name__` is now that of the class of transformers that it stands for."""
    cls.__name__ = cls.__name__.removeprefix(PREFIX)
    return cls
