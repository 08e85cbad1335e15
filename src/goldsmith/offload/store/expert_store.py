"""ExpertStore: a model's experts in one read-only, memory-mapped file, shared by all processes that open it."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from ...core.shapes import check_choice
from ...experts import PackedExperts
from ...experts.packed.layout import unpack_expert
from ..errors import StoreCorrupt, StoreMismatch
from . import header as headers
from . import samples
from .blocks import ExpertBlocks
from .header import DIGEST, ActivationOptions, LayerEntry, checksum
from .source import Source
from .writer import Progress, build, check_kind


class ExpertStore:
    """gate_up [2I, H] and down [H, I] of every expert of every layer, packed once; each expert is one range of the file

    Created by `build`, opened by `open`. The file is mapped read-only (PROT_READ, MAP_SHARED), so processes that open
    it share its pages. The tensors that a store returns are views of the mapping and keep it alive, even after `close`.
    Writing to such a view kills the process (SIGSEGV).

    path, nbytes          the file and its size
    format, group_size    as in `experts.pack`; `exact`: the numbers equal the source's, bit for bit
    layers                layer numbers, in the source's order; num_experts(layer) may differ between layers
    hidden_size, intermediate_size, has_bias    the same for every expert
    activation, alpha, limit    arguments of `experts.moe`; `options` holds them as keywords
    blocks                where the parts of an expert lie in its block
    fingerprint           a hash of format, activation, sizes and a sample of every expert of the source
    metadata              the header as a dict, without checksums
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("ExpertStore: use ExpertStore.build or ExpertStore.open")

    # -- construction -------------------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        source: Source | str | os.PathLike[str],
        path: str | os.PathLike[str],
        *,
        format: str = "auto",
        group_size: int | None = None,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float | None = None,
        overwrite: bool = False,
        allow_nonfinite: bool = False,
        progress: Progress | None = None,
    ) -> ExpertStore:
        """Builds the store of a source at `path` and opens it; reads, packs and writes one expert at a time,
        and of codes a few on each core

        source   the folder of a checkpoint (safetensors, store/checkpoint.py), a mapping of layer to weights, or an
                 iterable of (layer, weights). Weights: a dict of gate_up [E, 2I, H] (gate first) or a pair (gate, up)
                 of [E, I, H], down [E, H, I], and optionally gate_up_bias [E, 2I] and down_bias [E, H]. Each is
                 stacked, or an iterable of E tensors; float32, bfloat16 or float16. Or a PackedExperts, whose codes are
                 kept
        format   "auto": the narrowest that holds the weights exactly (bfloat16: "bf16", otherwise "fp32"), or a format
                 of `experts.pack`; group_size as there, but by default smaller if that of the format does not divide
                 the sizes
        activation, alpha, limit    the arguments for `experts.moe`; kept in the header
        overwrite          replace the file at `path`; processes that have it open keep the old one
        allow_nonfinite    accept NaN and Inf; only for "fp32" and "bf16"
        progress           called after every expert with (bytes written, total bytes or None, what was written)

        The file appears at `path` whole or not at all. The same source and arguments give the same bytes.
        Raises FileExistsError, ShapeError, TypeError, ValueError (also for a non-finite number, with layer, expert,
        tensor and position), and OSError when the disk is full.
        """
        options = {"activation": activation, "alpha": alpha, "limit": limit}
        build(
            opened_source(source), Path(path), format=format, group_size=group_size, options=options,
            overwrite=overwrite, allow_nonfinite=allow_nonfinite, progress=progress,
        )  # fmt: skip
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: str = "header") -> ExpertStore:
        """Opens and maps a store

        verify   "none"; "header": magic, version, checksums of the first page and of the header, file size, every
                 offset; "full": also the checksum of every part of every expert, which reads the whole file
        Raises OSError, StoreError for another kind of file or another version, StoreCorrupt for a damaged store.
        """
        check_choice("ExpertStore.open", "verify", verify, ("none", "header", "full"))
        store = object.__new__(cls)
        store._path, store._absolute = Path(path), os.path.abspath(path)
        check_kind("ExpertStore.open", store._path)
        with open(path, "rb") as file:
            store._nbytes = size = os.fstat(file.fileno()).st_size
            if not size:
                raise headers.not_a_store(path, memoryview(b""))
            pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        store._header = headers.read(memoryview(pages), path, check=verify != "none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that it has no read-only tensors
            store._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        store._entries = {entry.layer: entry for entry in store._header.layers}
        store._bases = {}
        if verify == "full":
            store.verify()
        return store

    _path: Path
    _absolute: str  # resolved at opening time, because the current folder may change
    _header: headers.Header
    _bytes: Tensor | None
    _nbytes: int
    _entries: dict[int, LayerEntry]
    _bases: dict[int, PackedExperts]

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        return self._path

    @property
    def format(self) -> str:
        return self.blocks.layout.format

    @property
    def group_size(self) -> int | None:
        return self.blocks.layout.group_size

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._entries)

    def num_experts(self, layer: int) -> int:
        return self._entry(layer).experts

    @property
    def hidden_size(self) -> int:
        return self.blocks.layout.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.blocks.layout.intermediate_size

    @property
    def has_bias(self) -> bool:
        return bool(self.blocks.biased)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def expert_nbytes(self, layer: int) -> int:
        """Bytes of an expert's block, a multiple of 4096: the size of one copy."""
        self._entry(layer)
        return self.blocks.stride

    @property
    def activation(self) -> str:
        return self._header.activation

    @property
    def alpha(self) -> float:
        return self._header.alpha

    @property
    def limit(self) -> float | None:
        return self._header.limit

    @property
    def options(self) -> ActivationOptions:
        """activation, alpha and limit, as keywords of `experts.slots`."""
        return samples.options_of(self._header)

    @property
    def blocks(self) -> ExpertBlocks:
        return self._header.blocks

    @property
    def exact(self) -> bool:
        return self._header.exact

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the weights from which the store was built; None if they were codes."""
        return None if self._header.source == "codes" else getattr(torch, self._header.source)

    @property
    def fingerprint(self) -> str:
        return self._header.fingerprint

    @property
    def metadata(self) -> dict[str, object]:
        return self._header.summary()

    def __repr__(self) -> str:
        total = sum(entry.experts for entry in self._entries.values())
        state = ", closed" if self.closed else ""
        return (
            f"ExpertStore({os.fspath(self._path)!r}, {self.format}, layers={len(self._entries)}, experts={total}, "
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}{state})"
        )

    # -- bytes and numbers --------------------------------------------------------------------------------------------

    def raw(self, layer: int, expert: int) -> Tensor:
        """An expert's block, uint8 [expert_nbytes]: a view of the mapping."""
        entry = self._entry(layer, expert)
        begin = entry.offset + expert * self.blocks.stride
        return self._open()[begin : begin + self.blocks.stride]

    def raw_layer(self, layer: int) -> Tensor:
        """A layer's blocks, uint8 [num_experts, expert_nbytes]: a view of the mapping."""
        entry = self._entry(layer)
        end = entry.offset + entry.experts * self.blocks.stride
        return self._open()[entry.offset : end].view(entry.experts, self.blocks.stride)

    def whole(self) -> Tensor:
        """The whole file, uint8 [nbytes]: a view of the mapping."""
        return self._open()

    def experts(self, layer: int) -> PackedExperts:
        """A layer's experts as the base of `experts.slots` and `experts.moe`: views of the mapping, no copy."""
        self._open()
        if layer not in self._bases:
            self._bases[layer] = self.blocks.base(self.raw_layer(layer))
        return self._bases[layer]

    def dequantize(self, layer: int, expert: int) -> dict[str, Tensor]:
        """gate_up [2I, H], down [H, I] and the existing biases in float32: the numbers that kernels compute with."""
        block = self.raw(layer, expert)
        gate, up, down = unpack_expert(self.blocks.layout, block, block, 0)
        weights = {"gate_up": torch.cat((gate, up)), "down": down}
        return weights | {name: self.blocks.bias(block, name)[0].clone() for name in self.blocks.biased}

    # -- checks -------------------------------------------------------------------------------------------------------

    def verify(self, layers: Iterable[int] | None = None) -> None:
        """Reads every expert of these layers (None: all). StoreCorrupt names the first bad layer, expert and
        section.
        """
        for layer in self.layers if layers is None else layers:
            for expert in range(self.num_experts(layer)):
                self._verify_expert(layer, expert)

    def check_source(
        self,
        source: Source | str | os.PathLike[str],
        *,
        format: str | None = None,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float | None = None,
        whole: bool = False,
    ) -> None:
        """Raises StoreMismatch, which names the first difference, if the store was not built from these weights

        Compares layers, sizes, biases, activation and a fixed sample of every expert (store/samples.py), at most one
        number in 200. Of the store it reads only the header. format=None accepts any. whole=True also compares every
        byte of every expert; the store must be `exact`.
        """
        from .comparison import check_source

        options = {"activation": activation, "alpha": alpha, "limit": limit}
        if whole and not self.exact:
            raise ValueError(
                f"ExpertStore.check_source: whole=True needs an exact store, but {self.format} rounded the source"
            )
        raw = self.raw if whole else None
        check_source(self._header, self._path, opened_source(source), format, options, raw)

    def differs(self, block: Tensor, layer: int, expert: int) -> str | None:
        """The first section in which a block, uint8 [expert_nbytes] on any device, differs from the stored one, or
        None.
        """
        data = block.detach().cpu().contiguous().numpy().data
        stored, each = self._checksums(layer, expert), DIGEST
        at = 0
        for i, (name, (begin, end)) in enumerate(self.blocks.sections.items()):
            if data[at:begin].tobytes().strip(b"\0"):
                return "padding"
            if checksum(data[begin:end]) != stored[i * each : (i + 1) * each]:
                return name
            at = end
        return "padding" if data[at:].tobytes().strip(b"\0") else None

    def checksum(self, layer: int, expert: int) -> str:
        """The stored checksums of an expert's sections, in hexadecimal."""
        return self._checksums(layer, expert).hex()

    def _verify_expert(self, layer: int, expert: int) -> None:
        section = self.differs(self.raw(layer, expert), layer, expert)
        if section is not None:
            raise StoreCorrupt(
                f"{self._path}: layer {layer}, expert {expert}, {section}: the bytes do not match their checksum. "
                "Build the store again from its source",
                layer=layer, expert=expert, section=section,
            )  # fmt: skip

    def _checksums(self, layer: int, expert: int) -> bytes:
        entry = self._entry(layer, expert)
        each = DIGEST * len(self.blocks.sections)
        return entry.checksums[expert * each : (expert + 1) * each]

    # -- closing ------------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def close(self) -> None:
        """Releases the mapping; views that are still in use keep it until the last one is gone. May be called twice."""
        self._bytes = None  # nothing unmaps explicitly: the last tensor that refers to the mapping frees it
        self._bases.clear()

    def __reduce__(self) -> tuple[Callable[[str, str], ExpertStore], tuple[str, str]]:
        """Pickles the path, not the bytes: another process maps the same pages."""
        return _reopened, (self._absolute, self.fingerprint)

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Tensor:
        if self._bytes is None:
            raise ValueError(f"ExpertStore: {self._path} was closed; open it again with ExpertStore.open")
        return self._bytes

    def _entry(self, layer: int, expert: int | None = None) -> LayerEntry:
        entry = self._entries.get(layer)
        if entry is None:
            known = ", ".join(map(str, self._entries))
            raise KeyError(f"ExpertStore: there is no layer {layer!r}; the layers are {known}")
        if expert is not None and not 0 <= expert < entry.experts:
            raise IndexError(
                f"ExpertStore: layer {layer} has no expert {expert}; its experts are 0..{entry.experts - 1}"
            )
        return entry


def _reopened(path: str, fingerprint: str) -> ExpertStore:
    store = ExpertStore.open(path)
    if store.fingerprint == fingerprint:
        return store
    store.close()
    raise StoreMismatch(f"ExpertStore: {path} holds other weights than when it was pickled")


def opened_source(source: Source | str | os.PathLike[str]) -> Source:
    """The CheckpointSource of a folder; any other source unchanged."""
    if not isinstance(source, (str, os.PathLike)):
        return source
    from .checkpoint import CheckpointSource

    return CheckpointSource(Path(source))
