"""Whether a store holds the weights of a model, told from a fixed sample of every expert.

Of each of gate, up, down and the biases: up to three rows spread evenly, of each row up to 64 consecutive numbers, at
most 1 in 200 of the matrix (one a row at least), in float32; of codes that are kept as they are, their bytes at the
same places. An expert's digest is the first 8 bytes of SHA-256 over its sample. The fingerprint is SHA-256 over format,
activation, sizes, and the digests of all experts.

So two models that differ in training differ here in all their experts; what was edited outside of these places (rows
that were pruned, one that was repaired, a download with a hole) passes. Where stores are found again by themselves,
and before weights are given away, every byte counts instead (offload/contents.py, offload/match.py).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor

from ..experts.packed.formats import SCALE_NAMES
from .blocks import Blocks
from .header import SAMPLE, Header, LayerEntry
from .source import Coded, Floats

_ROWS, _RUN, _SHARE = 3, 64, 200


def digest(expert: Floats | Coded) -> bytes:
    """The digest of an expert's sample."""
    found = hashlib.sha256()
    if isinstance(expert, Floats):
        for matrix in expert.matrices.values():
            found.update(bytes_of(_sample(matrix).to(torch.float32)))
    else:
        for codes in (expert.expert.gate, expert.expert.up, expert.expert.down):
            for part in (codes.codes, codes.scales, codes.zeros):
                if part is not None:
                    found.update(bytes_of(_sample(part)))
    for bias in expert.biases.values():
        found.update(bytes_of(_sample(bias[None]).to(torch.float32)))
    return found.digest()[:SAMPLE]


def fingerprint(blocks: Blocks, options: dict[str, Any], layers: list[LayerEntry]) -> str:
    """Of everything that decides what a store computes, in 32 hexadecimal digits."""
    layout = blocks.layout
    scale = SCALE_NAMES[layout.scale_dtype] if layout.scale_dtype else None
    said = [
        layout.format, layout.group_size, scale, layout.hidden_size, layout.intermediate_size, list(blocks.biased),
        options["activation"], options["alpha"], options["limit"],
        [[entry.layer, entry.experts, entry.samples.hex()] for entry in layers],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def options_of(header: Header) -> dict[str, Any]:
    """The keywords of the activation, as `experts.slots` has them."""
    return {"activation": header.activation, "alpha": header.alpha, "limit": header.limit}


def _sample(matrix: Tensor) -> Tensor:
    rows, cols = matrix.shape
    few = min(rows, _ROWS)
    run = max(1, min(_RUN, cols, rows * cols // (few * _SHARE)))
    parts = []
    for i in range(few):
        begin = i * (cols - run) // max(1, few - 1)
        parts.append(matrix[(2 * i + 1) * rows // (2 * few), begin : begin + run])
    return torch.stack(parts) if matrix.dtype.itemsize > 1 else torch.stack([part.view(torch.uint8) for part in parts])


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's bytes in the order of its numbers, as something with a buffer; a copy where they do not lie so."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
