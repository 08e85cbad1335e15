"""Seconds to build a store, to compute its key, to find it, to compare and verify it, and to open it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator

from goldsmith.offload.store.expert_store import ExpertStore
from goldsmith.offload.store.source_key import fingerprint_and_key

from .rows import OffloadRow
from .shapes import Layers

OP = "offload.store"
OURS = "goldsmith"
_OPENED = 5  # times that the store is opened; the row has the median


def rows(layers: Layers) -> Iterator[OffloadRow]:
    """Seconds, with weights and file in memory; build includes the disk's fsync."""
    shape, path = layers.shape, layers.store.path
    source = {n: {"gate_up": gate_up, "down": down} for n, (gate_up, down) in layers.weights.items()}
    description = {"format": layers.format, "group_size": None, "activation": "silu", "alpha": 1.702, "limit": None}
    layers.say("building the store again")
    again = path.with_name("again.store")
    figures = {"weights": float(sum(t.nbytes for pair in layers.weights.values() for t in pair))}
    figures["store"] = float(layers.store.nbytes)
    try:
        figures["build_s"] = _seconds(lambda: ExpertStore.build(source, again, format=layers.format).close())
    finally:
        again.unlink(missing_ok=True)
    layers.say("hashing, comparing and reading through")
    figures["key_s"] = _seconds(lambda: fingerprint_and_key(OP, source, description, whole=True))
    figures["find_s"] = _seconds(lambda: fingerprint_and_key(OP, source, description, whole=False))
    if layers.store.exact:
        figures["compare_s"] = _seconds(lambda: layers.store.check_source(source, whole=True))
    figures["verify_s"] = _seconds(layers.store.verify)
    figures["open_s"] = statistics.median(_seconds(lambda: ExpertStore.open(path).close()) for _ in range(_OPENED))
    yield OffloadRow(
        OP, shape.name, "build, key, find, compare, verify, open",
        {"H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k, "layers": layers.count}, "bfloat16",
        layers.store.format, OURS, figures=figures, threads=os.cpu_count(), note=NOTE,
    )  # fmt: skip


NOTE = (
    "bytes, and seconds: key, hashing every byte of the weights; find, hashing a sample; compare, comparing a store "
    "with the weights; verify, reading and hashing the whole file"
)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
