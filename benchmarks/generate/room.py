"""How many layers fit into the memory and on the disk, and whether all engines fit at once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from goldsmith.cli.terminal import Failure, size

from .engines.llama import BATCH
from .engines.peers import Peer, Precision
from .model.shapes import Shape

SHARE = 0.85  # of the available memory that engines may take
PROGRAM = 420 << 20  # bytes of a process with torch and transformers before it loads a model; torch 2.13, CPU
NATIVE = 10 << 20
CONTEXT = 1 << 30  # bytes of a process on a GPU besides its tensors: its context, libraries and workspaces
GOLDEN_BYTES = 16 << 30  # of weights in float64: more layers would take minutes to read and compute
GOLDEN_SHARE = 0.6  # of the available memory for the golden, in float64; one float32 tensor is there besides


@dataclass(frozen=True)
class Room:
    """Layers that are timed, layers of the model that is checked, and whether all engines are loaded at once."""

    layers: int
    checked: int
    together: bool
    why: str = ""  # if layers are left out


def stated(peer: Peer, shape: Shape, precision: Precision, context: int) -> int:
    """Bytes that an engine will take, before it starts."""
    program = PROGRAM if peer.in_python else NATIVE
    return program + peer.weights(shape, precision) + shape.cache_bytes(context) + _work(peer, shape, context)


def _work(peer: Peer, shape: Shape, context: int) -> int:
    """Bytes of activations of a prompt in float32: a few rows of H and of the experts, and llama.cpp's logits."""
    tokens = context if peer.in_python else min(context, BATCH)
    rows = 8 * shape.H + shape.k * (3 * shape.I + shape.H)
    return 4 * tokens * (rows if peer.in_python else rows + shape.vocabulary)


def available() -> int:
    """Bytes that programs can take without swapping. Raises Failure where the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        raise Failure("bench generate needs /proc/meminfo to know how much memory is free: run it on Linux.") from error
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def fitted(
    shape: Shape, precision: Precision, peers: Sequence[Peer], context: int, folder: Path, gpu: int | None = None
) -> Room:
    """Raises Failure if not even one layer fits. gpu: bytes of the GPU's memory; None: all engines run on the CPU."""
    free, disk = available(), shutil.disk_usage(folder).free
    budget = int(SHARE * free)

    def fits(layers: int) -> bool:
        cut = shape.cut(layers)
        file = cut.file_bytes(precision.format, precision.dense)  # goldsmith's store holds the experts once more
        on_disk = file + cut.layers * cut.experts_bytes(precision.format)
        return on_disk <= disk and max(stated(peer, cut, precision, context) for peer in peers) <= budget

    layers = next((n for n in range(shape.layers, 0, -1) if fits(n)), 0)
    need = max(stated(peer, shape.cut(1), precision, context) for peer in peers)
    if not layers:
        raise Failure(
            f"{shape.name} in {precision}: one layer and the vocabulary need {size(need)} of memory and "
            f"{size(shape.cut(1).file_bytes(precision.format, precision.dense))} of disk, but {size(budget)} and "
            f"{size(disk)} are free. Choose a smaller --shape, a narrower --format, or another --folder."
        )
    cut = shape.cut(layers)
    together = sum(stated(peer, cut, precision, context) for peer in peers) <= budget
    if gpu is not None:
        together = together and _on_gpu(peers, cut, precision, context) <= SHARE * gpu
    why = ""
    if layers < shape.layers:
        why = f"{layers} of {shape.layers} layers fit ({size(free)} of memory and {size(disk)} of disk are free)"
    most = min(GOLDEN_SHARE * free, GOLDEN_BYTES)
    golden = [n for n in range(1, layers + 1) if _golden_bytes(shape.cut(n)) <= most]
    return Room(layers, max(golden, default=1), together, why)


def _on_gpu(peers: Sequence[Peer], shape: Shape, precision: Precision, context: int) -> float:
    """Bytes that all engines take on the GPU at once; infinite if one takes all that is free."""
    total = 0.0
    for peer in peers:
        weights = peer.gpu(shape, precision)
        total += float("inf") if weights is None else CONTEXT + weights + shape.cache_bytes(context)
    return total


def _golden_bytes(shape: Shape) -> int:
    return 2 * shape.file_bytes("fp32", "fp32")
