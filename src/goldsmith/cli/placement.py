"""The device that a backend runs on, or the reason why it cannot run on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core.op import Op
from .user_targets import UnknownName

if TYPE_CHECKING:
    from .workers.messages import PlacementRequest


def device_of(request: PlacementRequest) -> str:
    """The device that the request names; by default the GPU, unless there is none or kernels are interpreted."""
    wanted = request["device"]
    if wanted is None:
        return "cuda" if torch.cuda.is_available() and not request["interpret"] else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UnknownName(f"--device {wanted}: not a device; use cpu, cuda or cuda:1.") from error
    if device.type not in ("cpu", "cuda"):
        raise UnknownName(
            f"--device {wanted}: goldsmith does not support this kind of device; use cpu, cuda or cuda:1."
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnknownName(f"--device {wanted}: torch finds no CUDA device on this machine.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnknownName(
            f"--device {wanted}: this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0."
        )
    return str(device)


def place(op: Op, backend: str, request: PlacementRequest) -> tuple[str, str | None]:
    """The device to check a backend on, and why it cannot run there, or None.

    If no device was named, a backend that runs on the CPU only is checked there.
    """
    device = device_of(request)
    reason = machine_reason(op, backend, device)
    if reason and request["device"] is None and device != "cpu" and machine_reason(op, backend, "cpu") is None:
        return "cpu", None
    return device, reason


def machine_reason(op: Op, backend: str, device: str) -> str | None:
    """Why the backend can run no case on this device, or None; needs no inputs."""
    probe = torch.empty(1, dtype=torch.float32, device=device)
    return op.backends[backend].machine({op.inputs[0]: probe})
