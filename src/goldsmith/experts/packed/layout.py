"""Layout: the position of every weight in packed memory. One copy serves forward and backward, on every CPU.

word    32 bits: `per_word` consecutive inputs k of one output row n. int4, int4_asym, mxfp4: bits 4j..4j+3 hold
        k = 2j and bits 16+4j..16+4j+3 hold k = 2j+1 (j = 0..3); other formats are in order, lowest bits first
tile    16 rows x 16 words, stored [word][row]: 1 KiB
panel   16 rows: their tiles in order of k; scales [groups][16] (fp8_block: [groups], 16 divides its 128 rows);
        zeros [groups][8 bytes] (int4_asym only), byte b has row b in its low nibble and row b+8 in its high nibble;
        then zero bytes up to a multiple of 64. Rows and inputs beyond the matrix are zero bits
matrix  its panels in order of n
blob    gate_up: by slice, by expert: gate [I_p, H], then up. down: by slice, by expert: [H, I_p].
        Slices begin at multiples of 4096 bytes if there are several
block   for a base in one blob: an expert's gate, up and down, then any bytes of the blob's owner
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .formats import FORMATS, FP8_BLOCK, SCALE_NAMES, Codes, Format, decode, side_by_side
from .panels import ALIGNMENT, LayoutSlice, placed, read_matrix, up, write_matrix

PAGE = 4096  # alignment of slices in bytes, so that each can be bound to its own NUMA node

_TEXT = re.compile(r"(\w+):(\d+)x(\d+)x(\d+):(\w+):(\w+|-):(\d+(?:,\d+)+)(?::b(\d+))?")


@dataclass(frozen=True)
class Layout:
    """Format, sizes and slices of packed weights; `text` and `parse` carry it through an operator's string option.

    group_size   inputs that share a scale; None: the whole row (int8), or no scales at all (fp32, bf16)
    scale_dtype  None without scales; uint8 for the E8M0 bytes of mxfp4
    cuts         borders of the slices along the intermediate size: (0, .., I)
    block_bytes  0: two blobs. Otherwise there is one blob, with one expert in every block_bytes of it
    text         for example "int4:64x1024x512:g32:bf16:0,512": format, experts x hidden x intermediate, group, scale,
                 cuts, and ":b" with block_bytes; an attribute, because torch.compile does not trace a cached property
    """

    format: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    group_size: int | None
    scale_dtype: torch.dtype | None
    cuts: tuple[int, ...]
    block_bytes: int = 0
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check()
        object.__setattr__(self, "text", self._text())

    def _check(self) -> None:
        fmt = FORMATS.get(self.format)
        if fmt is None:
            raise ValueError(f"Layout: format={self.format!r} is unknown; known: {', '.join(FORMATS)}")
        for name in ("num_experts", "hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"Layout: {name}={getattr(self, name)}, expected at least 1")
        if self.scale_dtype not in (fmt.scales or (None,)):
            raise ValueError(f"Layout: {self.format} has no scales in {self.scale_dtype}")
        step, last = self.step, self.intermediate_size
        rising = all(a <= b for a, b in zip(self.cuts, self.cuts[1:]))
        if len(self.cuts) < 2 or self.cuts[0] != 0 or self.cuts[-1] != last or not rising:
            raise ValueError(f"Layout: cuts={self.cuts} do not rise from 0 to {last}")
        if any(cut % step for cut in self.cuts if cut != last):
            raise ValueError(f"Layout: cuts={self.cuts} are not multiples of the group size {step}")
        group = self.group_size
        if fmt.fixed and group != fmt.group:
            raise ValueError(f"Layout: group_size={group}, but {self.format} has group_size={fmt.group}")
        if fmt.name != "fp8_block" and (group is not None or fmt.bits == 4):
            if not group or group % 8 or self.hidden_size % group or last % group:
                raise ValueError(f"Layout: group_size={group} does not divide {self.hidden_size} and {last}")
        if self.block_bytes:
            least = self.expert_nbytes
            if self.partitions > 1 or self.block_bytes < least or self.block_bytes % ALIGNMENT:
                raise ValueError(
                    f"Layout: block_bytes={self.block_bytes} with {self.partitions} slices; expected "
                    f"block_bytes to be a multiple of {ALIGNMENT} and at least {least}, and 1 slice"
                )

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    @property
    def partitions(self) -> int:
        return len(self.cuts) - 1

    @property
    def step(self) -> int:
        """Cuts are multiples of this: the group size of down, whose inputs are cut."""
        return self.group_size or 1

    # -- text ---------------------------------------------------------------------------------------------------------

    def _text(self) -> str:
        sizes = f"{self.num_experts}x{self.hidden_size}x{self.intermediate_size}"
        group = "row" if self.group_size is None else f"g{self.group_size}"
        scale = SCALE_NAMES[self.scale_dtype] if self.scale_dtype else "-"
        block = f":b{self.block_bytes}" if self.block_bytes else ""
        return f"{self.format}:{sizes}:{group}:{scale}:{','.join(map(str, self.cuts))}{block}"

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> Layout:
        """The layout with this `text`; raises ValueError for any other text."""
        match = _TEXT.fullmatch(text)
        scales = {name: dtype for dtype, name in SCALE_NAMES.items()} | {"-": None}
        if match is None or match[6] not in scales or not re.fullmatch(r"row|g\d+", match[5]):
            raise ValueError(f"Layout: {text!r} is not a layout; an example is 'int4:64x1024x512:g32:bf16:0,512'")
        group = None if match[5] == "row" else int(match[5][1:])
        cuts = tuple(int(cut) for cut in match[7].split(","))
        block = int(match[8] or 0)
        return cls(match[1], int(match[2]), int(match[3]), int(match[4]), group, scales[match[6]], cuts, block)

    # -- positions ----------------------------------------------------------------------------------------------------

    def matrices(self, which: str) -> list[LayoutSlice]:
        """The slices of the blob "gate_up" or "down", in order."""
        return list(self._slices(which))

    def nbytes(self, which: str | None = None) -> int:
        """Bytes of the blob "gate_up" or "down", or of both."""
        if self.block_bytes:
            return self.block_bytes * self.num_experts
        if which is None:
            return self.nbytes("gate_up") + self.nbytes("down")
        last = self._slices(which)[-1]
        return last.offset + last.expert_stride * self.num_experts

    @cached_property
    def expert_nbytes(self) -> int:
        """Bytes of an expert's three matrices."""
        return sum(place.expert_stride for parts in (2, 1) for place in self._laid_out(parts))

    def _slices(self, which: str) -> tuple[LayoutSlice, ...]:
        if which not in ("gate_up", "down"):
            raise ValueError(f"Layout: unknown blob {which!r}; known: 'gate_up' and 'down'")
        return self._gate_up if which == "gate_up" else self._down

    @cached_property
    def _gate_up(self) -> tuple[LayoutSlice, ...]:
        return self._placed(2, 0)

    @cached_property
    def _down(self) -> tuple[LayoutSlice, ...]:
        return self._placed(1, sum(place.expert_stride for place in self._laid_out(2)))

    def _placed(self, parts: int, at: int) -> tuple[LayoutSlice, ...]:
        places = self._laid_out(parts)
        if not self.block_bytes:
            return tuple(places)
        return tuple(replace(place, offset=at, expert_stride=self.block_bytes) for place in places)

    def _laid_out(self, parts: int) -> Iterator[LayoutSlice]:
        at = 0
        for begin, end in zip(self.cuts, self.cuts[1:]):
            rows, inputs = (end - begin, self.hidden_size) if parts == 2 else (self.hidden_size, end - begin)
            if self.partitions > 1:
                at = up(at, PAGE)
            place = placed(self.kind, rows, inputs, self.group_size, self.scale_dtype, at, parts)
            yield place
            at += place.expert_stride * self.num_experts


