"""PackedExperts: the frozen weights of a layer's experts, packed once and never changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import blocks as block_storage
from . import files, loading
from . import layout as places
from .assembly import PackedWeights, assemble, check_nodes, cut
from .layout import Layout


class PackedExperts:
    """w = value(code) * scale, by expert: gate_up [E, 2I, H] (gate first) and down [E, H, I], in one packed copy

    The base of `experts.moe`. Create it with `experts.pack`, an importer (`from_k2`, `from_awq`, `from_fp8_block`,
    `from_mxfp4`), `load`, or `from_blocks` for bytes that already exist. It is immutable: `copy.deepcopy` returns the
    same object, and pickle, `save` and `partition` keep every bit. It is not a parameter: it receives no gradient and
    appears in no state dict.

    num_experts, hidden_size, intermediate_size    E, H, I
    format, group_size    for example "int4", 32; group_size None: one scale per row, or no scales
    partitions, nodes     slices along the intermediate size, and the NUMA node of each (empty: the OS decides)
    gate_up_bias, down_bias, has_bias    [E, 2I], [E, H] or None
    nbytes, device        bytes of weights and biases, and their device
    layout, gate_up, down    for kernels: the position of every bit, and the two blobs (1-D uint8)
    """

    __slots__ = ("__weakref__", "down", "down_bias", "gate_up", "gate_up_bias", "layout", "nodes")

    layout: Layout
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    nodes: tuple[int, ...]

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError(
            "PackedExperts: use experts.pack, an importer (experts.from_k2, ...) or PackedExperts.load to create one"
        )

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        *,
        hidden_size: int,
        intermediate_size: int,
        format: str,
        group_size: int | None = None,
        scale_dtype: torch.dtype | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> PackedExperts:
        """A base that uses bytes in place, for example in a mapped file: nothing is copied or written

        blocks [E, bytes] in uint8: one row per expert. A row begins with the bytes that `block` returns; anything may
        follow. Its length is a multiple of 64. The owner must not change the blocks. Biases [E, 2I] and [E, H] are not
        copied either (they may be views of the blocks). Format, group and scales are those of the packed experts.
        """
        biases = (gate_up_bias, down_bias)
        weights = block_storage.from_blocks(
            blocks, hidden_size, intermediate_size, format, group_size, scale_dtype, biases
        )
        return cls._of(*weights)

    def block(self, expert: int) -> Tensor:
        """A copy of one expert's bytes, gate, up and down side by side: the start of a row of `from_blocks`."""
        return block_storage.block_of(self.layout, self.gate_up, self.down, expert)

    @classmethod
    def _of(
        cls,
        layout: Layout,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        nodes: Sequence[int] = (),
    ) -> PackedExperts:
        base = object.__new__(cls)
        fields = {"layout": layout, "gate_up": gate_up, "down": down, "nodes": tuple(nodes)}
        for name, value in (fields | {"gate_up_bias": gate_up_bias, "down_bias": down_bias}).items():
            object.__setattr__(base, name, value)
        return base

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def num_experts(self) -> int:
        return self.layout.num_experts

    @property
    def hidden_size(self) -> int:
        return self.layout.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.layout.intermediate_size

    @property
    def format(self) -> str:
        return self.layout.format

    @property
    def group_size(self) -> int | None:
        return self.layout.group_size

    @property
    def scale_dtype(self) -> torch.dtype | None:
        return self.layout.scale_dtype

    @property
    def partitions(self) -> int:
        return self.layout.partitions

    @property
    def has_bias(self) -> bool:
        return self.gate_up_bias is not None or self.down_bias is not None

    @property
    def device(self) -> torch.device:
        return self.gate_up.device

    @property
    def nbytes(self) -> int:
        biases = (self.gate_up_bias, self.down_bias)
        return self.layout.nbytes() + sum(t.nbytes for t in biases if t is not None)

    def __repr__(self) -> str:
        group = f", group_size={self.group_size}" if self.group_size and not self.layout.kind.fixed else ""
        parts = f", partitions={self.partitions}" if self.partitions > 1 else ""
        bias = ", with biases" if self.has_bias else ""
        where = "" if self.device.type == "cpu" else f", {self.device}"
        return (
            f"PackedExperts({self.format}{group}, num_experts={self.num_experts}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}{parts}{bias}{where}, {_size(self.nbytes)})"
        )

    # -- numbers ------------------------------------------------------------------------------------------------------

    def unpack(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2I, H] and down [E, H, I] as numbers: code * scale, rounded once to `dtype`

        Exact in float64. Exact in float32 too, unless the scales are float32 (the default of int8 and fp8_block): then
        the nearest float32. Biases are not included.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(
                f"PackedExperts.unpack: dtype={dtype!r}, expected torch.float32, float64, bfloat16 or float16"
            )
        return places.unpack(self.layout, self.gate_up, self.down, dtype)

    # -- copies -------------------------------------------------------------------------------------------------------

    def partition(self, partitions: int, nodes: Sequence[int] | None = None) -> PackedExperts:
        """The same weights in `partitions` slices of the intermediate size, slice p on NUMA node nodes[p]

        Returns a new base; this one stays valid. Slices are cut at multiples of down's group; if that does not divide
        evenly, the first slices are one group longer. With more slices than groups the last ones are empty; with more
        slices than nodes, several slices share a node. nodes=None spreads slices over all nodes. The operating
        system is asked for a node before a page is written; if it refuses, a thread of that node writes the pages
        first. Raises ValueError for a node that the machine does not have.
        """
        layout = cut(self.layout, partitions, "PackedExperts.partition")
        chosen = check_nodes("PackedExperts.partition", partitions, nodes)
        if layout == self.layout and chosen == self.nodes:
            return self
        experts = (places.read_expert(self.layout, self.gate_up, self.down, e) for e in range(self.num_experts))
        return self._of(*assemble(layout, experts, None, (self.gate_up_bias, self.down_bias), chosen))

    def to(self, device: torch.device | str) -> PackedExperts:
        """The same base on another device; returns itself if it is already there."""
        device = torch.device(device)
        if self.device == device or (device.index is None and self.device.type == device.type):
            return self
        biases = [None if t is None else t.to(device) for t in (self.gate_up_bias, self.down_bias)]
        gate_up = self.gate_up.to(device)
        down = gate_up if self.layout.block_bytes else self.down.to(device)
        return self._of(self.layout, gate_up, down, biases[0], biases[1])

    def __copy__(self) -> PackedExperts:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PackedExperts:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        tensors = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return _restored, (self.layout.text, *tensors, self.nodes)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file: codes, scales and zeros row-major, readable on any machine

        Writes to a temporary file beside `path` and renames it. On failure (OSError, for example a full disk) the
        previous file stays. If `path` is a folder or a device, raises OSError before anything is written.
        """
        weights = PackedWeights(self.layout, self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.nodes)
        files.save(weights, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        partitions: int | None = None,
        nodes: Sequence[int] | None = None,
        mmap: bool = True,
    ) -> PackedExperts:
        """The base that `save` wrote, bit for bit

        partitions: as in `pack`; None keeps the saved number. mmap=False reads the file instead of mapping it. Loading
        needs memory for the result and one expert. Raises OSError if the file cannot be read, and ValueError, naming
        the tensor or key, if it is damaged or was not written by `save` (every tensor has a checksum).
        """
        return cls._of(*loading.load(path, partitions, nodes, mmap))

    # -- immutability -------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"PackedExperts is immutable: {name} cannot be set; pack the weights again to change it")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"PackedExperts is immutable: {name} cannot be deleted")


def _restored(text: str, gate_up: Tensor, down: Tensor, *rest: Any) -> PackedExperts:
    return PackedExperts._of(Layout.parse(text), gate_up, down, *rest)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
