"""What a store takes of a user's time: to be built, to be told from others, to be found, read through and opened."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator

from ....offload.store.expert_store import ExpertStore
from ....offload.store.source_key import fingerprint_and_key
from .rows import Row
from .shapes import Layers

OP = "offload.store"
OURS = "goldsmith"
_OPENED = 5  # the median of so many


def rows(layers: Layers) -> Iterator[Row]:
    """Seconds, of weights and a file that are in memory; build is with the disk's fsync."""
    shape, path = layers.shape, layers.store.path
    source = {n: {"gate_up": gate_up, "down": down} for n, (gate_up, down) in layers.weights.items()}
    said = {"format": layers.format, "group_size": None, "activation": "silu", "alpha": 1.702, "limit": None}
    layers.say("building the store again")
    again = path.with_name("again.store")
    figures = {"weights": float(sum(t.nbytes for pair in layers.weights.values() for t in pair))}
    figures["store"] = float(layers.store.nbytes)
    try:
        figures["build_s"] = _seconds(lambda: ExpertStore.build(source, again, format=layers.format).close())
    finally:
        again.unlink(missing_ok=True)
    layers.say("hashing, comparing and reading through")
    figures["key_s"] = _seconds(lambda: fingerprint_and_key(OP, source, said, whole=True))
    figures["find_s"] = _seconds(lambda: fingerprint_and_key(OP, source, said, whole=False))
    if layers.store.exact:
        figures["compare_s"] = _seconds(lambda: layers.store.check_source(source, whole=True))
    figures["verify_s"] = _seconds(layers.store.verify)
    figures["open_s"] = statistics.median(_seconds(lambda: ExpertStore.open(path).close()) for _ in range(_OPENED))
    yield Row(
        OP, shape.name, "build, key, find, compare, verify, open",
        {"H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k, "layers": layers.count}, "bfloat16",
        layers.store.format, OURS, figures=figures, threads=os.cpu_count(), note=NOTE,
    )  # fmt: skip


NOTE = (
    "bytes, and seconds: key, every byte of the weights hashed; find, their sample; compare, a store that was found "
    "held to the weights; verify, the whole file read and hashed"
)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
