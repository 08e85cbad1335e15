"""Names of tensors: which expert and projection they belong to, their layer, and their natural order."""

from __future__ import annotations

import re

from ..checkpoint.formats.layer import PROJECTIONS

_EXPERT = re.compile(r"(?:^|\.)(\d+)\.(\w+)\.(\w+)$")


def expert_of(name: str) -> tuple[int, str] | None:
    """(expert, "gate", "up" or "down") of a tensor of one expert, by its name; None for other tensors."""
    match = _EXPERT.search(name)
    projection = PROJECTIONS.get(match[2]) if match else None
    return None if match is None or projection is None else (int(match[1]), projection)


def layer_of(name: str) -> str:
    """The part of a name up to the number of its layer; the whole name without one."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match[1] if match else name


def natural_key(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
