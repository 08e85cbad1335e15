"""Bundles: one failing case as a folder of data, to be sent and replayed. Contains no code and no pickle.

    <target>-<case>-<hash8>/
        bundle.json             sizes, seed, dtype, device, threads, versions, scalars, verdict, causes; and for each
                                tensor its dtype, shape, strides, offset and storage
        inputs.safetensors, golden.safetensors, outputs.safetensors

A tensor that fills its storage in order is saved under its own name. Any other is saved as the bytes of its storage,
which several tensors may share. All bits survive, including NaN payloads. Reading a bundle runs nothing and imports
nothing that it names; invalid content raises ValueError.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...execute.records import Material
from ...report.environment import environment
from .bundle_read import FILES, JSON, SCHEMA, name_of, read

LIMIT = 256 << 20  # bytes; a bundle larger than this leaves the outputs out
TRIM = 64 << 20  # bytes of the storage around a tensor that are saved with it


@dataclass(frozen=True)
class Bundle:
    """The content of a bundle. `meta` is bundle.json; `supply` has inputs and scalars in the order of the case's
    dict.
    """

    inputs: dict[str, Tensor]
    scalars: dict[str, Any]
    golden: dict[str, Tensor]
    outputs: dict[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def supply(self) -> dict[str, Any]:
        every = {**self.inputs, **self.scalars}
        return {n: every[n] for n in (*self.meta.get("order", ()), *every)}


def save(
    folder: str | os.PathLike,
    material: Material,
    dtype: torch.dtype,
    *,
    golden: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    verdict: str = "fail",
    stage: str | None = None,
    causes: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write one case as a bundle into `folder`; returns the bundle's own folder.

    material         what the candidate ran on
    golden, outputs  results by name
    causes           as JSON values, the best first
    """
    parts: dict[str, Mapping[str, Tensor]] = {"inputs": material.inputs, "golden": golden, "outputs": outputs}
    size = sum(t.numel() * t.element_size() for part in parts.values() for t in part.values())
    left_out = ["outputs"] if size > LIMIT else []
    target, case = material.target.name or "target", material.case
    meta: dict[str, Any] = {
        "schema": SCHEMA, "target": target, "case": case, "sizes": {k: _scalar(v) for k, v in material.sizes.items()},
        "seed": material.seed, "dtype": name_of(dtype), "device": str(material.device),
        "threads": torch.get_num_threads(), "versions": versions(material.device), "layouts": {},
        "scalars": {k: _scalar(v) for k, v in material.scalars.items()}, "verdict": verdict, "stage": stage,
        "causes": [dict(c) for c in causes], "left_out": left_out, "tensors": {}, "order": list(material.supply),
    }  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".bundle-", dir=folder))
    try:
        digest = hashlib.sha256()
        for part in FILES:
            if part in left_out:
                continue
            entries, stored = _packed(parts[part])
            meta["tensors"][part] = entries
            raw = _serialised(stored)
            # safetensors raises an error of its own for a full disk, and this an OSError
            (temporary / f"{part}.safetensors").write_bytes(raw)
            digest.update(raw)
        # keys stay in their order, which is also the order of results
        text = json.dumps(meta, indent=1, allow_nan=False)
        digest.update(text.encode())
        (temporary / JSON).write_text(text, encoding="utf-8")
        final = Path(folder) / f"{_plain(target)}-{_plain(case)}-{digest.hexdigest()[:8]}"
        if final.exists():  # an identical bundle exists
            return final
        _readable_as(temporary / JSON, temporary)
        return temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_bundle(path: str | os.PathLike) -> Bundle:
    """Read a bundle's folder. Raises ValueError with the reason if it is invalid."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of a bundle's folder, got {path!r}"[:200])
    parts, scalars, meta = read(Path(path))
    return Bundle(parts["inputs"], scalars, parts["golden"], parts["outputs"], meta)


def versions(device: str | torch.device) -> dict[str, str]:
    """Versions that may affect a number, as text."""
    known = environment(device)
    return {k: str(known[k]) for k in ("torch", "triton", "python", "machine", "gpu") if known.get(k) is not None}


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_=,.]+", "_", name).strip("._")[:60] or "unnamed"


def _scalar(value: Any) -> Any:
    """A scalar as JSON that restores its bits; anything that is not plain data is saved, and restored, as text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [_scalar(v) for v in value]}
    return {"text": repr(value)[:1000]}


def _packed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """(the entry of each tensor in bundle.json, the content of the file)"""
    ordinary = {name: _ordinary(name, tensor) for name, tensor in tensors.items()}
    sharing: dict[int, list[str]] = {}
    for name, tensor in ordinary.items():
        sharing.setdefault(tensor.untyped_storage().data_ptr() if tensor.numel() else -1 - len(sharing), []).append(
            name
        )
    entries: dict[str, dict[str, Any]] = {}
    stored: dict[str, Tensor] = {}
    for names in sharing.values():
        group = {n: ordinary[n] for n in names}
        tensor = group[names[0]]
        if len(names) == 1 and tensor.is_contiguous() and tensor.storage_offset() == 0:
            key, base = names[0], 0
            stored[key] = tensor.cpu().clone()
        else:
            key = f"storage:{len(stored)}"
            while key in ordinary:
                key += ":"
            base, end = _span(group.values())
            storage = tensor.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            stored[key] = raw[base:end].cpu().clone()
        for name, member in group.items():
            entries[name] = {
                "key": key, "dtype": name_of(member.dtype), "shape": list(member.shape),
                "stride": list(member.stride()),
                "offset": member.storage_offset() - base // member.element_size(),
            }  # fmt: skip
    return {name: entries[name] for name in ordinary}, stored


def _span(tensors: Any) -> tuple[int, int]:
    """The bytes of a storage to save: all of it, or the part around the tensor if the storage is far larger."""
    tensors = list(tensors)
    whole = tensors[0].untyped_storage().nbytes()
    low, high = whole, 0
    for t in tensors:
        last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        low = min(low, t.storage_offset() * t.element_size())
        high = max(high, (last + 1) * t.element_size())
    return (0, whole) if whole - (high - low) <= TRIM else (low - low % 256, high)


def _ordinary(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise TypeError(f"bundle: {name!r} is not an ordinary strided tensor ({tensor.layout}, {tensor.device})")
    return tensor.detach().resolve_conj().resolve_neg()


def _readable_as(file: Path, folder: Path) -> None:
    """Give the folder and its files the mode that the umask allows: safetensors and tempfile create them with 0600."""
    mode = file.stat().st_mode & 0o666
    for other in folder.iterdir():
        other.chmod(mode)
    folder.chmod(mode | (mode & 0o444) >> 2)


def _serialised(stored: dict[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save(stored)
