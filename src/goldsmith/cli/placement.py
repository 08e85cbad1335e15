"""The device that a backend of an operator is tried on, and why it cannot run there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core.op import Op
from .targets import UnknownName

if TYPE_CHECKING:
    from .workers.messages import PlacementRequest


def device_of(request: PlacementRequest) -> str:
    wanted = request["device"]
    if wanted is None:
        return "cuda" if torch.cuda.is_available() and not request["interpret"] else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UnknownName(f"{wanted!r} is no device; use cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise UnknownName(f"{wanted!r} is no device that goldsmith knows; use cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnknownName(f"--device {wanted}: this machine has no CUDA device that torch can use.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnknownName(f"--device {wanted}: there are {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return str(device)


def place(op: Op, backend: str, request: PlacementRequest) -> tuple[str, str | None]:
    """Where a backend is proved, and why it cannot be: where no device was named, on the CPU what runs there alone."""
    device = device_of(request)
    reason = machine_reason(op, backend, device)
    if reason and request["device"] is None and device != "cpu" and machine_reason(op, backend, "cpu") is None:
        return "cpu", None
    return device, reason


def machine_reason(op: Op, backend: str, device: str) -> str | None:
    """Why no case at all can run, judged without inputs."""
    probe = torch.empty(1, dtype=torch.float32, device=device)
    return op.backends[backend].machine({op.inputs[0]: probe})
