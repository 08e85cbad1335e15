"""The constants of the scheduler on this machine, measured once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..core import native
from ..core.device import machine
from ..core.processors import worth
from ..experts.memory import frozen
from .costs import Costs
from .folder import cache_folder
from .measure import COUNTS, LARGE, DeviceBench, HostBench
from .others import BUSY, Others, busy
from .overhead import overheads
from .publish import published
from .store import ExpertStore
from .transport import Transport

_OP = "offload.calibrate"
VERSION = 5
_CALLS = 0.6  # seconds for the engine's own calls


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: `plan` takes its `costs`.

    costs      see `Costs`; expert_bytes are those of a block of the store
    key        what it holds for: machine, versions, format, sizes, threads, device
    measured   the numbers that the costs were made of, by name
    transport  in words: how bytes reach the device
    others     share of the processors' time that other programs took meanwhile; None where the system does not say
    """

    costs: Costs
    key: dict[str, Any]
    measured: dict[str, float]
    transport: str
    others: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it was made on a busy machine, whose costs are not those of a quiet one."""
        return (self.others or 0.0) > BUSY

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """JSON; the file is there whole, or as it was."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        with published(Path(path)) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """What `save` wrote. Raises OSError, and ValueError for a file that is none."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            transport, key, measured = content["transport"], content["key"], content["measured"]
            if not isinstance(transport, str) or not isinstance(key, dict) or not isinstance(measured, dict):
                raise TypeError("transport, key or measured is not what it should be")
            others = content.get("others")
            return cls(Costs(**content["costs"]), key, measured, transport, None if others is None else float(others))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"Calibration.load: {path} is not a calibration ({error}); make it anew") from None


def calibrate(
    store: ExpertStore, *, device: torch.device | str = "auto", threads: int | None = None, force: bool = False
) -> Calibration:
    """The costs of this store's experts on this machine: measured in at most 5 seconds, or as they were kept

    (What the first Engine of a process imports comes besides, and on a GPU its kernel's compilation.)

    The CPU's kernel at 1, 4, 16 and 64 tokens an expert, copies, the device's kernel, the CPU's kernel with copies
    running, and latencies: all that a call of the engine takes beside a lane's own work, and what one takes at least
    that has experts on the CPU and on the device. Kept as JSON in the cache folder ($GOLDSMITH_CACHE) under machine,
    torch, format, sizes, threads and device; a file of another key or a damaged one is made anew, and so is any with
    force=True. One that was made while others used the processors says so (`busy`, and
    a RuntimeWarning), and is made anew as soon as it is asked for on a quiet machine.

    device    "auto" (a GPU if there is one), or a torch.device; on "cpu" copies go from memory to memory and the
              device's kernel is the CPU's
    threads   of the CPU's kernel; None: one less than can run with a GPU, all without
    """
    device = _device_of(device)
    threads = threads or max(1, worth() - (device.type == "cuda"))
    key = _key(store, device, threads)
    path = _path(key)
    if not force and path.exists():
        try:
            kept = Calibration.load(path)
        except ValueError:
            kept = None
        if kept is not None and kept.key == key and not (kept.busy and not busy()):
            _warn(kept)
            return kept
    with frozen(), Others() as others:
        found = _measured(store, device, threads, key)
    found = replace(found, others=others.share)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except OSError as error:
        warnings.warn(
            f"{_OP}: what was measured could not be kept ({error.strerror or error}: {path.parent}), so every start "
            "measures again; GOLDSMITH_CACHE names a folder that can be written to",
            RuntimeWarning,
            stacklevel=2,
        )
    _warn(found)
    return found


def _warn(found: Calibration) -> None:
    if found.busy:
        warnings.warn(
            f"{_OP}: others took {found.others:.0%} of the processors' time while this machine was measured, so the "
            "plan is one for a busy machine; it is measured again when it is quiet, or with force=True",
            RuntimeWarning,
            stacklevel=3,
        )


def _device_of(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"{_OP}: device={str(device)!r}, wanted 'auto', 'cpu' or 'cuda:N'")
    return found


def _key(store: ExpertStore, device: torch.device, threads: int) -> dict[str, Any]:
    here, layout = machine(), store.blocks.layout
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    native_level = native.isa() if native.reason() is None else "none"
    return {
        "version": VERSION, "cpu": here.cpu, "isa": native_level, "cores": here.cores, "gpu": gpu,
        "torch": torch.__version__, "format": layout.format, "group_size": layout.group_size,
        "hidden_size": layout.hidden_size, "intermediate_size": layout.intermediate_size,
        "stride": store.blocks.stride, "dtype": str(store.dtype), "activation": store.activation, "threads": threads,
    }  # fmt: skip


