"""The key of a source in the cache folder: a hash of every byte, and the state of the files it was read from.

SHA-256 of 1 MiB pieces on several threads (hashlib releases the GIL), then of the pieces' digests, the dtypes and the
fingerprint, which covers format, sizes and activation. The key does not depend on the number of threads. Where files
hold the codes of a layer in tensors of their own (GGUF), the bytes are those of these tensors, before decoding.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from ...core.processors import worth
from .header import LayerEntry
from .samples import bytes_of, digest, fingerprint
from .source import CodedExpert, CodedExperts, FloatExpert, Source, experts_of, layers_of
from .writer import Progress, Recipe

_PIECE = 2**20
_THREADS = 8  # more threads would wait for memory
_EVERY = 1.0  # seconds between two calls of `progress`; small models finish before the first


def fingerprint_and_key(
    op: str, source: Source, recipe_options: Mapping[str, Any], *, whole: bool, progress: Progress | None = None
) -> tuple[str, str]:
    """(fingerprint, key). whole=True: the key hashes every byte; False: only the samples and dtypes."""
    options = {name: recipe_options[name] for name in ("activation", "alpha", "limit")}
    recipe = Recipe(recipe_options["format"], recipe_options["group_size"], options, False)
    entries, sha = [], hashlib.sha256()
    done, last = 0, time.monotonic()
    with ThreadPoolExecutor(min(_THREADS, worth())) as pool:
        for layer, weights in layers_of(source, op):
            entry = LayerEntry(layer, 0, 0, b"", b"")
            stored = weights.stored if whole and isinstance(weights, CodedExperts) else None
            for expert in experts_of(weights, f"{op}: layer {layer}", sampled=not whole or stored is not None):
                recipe.fit(expert, f"{op}: layer {layer}", entry.experts)
                entry.samples += digest(expert)
                entry.experts += 1
                for tensor in parts_of(expert):
                    sha.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
                    if whole and stored is None:
                        for each in pool.map(_digest, _pieces(bytes_of(tensor))):
                            sha.update(each)
                        done += tensor.nbytes
                if progress is not None and time.monotonic() - last >= _EVERY:
                    last = time.monotonic()
                    progress(done, None, f"hashing layer {layer}")
                del expert
            for kind, data in stored or ():
                sha.update(f"{kind} {data.nbytes};".encode())
                for each in pool.map(_digest, _pieces(data)):
                    sha.update(each)
                done += data.nbytes
            entries.append(entry)
            del weights
    if recipe.blocks is None:
        raise ValueError(f"{op}: source holds no layer, expected at least one")
    fingerprint_text = fingerprint(recipe.blocks, recipe.options, entries)
    return fingerprint_text, hashlib.sha256(fingerprint_text.encode() + sha.digest()).hexdigest()[:32]


def parts_of(expert: FloatExpert | CodedExpert) -> Iterator[Tensor]:
    """Every tensor of an expert, in a fixed order."""
    if isinstance(expert, FloatExpert):
        yield from expert.matrices.values()
    else:
        for codes in (expert.expert.gate, expert.expert.up, expert.expert.down):
            yield from (part for part in (codes.codes, codes.scales, codes.zeros) if part is not None)
    yield from expert.biases.values()


def state_of(files: Iterable[Path], key: str) -> str:
    """A hash of the current state of files (real path, size, times, inode) and of a key."""
    facts: list[object] = [key]
    for path in sorted(files):
        stat = path.stat()
        facts.append([os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _pieces(data: memoryview) -> list[memoryview]:
    return [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]


def _digest(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
