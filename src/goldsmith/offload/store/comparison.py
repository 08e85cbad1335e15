"""The comparison of a store with a source: sizes, activation, format, and a sample or all bytes of every expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import StoreMismatch
from . import samples
from .header import SAMPLE, Header, checked_options
from .source import CodedExpert, FloatExpert, Source, encode, experts_of, layers_of
from .writer import is_exact_in

_OP = "ExpertStore.check_source"


def check_source(
    header: Header,
    path: Path,
    source: Source,
    format: str | None,
    options: Mapping[str, object],
    raw: Callable[[int, int], Tensor] | None = None,
) -> None:
    """Raises StoreMismatch for the first difference. raw: a function that returns an expert's block in the file; given,
    every byte is compared.
    """

    def fail(problem: str, layer: int | None = None, expert: int | None = None) -> StoreMismatch:
        place = "" if layer is None else f"layer {layer}" + ("" if expert is None else f", expert {expert}") + ": "
        return StoreMismatch(
            f"{path} is not a store of these weights: {place}{problem}. Build one from them at another path, "
            "or give no store: then the cache folder is used",
            layer=layer, expert=expert,
        )  # fmt: skip

    own: Mapping[str, object] = samples.options_of(header)
    for name, value in checked_options(_OP, options).items():
        if value != own[name] and (name != "alpha" or own["activation"] == "swiglu_oai"):
            raise fail(f"{name}={value!r}, but {own[name]!r} in the store")
    layout = header.blocks.layout
    if format not in (None, layout.format):
        raise fail(f"format={format!r}, but {layout.format!r} in the store")
    entries = {entry.layer: entry for entry in header.layers}
    compared = set()
    block = torch.zeros(0 if raw is None else header.blocks.stride, dtype=torch.uint8, device="cpu")
    for layer, weights in layers_of(source, _OP):
        entry = entries.get(layer)
        if entry is None:
            raise fail(f"it is not in the store, which has {', '.join(map(str, entries))}", layer)
        compared.add(layer)
        count = 0
        for expert in experts_of(weights, f"{_OP}: layer {layer}", sampled=raw is None):
            if count < entry.experts:
                difference = _difference(header, expert, entry.samples[count * SAMPLE : (count + 1) * SAMPLE])
                if not difference and raw is not None:
                    difference = _other_bytes(header, expert, block, raw(layer, count))
                if difference:
                    raise fail(difference, layer, count)
            count += 1
        if count != entry.experts:
            raise fail(f"{count} experts, but {entry.experts} in the store", layer)
    missing = [layer for layer in entries if layer not in compared]
    if missing:
        raise fail("only the store has it", missing[0])


def _difference(header: Header, expert: FloatExpert | CodedExpert, sample: bytes) -> str | None:
    layout = header.blocks.layout
    if isinstance(expert, CodedExpert) != (header.source == "codes"):
        names = ("plain weights", "codes")
        return (
            f"{names[isinstance(expert, CodedExpert)]}, but the store was built from {names[header.source == 'codes']}"
        )
    hidden, inner = (
        (expert.layout.hidden_size, expert.layout.intermediate_size)
        if isinstance(expert, CodedExpert)
        else (expert.down.shape[0], expert.down.shape[1])
    )
    if (hidden, inner) != (layout.hidden_size, layout.intermediate_size):
        return f"H={hidden}, I={inner}, but H={layout.hidden_size}, I={layout.intermediate_size} in the store"
    if tuple(expert.biases) != header.blocks.biased:
        return f"biases {list(expert.biases)}, but {list(header.blocks.biased)} in the store"
    return None if samples.digest(expert) == sample else "different numbers (in the sample of this expert)"


def _other_bytes(header: Header, expert: FloatExpert | CodedExpert, block: Tensor, stored: Tensor) -> str | None:
    """The first difference between the stored block and this expert, packed into `block`; only for exact stores."""
    layout = header.blocks.layout
    if isinstance(expert, CodedExpert):
        codes = expert.expert
    else:
        for name, matrix in expert.matrices.items():
            kept = matrix if is_exact_in(layout.format, matrix.dtype) else matrix.to(layout.kind.codes).to(matrix.dtype)
            if not torch.equal(kept, matrix):
                return f"{name} has numbers that {layout.format} cannot hold"
        codes = encode(
            expert, layout, "", 0, allow_nonfinite=True
        )  # a NaN is not an error here, but must have the same bits
    header.blocks.write(block, codes, expert.biases)
    for name, (begin, end) in header.blocks.sections.items():
        if not torch.equal(block[begin:end], stored[begin:end]):
            return f"different numbers in {name} (every byte was compared; the samples are equal)"
    return None