def _path(key: dict[str, Any]) -> Path:
    digits = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder() / "calibration" / f"{digits}.json"


def _measured(store: ExpertStore, device: torch.device, threads: int, key: dict[str, Any]) -> Calibration:
    host = HostBench(store, threads)
    measured: dict[str, float] = {"cpu_latency": host.latency(0.1)}
    size, work = store.blocks.stride, 6.0 * store.hidden_size * store.intermediate_size
    for n in COUNTS:
        measured[f"cpu_{n}"] = host.kernel(n, 0.35)
    cpu = _rates(measured, "cpu", size, work, host.together, COUNTS[-1])
    if device.type == "cuda":
        link, on_device, transport, calls = _gpu(store, host, device, measured, size, work)
    else:
        measured["copy"] = measured["copy_pageable"] = host.copy(0.3)
        measured["together"] = host.together_with(host.copier(torch.empty(2, size, dtype=torch.uint8)), 0.4)
        calls = overheads(store, device, threads, _CALLS, size / cpu[0])
        link = size / measured["copy"], max(0.0, calls.get("link", 0.0) - size / cpu[0])
        least = measured["cpu_latency"] + calls.get("cpu", 0.0)  # all that a call on the CPU does is done there as well
        on_device = *cpu, max(least, calls.get("device", 0.0) - size / cpu[0])
        transport = Transport(store, device).why
    measured |= {f"call_{way}": seconds for way, seconds in calls.items()}
    costs = Costs(
        expert_bytes=float(size), flops_per_token=work, cpu_bytes_per_s=cpu[0], cpu_flops=cpu[1],
        link_bytes_per_s=link[0], dram_bytes_per_s=max(measured["together"], cpu[0], link[0]),
        device_bytes_per_s=on_device[0], device_flops=on_device[1],
        cpu_latency=measured["cpu_latency"] + calls.get("cpu", 0.0), link_latency=link[1], device_latency=on_device[2],
        split_latency=calls.get("split", 0.0), shared=device.type == "cpu",
    )  # fmt: skip
    return Calibration(costs, key, measured, transport)


def _gpu(
    store: ExpertStore, host: HostBench, device: torch.device, measured: dict[str, float], size: int, work: float
) -> tuple[tuple[float, float], tuple[float, float, float], str, dict[str, float]]:
    """(bytes a second, latency) of the link; (bytes, operations, latency) of the device; how bytes get there; and
    `overheads`."""
    bench = DeviceBench(store, host, device)
    try:
        measured["copy"] = bench.copy(0.25)
        measured["copy_pageable"] = bench.pageable(0.2)
        page = measured["link_latency"] = bench.link_latency(0.1)
        one = measured["device_one"] = bench.kernel(1, 0.2, experts=1)
        measured["device_1"] = bench.kernel(1, 0.2)
        measured[f"device_{LARGE}"] = bench.kernel(LARGE, 0.3)
        # from one expert to several, what is added is bytes, which memory does not give any faster than to a copy; what
        # a call takes beyond that is the call itself
        more = bench.together - 1
        each = (measured["device_1"] - one) / more if more else one
        measured["device_memory"] = bench.memory(0.05)
        each = max(each, size / measured["device_memory"])
        latency = measured["device_latency"] = max(0.0, min(one - each, measured["device_1"] - bench.together * each))
        rates = _rates(measured, "device", size, work, bench.together, LARGE)
        measured["together"] = host.together_with(bench.copier(), 0.4)
        bench.give_way()
        calls = overheads(store, device, host.threads, _CALLS, measured["cpu_1"] / host.together)
        link = size / measured["copy"], max(page, calls.get("link", 0.0) - each)
        on_device = *rates, max(latency, calls.get("device", 0.0) - each)
        return link, on_device, bench.transport.why, calls
    finally:
        bench.close()


def _rates(
    measured: dict[str, float], lane: str, size: int, work: float, experts: int, large: int
) -> tuple[float, float]:
    """(bytes, operations) a second, of calls at one token and at many, less what a call takes by itself."""

    def each(tokens: int) -> float:
        call = measured[f"{lane}_{tokens}"]
        return max(call - measured[f"{lane}_latency"], 0.1 * call) / experts

    return size / each(1), work * large / each(large)
