"""ExpertStore: the experts of a model in one read-only file, mapped, shared by every process that opens it."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.shapes import check_choice
from ..experts import PackedExperts
from ..experts.packed.layout import unpack_expert
from . import header as headers
from . import samples
from .blocks import Blocks
from .build import Progress, build, check_kind
from .errors import StoreCorrupt, StoreMismatch
from .header import DIGEST, LayerEntry, checksum


class ExpertStore:
    """gate_up [2I, H] and down [H, I] of every expert of every layer, packed once, each expert one range of a file

    Made by `build`, opened by `open`; read-only, mapped (PROT_READ, MAP_SHARED): processes that open the same file
    share its pages. Tensors that it gives are views of the mapping and keep it alive, also after `close`; writing to
    one ends the process (SIGSEGV), since no page can be written.

    path, nbytes          the file, its bytes
    format, group_size    as in `experts.pack`; `exact`: the numbers are the source's, bit for bit
    layers                numbers of the layers, in the source's order; num_experts(layer) may differ between them
    hidden_size, intermediate_size, has_bias    of every expert
    activation, alpha, limit    the words of `experts.moe`; `options` has them as its keywords
    blocks                where the parts of an expert lie in its bytes
    fingerprint           of format, activation, sizes and a sample of every expert of the source
    metadata              a dict with what the header says, without checksums
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("ExpertStore: made by ExpertStore.build or ExpertStore.open")

    # -- making one ---------------------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        source: Any,
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
        """The store of a source at `path`, open: an expert at a time is read, packed and written

        source   the folder of a checkpoint (safetensors, offload/checkpoint.py), a mapping of layer to weights, or an
                 iterable of (layer, weights). Weights: a dict of gate_up [E, 2I, H] (gate first) or a pair (gate, up)
                 of [E, I, H], down [E, H, I], and perhaps gate_up_bias [E, 2I] and down_bias [E, H], each stacked or
                 anything that yields E tensors one by one; float32, bfloat16 or float16. Or a PackedExperts, whose
                 codes are kept
        format   "auto": the narrowest that holds the weights exactly (bfloat16: "bf16", else "fp32"), or one of
                 `experts.pack`; group_size as there
        activation, alpha, limit    what `experts.moe` is to be called with; kept in the header
        overwrite          replace what is at `path`; whoever has it open keeps what he had
        allow_nonfinite    take NaN and Inf, in "fp32" and "bf16" alone
        progress           called after every expert with (bytes written, bytes in all or None, what it was)

        The file appears at `path` when it is whole, or not at all. The same source and arguments give the same bytes.
        Raises FileExistsError, ShapeError, TypeError, ValueError (also for a number that is not finite, with layer,
        expert, tensor and place), and OSError for a disk that is or becomes full.
        """
        options = {"activation": activation, "alpha": alpha, "limit": limit}
        build(
            opened_source(source), Path(path), format=format, group_size=group_size, options=options,
            overwrite=overwrite, allow_nonfinite=allow_nonfinite, progress=progress,
        )  # fmt: skip
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: str = "header") -> ExpertStore:
        """The store in a file, mapped

        verify   "none"; "header": magic, version, checksums of the first page and of the header, size of the file,
                 every offset; "full": the checksum of every part of every expert as well, which reads the whole file
        Raises OSError, StoreError for what is no store or of another version, StoreCorrupt for a damaged one.
        """
        check_choice("ExpertStore.open", "verify", verify, ("none", "header", "full"))
        store = object.__new__(cls)
        store._path, store._absolute = Path(path), os.path.abspath(path)
        check_kind("ExpertStore.open", store._path)
        with open(path, "rb") as file:
            store._nbytes = size = os.fstat(file.fileno()).st_size
            if not size:
                raise headers.foreign(path, memoryview(b""))
            pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        store._header = headers.read(memoryview(pages), path, check=verify != "none")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors, and says so
            store._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        store._entries = {entry.layer: entry for entry in store._header.layers}
        store._bases = {}
        if verify == "full":
            store.verify()
        return store

    _path: Path
    _absolute: str  # as it was when the file was opened, whatever folder is the current one later
    _header: headers.Header
    _bytes: Tensor | None
    _nbytes: int
    _entries: dict[int, LayerEntry]
    _bases: dict[int, PackedExperts]

    # -- what it is ---------------------------------------------------------------------------------------------------

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
        """Bytes of an expert's block: what one copy moves, a multiple of 4096."""
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
    def options(self) -> dict[str, Any]:
        """activation, alpha and limit, as keywords of `experts.slots`."""
        return samples.options_of(self._header)

    @property
    def blocks(self) -> Blocks:
        return self._header.blocks

    @property
    def exact(self) -> bool:
        return self._header.exact

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the weights that it was built from; None if those were codes."""
        return None if self._header.source == "codes" else getattr(torch, self._header.source)

    @property
    def fingerprint(self) -> str:
        return self._header.fingerprint

    @property
    def metadata(self) -> dict[str, Any]:
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
        """A layer's experts where they are mapped, as a base of `experts.slots` and `experts.moe`; no copy."""
        self._open()
        if layer not in self._bases:
            self._bases[layer] = self.blocks.base(self.raw_layer(layer))
        return self._bases[layer]

    def dequantize(self, layer: int, expert: int) -> dict[str, Tensor]:
        """gate_up [2I, H], down [H, I] and the biases there are, float32: the numbers that kernels compute with."""
        block = self.raw(layer, expert)
        gate, up, down = unpack_expert(self.blocks.layout, block, block, 0)
        found = {"gate_up": torch.cat((gate, up)), "down": down}
        return found | {name: self.blocks.bias(block, name)[0].clone() for name in self.blocks.biased}

    # -- checks -------------------------------------------------------------------------------------------------------

    def verify(self, layers: Iterable[int] | None = None) -> None:
        """Reads every expert of these layers (all: None); StoreCorrupt names the first layer, expert and section."""
        for layer in self.layers if layers is None else layers:
            for expert in range(self.num_experts(layer)):
                self._verify_expert(layer, expert)

    def check_source(
        self,
        source: Any,
        *,
        format: str | None = None,
        activation: str = "silu",
        alpha: float = 1.702,
        limit: float | None = None,
        whole: bool = False,
    ) -> None:
        """StoreMismatch, which names the first difference, when these are not the weights that it was built from

        The rule is that of offload/samples.py: layers, sizes, biases, activation and a fixed sample of every expert,
        at most one number in 200; of the store nothing but its header is read. format=None: any. whole=True compares
        every byte of every expert as well, and needs a store that is `exact`.
        """
        from .match import check_source

        options = {"activation": activation, "alpha": alpha, "limit": limit}
        if whole and not self.exact:
            raise ValueError(f"ExpertStore.check_source: whole=True, but {self.format} is not exactly the source")
        raw = self.raw if whole else None
        check_source(self._header, self._path, opened_source(source), format, options, raw)

    def differs(self, block: Tensor, layer: int, expert: int) -> str | None:
        """The first section in which a block, uint8 [expert_nbytes] on any device, is not what was stored, or None."""
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
                f"{self._path}: layer {layer}, expert {expert}, {section}: other bytes than were written (the checksum "
                "does not match). Build the store again from where it came",
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
        """Gives the mapping up; views that are still in use keep it until the last of them is gone. Twice is fine."""
        self._bytes = None  # the mapping goes with the last tensor that refers to it: nothing here unmaps it
        self._bases.clear()

    def __reduce__(self) -> Any:
        """What pickle sends is the path, not the bytes: another process maps the same pages."""
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
            raise IndexError(f"ExpertStore: layer {layer} has no expert {expert}; they are 0..{entry.experts - 1}")
        return entry


def _reopened(path: str, fingerprint: str) -> ExpertStore:
    store = ExpertStore.open(path)
    if store.fingerprint == fingerprint:
        return store
    store.close()
    raise StoreMismatch(f"ExpertStore: {path} holds other weights than when it was pickled")


def opened_source(source: Any) -> Any:
    """A folder's checkpoint; anything else as it is."""
    if not isinstance(source, (str, os.PathLike)):
        return source
    from .checkpoint import Checkpoint

    return Checkpoint(Path(source))
