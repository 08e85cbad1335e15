"""GoldenCache: golden results kept from one check to the next of the same golden on the same inputs.

The key is the content of all that the results depend on, so candidates share them if they return results of the same
names, shapes and dtypes.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ..execute.records import CandidateRun, Material
from .golden_results import GoldenResults

_MOST = 512  # results
_LARGE = 8 << 20  # bytes of inputs from which hashing and keeping cost more than they save
_BYTES = 192 << 20  # of the inputs of all results; with bounds and noise, results are six times as large


class GoldenCache:
    """Of one golden. A hit shares what was computed so far, and what it computes itself is there for the next."""

    def __init__(self) -> None:
        self.known: dict[bytes, GoldenResults] = {}
        self.sizes: dict[bytes, int] = {}  # bytes of the inputs
        self.hits = 0

    def results(
        self, material: Material, run: CandidateRun, decisions: Mapping[str, Tensor] | None, seed: int
    ) -> GoldenResults:
        tensors = [*material.inputs.values(), *run.cotangents.values(), *(decisions or {}).values()]
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size > _LARGE:
            return GoldenResults(material, run, decisions, seed)
        key = _key(material, run, decisions or {}, seed)
        known = self.known.pop(key, None)
        if known is None:
            results = GoldenResults(material, run, decisions, seed)
        else:
            self.hits += 1
            results = copy.copy(known)
            results.material, results.run, results.counts = material, run, {}
            results.decisions_used = set(known.decisions_used)
        self.known[key], self.sizes[key] = results, size  # the newest knows most
        while len(self.known) > _MOST or sum(self.sizes.values()) > _BYTES:
            oldest = next(iter(self.known))
            del self.known[oldest], self.sizes[oldest]
        return results


_active: list[GoldenCache] = []


@contextmanager
def remembering(cache: GoldenCache) -> Iterator[None]:
    """Context in which `shared_or` returns this cache."""
    _active.append(cache)
    try:
        yield
    finally:
        _active.remove(cache)


def shared_or(own: GoldenCache) -> GoldenCache:
    """The cache of the present context; `own` where there is none."""
    return _active[-1] if _active else own


def _key(material: Material, run: CandidateRun, decisions: Mapping[str, Tensor], seed: int) -> bytes:
    digest = hashlib.sha256()
    target = material.target
    facts = (
        material.case, material.seed, material.nudged, seed, material.order, repr(material.scalars),
        run.names, run.saved, target.outputs, target.saved, target.backward is None, target.grads, target.mutates,
        [(n, kind, _form(t)) for n, kind, t in run.results()], [(n, str(t.dtype)) for n, t in run.stages.items()],
    )  # fmt: skip
    digest.update(repr(facts).encode())
    groups = {"input": material.inputs, "sent": run.cotangents, "decision": decisions}
    for kind, name, tensor in ((k, n, t) for k, group in groups.items() for n, t in group.items()):
        digest.update(f"{kind} {name} {_form(tensor)} {tensor.stride()}".encode())
        dense = tensor.detach().contiguous().cpu()
        size = dense.numel() * dense.element_size()
        if size:
            digest.update((ctypes.c_char * size).from_address(dense.data_ptr()))
    return digest.digest()


def _form(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} {tensor.device}"
