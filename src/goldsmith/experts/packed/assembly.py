"""Assembly of a layer's packed weights: experts are written into blobs one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ...core.shapes import ShapeError, kind
from . import layout as places
from .formats import FORMATS
from .inputs import check_partitions
from .layout import Expert, Layout
from .memory import allocate, empty_pages, frozen, give_back, nodes_of_machine, spread
from .quantisation import check_group

Progress = Callable[[int, int | None], None]  # (experts done, number of experts or None)

PROJECTIONS = ("gate", "up", "down")

_Chunk = tuple[Layout, Tensor, Tensor]
_CHUNK = 256  # most experts of a chunk
_ALONE = 16  # cuts at multiples of this many rows fill whole panels


class PackedWeights(NamedTuple):
    """The fields of a PackedExperts, in the order in which its constructor takes them."""

    layout: Layout
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    nodes: tuple[int, ...] = ()


def cut(layout: Layout, partitions: int, op: str) -> Layout:
    """The layout with the intermediate size cut into `partitions` slices."""
    check_partitions(op, partitions)
    step = layout.step
    if step == 1 and layout.intermediate_size >= _ALONE * partitions:
        step = _ALONE
    return replace(layout, cuts=places.cuts(layout.intermediate_size, partitions, step), block_bytes=0)


def layout_of(op: str, format: str, group: int | None, count: int, first: Expert) -> Layout:
    """The layout of `count` experts like `first`, whose matrices are in codes of `format`

    Raises ShapeError, TypeError or ValueError if the three matrices do not belong together.
    """
    fmt = FORMATS[format]
    shapes = [(len(m.codes), m.codes.shape[1] * fmt.per_code) for m in (first.gate, first.up, first.down)]
    intermediate, hidden = shapes[0]
    if 0 in shapes[0] or shapes != [(intermediate, hidden)] * 2 + [(hidden, intermediate)]:
        value_text = ", ".join(f"{name} [{out}, {inputs}]" for name, (out, inputs) in zip(PROJECTIONS, shapes))
        raise ShapeError(f"{op}: an expert is {value_text} as [out, in], expected gate [I, H], up [I, H], down [H, I]")
    check_group(op, fmt, None if fmt.fixed else group, hidden, intermediate)
    scale = first.gate.scales.dtype if first.gate.scales is not None else None
    for name, matrix in (("up", first.up), ("down", first.down)):
        if matrix.scales is not None and matrix.scales.dtype != scale:
            raise TypeError(f"{op}: {name}'s scales are {matrix.scales.dtype}, but gate's {scale}; convert one")
    return Layout(format, count, hidden, intermediate, group, scale, (0, intermediate))


def check_nodes(op: str, partitions: int, nodes: Sequence[int] | None) -> tuple[int, ...]:
    """The NUMA node of each slice; empty for a single slice without a chosen node."""
    if nodes is None:
        return spread(partitions) if partitions > 1 else ()
    if not isinstance(nodes, Sequence) or isinstance(nodes, (str, bytes)):
        raise TypeError(f"{op}: nodes={nodes!r} is {kind(nodes)}, expected a list with a node for each slice, or None")
    known = nodes_of_machine()
    if len(nodes) != partitions:
        raise ValueError(
            f"{op}: nodes={list(nodes)} has {len(nodes)} entries, expected one for each of {partitions} slices"
        )
    for node in nodes:
        if isinstance(node, bool) or not isinstance(node, int):
            raise TypeError(
                f"{op}: nodes={list(nodes)} holds {kind(node)}, expected the number of a node for each slice"
            )
        if node not in known:
            raise ValueError(f"{op}: nodes={list(nodes)}: this machine has no node {node}; it has {known}")
    return tuple(nodes)


def assemble(
    template: Layout,
    experts: Iterable[Expert],
    progress: Progress | None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    nodes: Sequence[int] = (),
    *,
    counted: bool = True,
) -> PackedWeights:
    """Write experts, one at a time, into new blobs of `template`'s layout.

    counted=False: the number of experts is unknown until the iterable ends.
    """
    layout = template
    with frozen():
        if not counted:
            layout, chunks = _collect_chunks(template, iter(experts), progress)
        gate_up, down = (allocate(layout, which, nodes) for which in ("gate_up", "down"))
        if not counted:
            _copy_chunks(layout, chunks, gate_up, down)
        else:
            done = 0
            for expert in experts:
                places.write_expert(layout, gate_up, down, done, expert)
                del expert  # free it before the next one is made
                done += 1
                if progress is not None:
                    progress(done, layout.num_experts)
    return PackedWeights(layout, gate_up, down, *biases, nodes=tuple(nodes))


def _collect_chunks(
    template: Layout, experts: Iterator[Expert], progress: Progress | None
) -> tuple[Layout, list[_Chunk]]:
    """Collect an unknown number of experts in chunks of doubling size; pages that are never written cost nothing."""
    chunks: list[_Chunk] = []
    done = room = 0
    for expert in experts:
        if done == room:
            layout = replace(template, num_experts=min(done or 1, _CHUNK))
            chunks.append((layout, empty_pages(layout.nbytes("gate_up")), empty_pages(layout.nbytes("down"))))
            room += layout.num_experts
        layout, gate_up, down = chunks[-1]
        places.write_expert(layout, gate_up, down, done - room + layout.num_experts, expert)
        del expert
        done += 1
        if progress is not None:
            progress(done, None)
    return replace(template, num_experts=done), chunks


def _copy_chunks(layout: Layout, chunks: list[_Chunk], gate_up: Tensor, down: Tensor) -> None:
    """Copy chunks into the blobs, an expert at a time, and return each copied page to the system at once."""
    done = 0
    while chunks:
        chunk, *sources = chunks.pop(0)
        for e in range(min(chunk.num_experts, layout.num_experts - done)):
            for which, blob, source in zip(("gate_up", "down"), (gate_up, down), sources):
                for place, there in zip(layout.matrices(which), chunk.matrices(which)):
                    at, begin, size = place.offset + done * place.expert_stride, there.offset, place.expert_stride
                    begin += e * size
                    blob[at : at + size] = source[begin : begin + size]
                    give_back(source[begin : begin + size])
            done += 1
