"""What the family's operators check and name alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHUNK_BYTES = 4 * 2**20  # what a step of a reference holds: the second cache (64 MiB took twice as long on 2 cores)
DEVICE_CHUNK_BYTES = 64 * 2**20  # the same on other devices, where a launch costs more than a read


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and scores: float32, or float64 when the inputs are float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_bytes(device: torch.device) -> int:
    """What one step of a reference may hold beside its inputs and results."""
    return CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES


def check_count(op: str, name: str, value: object, about: str = "", *, least: int = 1) -> None:
    """A whole number of at least 1, or `least`; True is none."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        use = f"; use int({name})" if hasattr(value, "__index__") and not isinstance(value, bool) else ""
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, wanted a whole number{about}{use}")
    if value < least:
        raise ValueError(f"{op}: {name}={value}, wanted at least {least}{about}")


def check_flag(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, wanted True or False")


def check_fraction(op: str, name: str, value: object) -> None:
    """A number from 0 up to 1, without 1; True is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, wanted a number 0 <= {name} < 1")
    if not 0 <= value < 1:
        raise ValueError(f"{op}: {name}={value!r}, wanted 0 <= {name} < 1")


def check_device(op: str, device: object) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"{op}: device={device!r} is of type {type(device).__name__}, wanted a torch.device or its name"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"{op}: device={device!r} is no device of torch; wanted one such as 'cpu' or 'cuda'"
        ) from error


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_dtype(op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Every tensor in the dtype of the first."""
    first, like = tensors[0]
    for name, tensor in tensors[1:]:
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"{op}: {name} is {named(tensor.dtype)}, but {first} is {named(like.dtype)}; "
                f"convert one: {name}.to({first}.dtype)"
            )


def can_inspect(t: Tensor) -> bool:
    """Whether it may be asked what it holds: only a CPU answers at once, and vmap not for many samples at a time."""
    if t.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return all(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def add_at(values: Tensor, at: Tensor, size: int) -> Tensor:
    """[rows, size]: values [rows, k] summed into the places `at` of their row, in ascending order."""
    out = values.new_zeros(values.shape[0], size)
    if not values.is_cuda:
        return out.scatter_add(-1, at, values)
    for j in range(values.shape[-1]):  # one entry a row at a time: on a card a scatter of several adds in any order
        out = out.scatter_add(-1, at[:, j : j + 1], values[:, j : j + 1])
    return out


def flat(t: Tensor) -> Tensor:
    """[rows, size], contiguous: how a row is summed must not depend on where it lies."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()
