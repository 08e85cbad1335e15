"""Building a store from a source: each expert is read, checked to be finite, packed, checksummed and written.

Experts in codes are packed by several threads. Floats are packed one after another: torch quantises each on all cores,
and memory holds few of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from ...core.processors import made_ahead, worth
from ...core.shapes import ShapeError, check_choice
from ...experts import PackedExperts
from ...experts.packed.assembly import cut
from ...experts.packed.formats import FORMATS, SCALE_NAMES
from ...experts.packed.inputs import check_flag
from ...experts.packed.layout import Expert, Layout
from ...experts.packed.memory import frozen
from ...experts.packed.quantisation import check_group, check_scale_dtype, fitting_group
from . import samples
from .atomic_file import BUILDING, atomic_write
from .blocks import PAGE, ExpertBlocks
from .header import Header, LayerEntry, checked_options, checksum, prefix
from .source import CodedExpert, CodedExperts, FloatExpert, Source, Weights, coded, encode, float_experts, layers_of

_OP = "ExpertStore.build"
_AHEAD = 2**28  # bytes of experts in codes that wait to be written, about
_ELSEWHERE = "give store= on another disk (or set GOLDSMITH_CACHE)"
_KINDS = (
    (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"),
)  # fmt: skip
Progress = Callable[[int, int | None, str], None]  # (bytes written, total bytes if known, what was written last)


def build(
    source: Source,
    path: Path,
    *,
    format: str,
    group_size: int | None,
    options: Mapping[str, object],
    overwrite: bool,
    allow_nonfinite: bool,
    progress: Progress | None,
) -> None:
    """Writes the store's file at `path`; leaves nothing there if it fails."""
    check_flag(_OP, "overwrite", overwrite)
    asked_path = path
    if path.is_symlink():  # the disk of the link's target, which the user chose, not the disk of the link
        path = Path(os.path.realpath(path))
    check_kind(_OP, asked_path)
    if path.exists() and not overwrite:
        raise FileExistsError(
            errno.EEXIST, f"{_OP}: path exists; open it, or pass overwrite=True", os.fspath(asked_path)
        )
    if not path.parent.is_dir():
        if path is not asked_path:
            text = f"{_OP}: path is a link into a folder that does not exist ({path.parent}); create it first"
            raise FileNotFoundError(errno.ENOENT, text, os.fspath(asked_path))
        raise FileNotFoundError(
            errno.ENOENT, f"{_OP}: the folder does not exist; create it first", os.fspath(path.parent)
        )
    plan = Recipe(format, group_size, options, allow_nonfinite)
    with frozen(), _reworded_errors(asked_path), atomic_write(path) as file:
        writer = _Writer(file, asked_path, plan, _count(source), progress)
        for layer, weights in layers_of(source, _OP):
            writer.add(layer, weights)
            del weights
        writer.finish()