def cuts(intermediate_size: int, partitions: int, step: int) -> tuple[int, ...]:
    """Borders of `partitions` slices at multiples of `step`; the first slices are a step longer if needed."""
    steps = -(-intermediate_size // step)
    each, more = divmod(steps, partitions)
    ends = [step * (each * p + min(p, more)) for p in range(partitions + 1)]
    return tuple(min(end, intermediate_size) for end in ends)


# -- experts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expert:
    """The three whole matrices of one expert: gate and up [I, H], down [H, I]."""

    gate: Codes
    up: Codes
    down: Codes


def write_expert(layout: Layout, gate_up: Tensor, down: Tensor, e: int, expert: Expert) -> None:
    """Write expert e into the two blobs (1-D uint8), a slice at a time."""
    for begin, place in zip(layout.cuts, layout.matrices("gate_up")):
        for part, matrix in enumerate((expert.gate, expert.up)):
            if place.panels:
                cut = _cut_rows(layout, matrix, begin, begin + place.rows)
                write_matrix(layout, place, _panels(gate_up, place, e, part), cut)
    for begin, place in zip(layout.cuts, layout.matrices("down")):
        if place.panels:
            cut = _cut_inputs(layout, expert.down, begin, begin + place.inputs)
            write_matrix(layout, place, _panels(down, place, e, 0), cut)


def read_expert(layout: Layout, gate_up: Tensor, down: Tensor, e: int) -> Expert:
    """Read expert e from the two blobs: the inverse of `write_expert`."""
    parts: list[list[Codes]] = [
        [read_matrix(layout, place, _panels(blob, place, e, part)) for place in layout.matrices(which) if place.panels]
        for which, blob, part in (("gate_up", gate_up, 0), ("gate_up", gate_up, 1), ("down", down, 0))
    ]
    whole_row = layout.group_size is None
    return Expert(_joined(parts[0], 0), _joined(parts[1], 0), _joined(parts[2], 1, scale_is_common=whole_row))


def unpack_expert(
    layout: Layout, gate_up: Tensor, down: Tensor, e: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Expert e as numbers: gate, up [I, H] and down [H, I]; see `unpack`."""
    expert = read_expert(layout, gate_up, down, e)
    kind = layout.kind
    return decode(kind, expert.gate, dtype), decode(kind, expert.up, dtype), decode(kind, expert.down, dtype)


def unpack(layout: Layout, gate_up: Tensor, down: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] (rows 0..I-1 gate, then up) and down [E, H, I] as numbers, an expert at a time

    Each is value(code) * scale, rounded once to `dtype`: exact in float64, and in float32 unless scales are float32.
    """
    E, H, I = layout.num_experts, layout.hidden_size, layout.intermediate_size
    both = torch.empty((E, 2 * I, H), dtype=dtype, device=gate_up.device)
    back = torch.empty((E, H, I), dtype=dtype, device=down.device)
    for e in range(E):
        both[e, :I], both[e, I:], back[e] = unpack_expert(layout, gate_up, down, e, dtype)
    return both, back


def _panels(blob: Tensor, place: LayoutSlice, e: int, part: int) -> Tensor:
    at = place.offset + e * place.expert_stride + place.parts[part]
    return blob[at : at + place.panels * place.panel_bytes].view(place.panels, place.panel_bytes)


def _cut_rows(layout: Layout, matrix: Codes, begin: int, end: int) -> Codes:
    if layout.partitions == 1:
        return matrix
    blocks = FP8_BLOCK if layout.format == "fp8_block" else 1
    rows = slice(begin // blocks, -(-end // blocks))
    scales, zeros = (None if t is None else t[rows] for t in (matrix.scales, matrix.zeros))
    return Codes(matrix.codes[begin:end], scales, zeros)


def _cut_inputs(layout: Layout, matrix: Codes, begin: int, end: int) -> Codes:
    if layout.partitions == 1:
        return matrix
    group, per_code = layout.group_size, layout.kind.per_code
    groups = slice(None) if group is None else slice(begin // group, -(-end // group))
    scales, zeros = (None if t is None else t[:, groups] for t in (matrix.scales, matrix.zeros))
    return Codes(matrix.codes[:, begin // per_code : end // per_code], scales, zeros)


def _joined(parts: list[Codes], dim: int, *, scale_is_common: bool = False) -> Codes:
    """The slices of a matrix joined along `dim`."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    codes = side_by_side([p.codes for p in parts], dim)
    if first.scales is None or scale_is_common:
        return Codes(codes, first.scales)
    scales = side_by_side([p.scales for p in parts if p.scales is not None], dim)
    zeros = side_by_side([p.zeros for p in parts if p.zeros is not None], dim) if first.zeros is not None else None
    return Codes(codes, scales, zeros)
