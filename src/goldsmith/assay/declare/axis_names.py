"""Names of the axes of a result."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def axis_names(shape: torch.Size, sizes: Mapping[str, object]) -> tuple[str, ...]:
    """Each axis named after the case size of its length if that is unique among sizes and axes, else "0", "1", ..."""
    lengths = list(shape)

    def name(axis: int) -> str:
        fitting = [k for k, v in sizes.items() if isinstance(v, int) and not isinstance(v, bool) and v == lengths[axis]]
        return (
            fitting[0] if len(fitting) == 1 and lengths.count(lengths[axis]) == 1 and lengths[axis] > 1 else str(axis)
        )

    return tuple(name(i) for i in range(len(lengths)))