def check_kind(op: str, path: Path) -> None:
    """Raises OSError where no store can be: a folder, a circular link, a pipe (which would block), a device."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise OSError(error.errno, f"{op}: path cannot be examined ({error.strerror})", os.fspath(path)) from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, f"{op}: path is a folder, expected a store's file", os.fspath(path))
    if not stat.S_ISREG(mode):
        kind = next((word for is_it, word in _KINDS if is_it(mode)), "no regular file")
        raise OSError(errno.EINVAL, f"{op}: path is {kind}, expected a regular file", os.fspath(path))


class Recipe:
    """How to store a source. The first expert settles format, sizes and biases; the others must match."""

    def __init__(self, format: str, group_size: int | None, options: Mapping[str, Any], allow_nonfinite: bool) -> None:
        check_choice(_OP, "format", format, ["auto", *FORMATS])
        check_flag(_OP, "allow_nonfinite", allow_nonfinite)
        if allow_nonfinite and format not in ("auto", "fp32", "bf16"):
            raise ValueError(
                f"{_OP}: allow_nonfinite=True with format={format!r}, which has no code for NaN and Inf; use 'fp32' or "
                "'bf16'"
            )
        self.format, self.group_size, self.allow_nonfinite = format, group_size, allow_nonfinite
        self.options = checked_options(_OP, options)
        self.blocks: ExpertBlocks | None = None
        self._fitting: Layout | None = None  # of the last expert in codes: a layer's experts share it
        self.dtype: torch.dtype | None = None  # None: codes
        self.exact = True

    def fit(self, expert: FloatExpert | CodedExpert | CodedExperts, where: str, e: int) -> ExpertBlocks:
        """The geometry, after a check that this expert has it. Raises ShapeError or ValueError if it differs.

        The experts of a layer in codes share theirs, so one of them stands for all, and so does the layer.
        """
        if self.blocks is None:
            self._fix_geometry(expert, where)
        blocks = self.blocks
        if blocks is None:
            raise RuntimeError(f"{_OP}: no geometry after the first expert")
        layout, biased = blocks.layout, tuple(expert.biases)
        sizes = (layout.hidden_size, layout.intermediate_size)
        if sizes != _sizes(expert):
            raise ShapeError(
                f"{where}: expert {e} has (H, I) = {_sizes(expert)}, but the first expert of the source has {sizes}; "
                "all experts of a store must have one size"
            )
        if biased != blocks.biased:
            first_biases = ", ".join(blocks.biased) or "none"
            raise ValueError(
                f"{where}: expert {e} has biases {', '.join(biased) or 'none'}, but the first expert has {first_biases}"
            )
        if isinstance(expert, FloatExpert):
            self._widen_dtype(expert, where, e)
        elif expert.layout is not self._fitting:
            dense = replace(expert.layout, num_experts=1, cuts=layout.cuts, block_bytes=layout.block_bytes)
            if self.dtype is not None or dense != layout:
                first = f"codes of {_format_name(layout)}" if self.dtype is None else "plain weights"
                raise ValueError(
                    f"{where}: has codes of {_format_name(expert.layout)}, but the first layer has {first}; a store "
                    "has one format"
                )
            self._fitting = expert.layout
        return blocks

    def _widen_dtype(self, expert: FloatExpert, where: str, e: int) -> None:
        """Widens the source's dtype by this expert's; checks that format="auto" still holds every number."""
        if self.dtype is None:
            raise ValueError(f"{where}: has plain weights, but the layers before it have codes; a store has one format")
        for name, tensor in expert.matrices.items():
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
            if is_exact_in(self.blocks.layout.format if self.blocks else "", tensor.dtype):
                continue
            self.exact = False
            if self.format == "auto":
                raise ValueError(
                    f"{where}: {name} of expert {e} is {str(tensor.dtype)[6:]}, but bf16, chosen from the experts "
                    "before it, cannot hold it exactly; pass format='fp32'"
                )

    def _fix_geometry(self, expert: FloatExpert | CodedExpert | CodedExperts, where: str) -> None:
        hidden, inner = _sizes(expert)
        if not isinstance(expert, FloatExpert):
            own = expert.layout
            if self.format not in ("auto", own.format) or self.group_size not in (None, own.group_size):
                raise ValueError(
                    f"{where}: holds codes of {own.format} with groups of {own.group_size}, which are never "
                    f"requantised, but format={self.format!r}, group_size={self.group_size}: use format='auto'"
                )
            if self.allow_nonfinite and own.scale_dtype is not None:
                raise ValueError(f"{_OP}: allow_nonfinite=True, but {where} holds codes of {own.format}")
            self.blocks = ExpertBlocks.of(cut(own, 1, _OP), tuple(expert.biases))
            return
        self.dtype = expert.gate.dtype
        fmt = FORMATS[format_for(self.format, [m.dtype for m in expert.matrices.values()])]
        group = fitting_group(fmt, hidden, inner) if self.group_size is None else self.group_size
        group = check_group(_OP, fmt, group, hidden, inner)
        layout = Layout(fmt.name, 1, hidden, inner, group, check_scale_dtype(_OP, fmt, None), (0, inner))
        self.blocks = ExpertBlocks.of(layout, tuple(expert.biases))


def is_exact_in(format: str, dtype: torch.dtype) -> bool:
    """Whether a format stores every number of `dtype` exactly."""
    return format == "fp32" or format == "bf16" and dtype == torch.bfloat16


def format_for(format: str, dtypes: list[torch.dtype]) -> str:
    """ "auto" becomes the narrowest format that holds all these dtypes exactly."""
    if format != "auto":
        return format
    return "bf16" if all(is_exact_in("bf16", dtype) for dtype in dtypes) else "fp32"


class _Packed(NamedTuple):
    block: Tensor
    checksums: bytes
    sample: bytes


class _Writer:
    """Writes experts, layer after layer, and at the end the header."""

    def __init__(
        self, file: IO[bytes], path: Path, recipe: Recipe, layers: int | None, progress: Progress | None
    ) -> None:
        self._file, self._path, self._recipe, self._progress = file, path, recipe, progress
        self._layers, self._total = layers, None if layers is None else -1
        self._blocks: deque[Tensor] = deque()  # written, and free for the next experts
        self._entries: list[LayerEntry] = []
        self._done = PAGE
        file.seek(PAGE)

    def add(self, layer: int, weights: Weights) -> None:
        where = f"{_OP}: layer {layer}"
        self._entries.append(LayerEntry(layer, 0, self._done, b"", b""))
        if isinstance(weights, PackedExperts):
            weights = coded(weights)
        count = _experts_in(weights)
        if isinstance(weights, CodedExperts):
            blocks = self._fit(weights, where, 0, count)
            read_packed = partial(self._read_packed, weights, blocks)
            threads = max(1, min(worth(), _AHEAD // weights.layout.expert_nbytes))
            for packed in made_ahead(read_packed, range(weights.num_experts), threads):
                self._write(packed)
            return
        number = 0
        for expert in float_experts(weights, where):
            blocks, sample = self._fit(expert, where, number, count), samples.digest(expert)
            codes = encode(expert, blocks.layout, where, number, allow_nonfinite=self._recipe.allow_nonfinite)
            self._write(self._packed(sample, codes, expert.biases, blocks))
            del expert, codes
            number += 1

    def _fit(self, weights: FloatExpert | CodedExperts, where: str, number: int, count: int | None) -> ExpertBlocks:
        blocks = self._recipe.fit(weights, where, number)
        if not number:
            self._look_for_room(blocks, count)
        return blocks

    def _read_packed(self, weights: CodedExperts, blocks: ExpertBlocks, number: int) -> _Packed:
        """Runs in several threads: one task does all for an expert, so that few wait for the GIL."""
        with frozen():  # the mode is of a thread
            expert = weights.expert(number)
            return self._packed(samples.digest(expert), expert.expert, expert.biases, blocks)

    def _packed(self, sample: bytes, codes: Expert, biases: dict[str, Tensor], blocks: ExpertBlocks) -> _Packed:
        try:
            block = self._blocks.pop()
        except IndexError:
            block = torch.zeros(blocks.stride, dtype=torch.uint8, device="cpu")
        blocks.write(block, codes, biases)
        data = block.numpy().data
        return _Packed(block, b"".join(checksum(data[begin:end]) for begin, end in blocks.sections.values()), sample)

    def _write(self, packed: _Packed) -> None:
        entry = self._entries[-1]
        self._file.write(packed.block.numpy().data)
        self._blocks.append(packed.block)
        entry.checksums += packed.checksums
        entry.samples += packed.sample
        entry.experts += 1
        self._done += packed.block.shape[0]
        if self._progress is not None:
            total = self._total if self._total and self._total >= self._done else None
            self._progress(self._done, total, f"writing layer {entry.layer}, expert {entry.experts - 1}")

    def finish(self) -> None:
        blocks, recipe = self._recipe.blocks, self._recipe
        if blocks is None:
            raise ValueError(f"{_OP}: source holds no layer, expected at least one")
        header = Header(
            blocks, **recipe.options, source="codes" if recipe.dtype is None else str(recipe.dtype)[6:],
            exact=recipe.exact, fingerprint=samples.fingerprint(blocks, recipe.options, self._entries),
            layers=self._entries,
        )  # fmt: skip
        text = header.text()
        self._file.write(text)
        self._file.seek(0)
        self._file.write(prefix(text, self._done))

    def _look_for_room(self, blocks: ExpertBlocks, experts: int | None) -> None:
        """Raises OSError if the disk has less free space than the rest of the store needs, as far as that is known."""
        if experts is None:
            return
        rest = blocks.stride * experts * ((self._layers or len(self._entries)) - len(self._entries) + 1)
        if self._layers is not None:
            self._total = self._done + rest
        folder = Path(os.path.realpath(self._path)).parent
        free = shutil.disk_usage(folder).free
        if rest > free:
            raise OSError(
                errno.ENOSPC,
                f"{_OP}: {folder} has {_amount(free)} free, but {_amount(rest)} are still to be "
                f"written; make room, {_ELSEWHERE}, or choose a format with fewer bytes per weight",
                os.fspath(self._path),
            )


@contextlib.contextmanager
def _reworded_errors(path: Path) -> Iterator[None]:
    """Rewords OSErrors of a full disk, of a file too large, and of a folder that takes no file."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and _OP not in str(error):
            way = f"Make room, {_ELSEWHERE}, or choose a narrower format"
            text = f"{_OP}: the disk is full; the unfinished file was removed. {way}"
            raise OSError(error.errno, text, os.fspath(path)) from error
        if error.errno == errno.EFBIG:
            text = f"{_OP}: the file is too large for the file system; the unfinished file was removed; {_ELSEWHERE}"
            raise OSError(error.errno, text, os.fspath(path)) from error
        if str(error.filename or "").endswith(BUILDING):
            text = f"{_OP}: no file can be created there ({error.strerror}); choose another path"
            raise OSError(error.errno, text, os.fspath(path)) from error
        raise


def _amount(number: int) -> str:
    """Bytes in a readable unit."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number} bytes"


def _format_name(layout: Layout) -> str:
    groups = f" in groups of {layout.group_size}" if layout.group_size else ""
    return f"{layout.format}{groups}" + (
        f" with scales in {SCALE_NAMES[layout.scale_dtype]}" if layout.scale_dtype else ""
    )


def _sizes(expert: FloatExpert | CodedExpert | CodedExperts) -> tuple[int, int]:
    if not isinstance(expert, FloatExpert):
        return expert.layout.hidden_size, expert.layout.intermediate_size
    return expert.down.shape[0], expert.down.shape[1]


def _count(source: object) -> int | None:
    return len(source) if isinstance(source, Mapping) else None


def _experts_in(weights: object) -> int | None:
    """The number of experts of a layer's weights, if it is known without reading."""
    if not isinstance(weights, Mapping):
        return getattr(weights, "num_experts", None)
    down = weights.get("down")
    if isinstance(down, Tensor):
        return down.shape[0] if down.dim() else None
    return len(down) if isinstance(down, Sized) else None
