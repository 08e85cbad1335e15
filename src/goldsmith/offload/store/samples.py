"""Samples: a fixed selection of every expert's numbers, which identifies the weights of a store.

The sample of each of gate, up, down and the biases is up to three evenly spaced rows, and of each row up to 64
consecutive numbers in float32: at most 1 number in 200 of the matrix, but at least one per row. Codes are sampled as
bytes at the same places. An expert's digest is the first 8 bytes of SHA-256 of its sample. The fingerprint is the
SHA-256 of format, activation, sizes, and the digests of all experts.

Two models that differ by training differ in the digests of all experts. An edit outside the sampled places goes
unnoticed: pruned rows, a repaired row, a download with a hole. So the cache folder finds stores by every byte
(store/source_key.py), and so does the comparison before weights are deleted (store/comparison.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from ...experts.packed.formats import SCALE_NAMES
from .blocks import ExpertBlocks
from .header import SAMPLE, ActivationOptions, Header, LayerEntry
from .source import CodedExpert, FloatExpert

_ROWS, _RUN, _SHARE = 3, 64, 200


def digest(expert: FloatExpert | CodedExpert) -> bytes:
    """The digest of an expert's sample."""
    sha = hashlib.sha256()
    if isinstance(expert, FloatExpert):
        for matrix in expert.matrices.values():
            sha.update(bytes_of(_sample(matrix).to(torch.float32)))
    else:
        hidden, inner, own = expert.layout.hidden_size, expert.layout.intermediate_size, expert.expert
        for codes, rows in ((own.gate, inner), (own.up, inner), (own.down, hidden)):
            for part in (codes.codes, codes.scales, codes.zeros):
                if part is not None:
                    sha.update(_sampled_bytes(part, rows if expert.sampled else part.shape[0], expert.sampled))
    for bias in expert.biases.values():
        sha.update(bytes_of(_sample(bias[None]).to(torch.float32)))
    return sha.digest()[:SAMPLE]


def fingerprint(blocks: ExpertBlocks, options: Mapping[str, object], layers: list[LayerEntry]) -> str:
    """A hash of everything that decides what a store computes, 32 hexadecimal digits."""
    layout = blocks.layout
    scale = SCALE_NAMES[layout.scale_dtype] if layout.scale_dtype else None
    facts = [
        layout.format, layout.group_size, scale, layout.hidden_size, layout.intermediate_size, list(blocks.biased),
        options["activation"], options["alpha"], options["limit"],
        [[entry.layer, entry.experts, entry.samples.hex()] for entry in layers],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def options_of(header: Header) -> ActivationOptions:
    """activation, alpha and limit as keywords of `experts.slots`."""
    return {"activation": header.activation, "alpha": header.alpha, "limit": header.limit}


def sampled_rows(rows: int) -> list[int]:
    """The rows of a matrix with so many of them that its sample is of."""
    few = min(rows, _ROWS)
    return [(2 * i + 1) * rows // (2 * few) for i in range(few)]


def _sample(matrix: Tensor) -> Tensor:
    return torch.stack([matrix[row, begin:end] for row, begin, end in _places(*matrix.shape)])


def _sampled_bytes(part: Tensor, rows: int, sampled: bool) -> bytes:
    """The bytes of `_sample`, in NumPy, which is quicker. sampled: only the sampled ones of the `rows` rows are left"""
    whole = part if part.stride(1) == 1 or part.shape[1] < 2 else part.contiguous()
    size = part.dtype.itemsize
    data = (whole if whole.dtype == torch.uint8 else whole.view(torch.uint8)).numpy()
    places = enumerate(_places(rows, part.shape[1]))
    return b"".join([data[i if sampled else row, begin * size : end * size].data for i, (row, begin, end) in places])


@functools.lru_cache(maxsize=256)
def _places(rows: int, cols: int) -> list[tuple[int, int, int]]:
    """(row, first column, end) of each run of the sample of a matrix"""
    chosen = sampled_rows(rows)
    few = len(chosen)
    run = max(1, min(_RUN, cols, rows * cols // (few * _SHARE)))
    begins = [i * (cols - run) // max(1, few - 1) for i in range(few)]
    return [(row, begin, begin + run) for row, begin in zip(chosen, begins)]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in logical order as a buffer; copies if the tensor is not contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
