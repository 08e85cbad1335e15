"""PackedExperts: the frozen weights of a layer's experts, packed once and never copied."""

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

    Made by `experts.pack`, by the importers (`from_k2`, `from_awq`, `from_fp8_block`, `from_mxfp4`), by `load`, or of
    bytes that are there already (`from_blocks`); what
    `experts.moe` takes as its base. It cannot be changed: `copy.deepcopy` gives the same object, and pickle, `save`
    and `partition` keep every bit. Not a parameter: it receives no gradient and is in no state dict.

    num_experts, hidden_size, intermediate_size    E, H, I
    format, group_size    "int4", 32; group_size None: a scale for the whole row, or no scales
    partitions, nodes     slices along the intermediate size, and the NUMA node of each (empty: wherever the OS likes)
    gate_up_bias, down_bias, has_bias    [E, 2I], [E, H] or None
    nbytes, device        bytes of weights and biases; where they are
    layout, gate_up, down    for kernels: where every bit lies, and the two blobs it lies in (1-D uint8)
    """

    __slots__ = ("__weakref__", "down", "down_bias", "gate_up", "gate_up_bias", "layout", "nodes")

    layout: Layout
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    nodes: tuple[int, ...]

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("PackedExperts: made by experts.pack, an importer (experts.from_k2, ...) or PackedExperts.load")

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
        """A base that is used where it lies, for example in a file that is mapped: nothing is copied or written

        blocks [E, bytes] in uint8: an expert in each row, which begins with what `block` gives, whatever comes after
        it; bytes a multiple of 64. The owner keeps them as they are. Biases [E, 2I] and [E, H] are not copied either
        (they may be views of the blocks). Format, group and scales are those that the experts were packed with.
        """
        biases = (gate_up_bias, down_bias)
        weights = block_storage.from_blocks(
            blocks, hidden_size, intermediate_size, format, group_size, scale_dtype, biases
        )
        return cls._of(*weights)

    def block(self, expert: int) -> Tensor:
        """The bytes of one expert, gate, up and down side by side: a row of what `from_blocks` takes (a copy)."""
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

    # -- what it is ---------------------------------------------------------------------------------------------------

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
        """gate_up [E, 2I, H] and down [E, H, I] in numbers: code * scale, rounded once to `dtype`

        Exact in float64. In float32 exact too, unless scales are float32 themselves (int8, fp8_block by default): then
        the nearest float32. Biases are not part of it.
        """
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
            raise TypeError(
                f"PackedExperts.unpack: dtype={dtype!r}, wanted torch.float32, float64, bfloat16 or float16"
            )
        return places.unpack(self.layout, self.gate_up, self.down, dtype)

    # -- copies -------------------------------------------------------------------------------------------------------

    def partition(self, partitions: int, nodes: Sequence[int] | None = None) -> PackedExperts:
        """The same weights in `partitions` slices of the intermediate size, slice p on NUMA node nodes[p]

        A new base (this one stays). Slices are cut at multiples of down's group, the first ones a group longer where it
        does not come out; more slices than groups leaves the last ones empty, more than nodes share them. nodes=None
        spreads them over the machine's nodes. A node is asked of the kernel before a page is written; where it refuses,
        a thread of that node writes the pages first. ValueError for a node that is not there.
        """
        layout = cut(self.layout, partitions, "PackedExperts.partition")
        chosen = check_nodes("PackedExperts.partition", partitions, nodes)
        if layout == self.layout and chosen == self.nodes:
            return self
        experts = (places.read_expert(self.layout, self.gate_up, self.down, e) for e in range(self.num_experts))
        return self._of(*assemble(layout, experts, None, (self.gate_up_bias, self.down_bias), chosen))

    def to(self, device: torch.device | str) -> PackedExperts:
        """The same base on another device; itself if it is there already."""
        device = torch.device(device)
        if self.device == device or (device.index is None and self.device.type == device.type):
            return self
        biases = [None if t is None else t.to(device) for t in (self.gate_up_bias, self.down_bias)]
        gate_up = self.gate_up.to(device)
        down = gate_up if self.layout.block_bytes else self.down.to(device)
        return self._of(self.layout, gate_up, down, biases[0], biases[1])

    def __copy__(self) -> PackedExperts:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedExperts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        tensors = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return _restored, (self.layout.text, *tensors, self.nodes)

    # -- files --------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """One safetensors file: codes, scales and zeros row-major, as any machine can read them

        Written beside `path`, then renamed: when it fails (OSError, for example a full disk), what was there stays. A
        folder or a device there is refused (OSError) before anything is written.
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

        partitions: as in `pack`; None: as it was saved. mmap=False reads the file instead of mapping it. One expert at
        a time in memory beside the result. Raises OSError for a file that cannot be read, and ValueError, naming the
        tensor or key, for one that is damaged or not ours (every tensor has a checksum).
        """
        return cls._of(*loading.load(path, partitions, nodes, mmap))

    # -- immutability -------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"PackedExperts cannot be changed: {name} is fixed when it is packed; pack it anew")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"PackedExperts cannot be changed: {name} stays")


def _restored(text: str, gate_up: Tensor, down: Tensor, *rest: Any) -> PackedExperts:
    return PackedExperts._of(Layout.parse(text), gate_up, down, *rest)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"
