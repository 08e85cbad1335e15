"""Argument checks and small tensor helpers that the family's operators share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHUNK_BYTES = 4 * 2**20  # per step of a reference; fits the L2 cache (64 MiB took twice as long on 2 cores)
DEVICE_CHUNK_BYTES = 64 * 2**20  # the same on other devices, where a launch costs more than a read


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and scores: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunk_bytes(device: torch.device) -> int:
    """Bytes that one step of a reference may hold besides its inputs and results."""
    return CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES


def check_count(op: str, name: str, value: object, about: str = "", *, least: int = 1) -> None:
    """Refuses a value that is not a whole number of at least `least`; True is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        use = f"; use int({name})" if hasattr(value, "__index__") and not isinstance(value, bool) else ""
        raise TypeError(
            f"{op}: {name}={value!r} is of type {type(value).__name__}, expected a whole number{about}{use}"
        )
    if value < least:
        raise ValueError(f"{op}: {name}={value}, expected at least {least}{about}")


def check_flag(op: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, expected True or False")


def check_fraction(op: str, name: str, value: object) -> None:
    """Refuses a value that is not a number with 0 <= value < 1; True is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, expected a number 0 <= {name} < 1")
    if not 0 <= value < 1:
        raise ValueError(f"{op}: {name}={value!r}, expected 0 <= {name} < 1")


def check_device(op: str, device: object) -> torch.device:
    if not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"{op}: device={device!r} is of type {type(device).__name__}, expected a torch.device or its name"
        )
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"{op}: device={device!r} is not a torch device; expected one such as 'cpu' or 'cuda'"
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_dtype(op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Refuses tensors whose dtype differs from the first one's."""
    first, like = tensors[0]
    for name, tensor in tensors[1:]:
        if tensor.dtype != like.dtype:
            raise TypeError(
                f"{op}: {name} is {dtype_name(tensor.dtype)}, but {first} is {dtype_name(like.dtype)}; "
                f"convert one: {name}.to({first}.dtype)"
            )


def can_inspect(t: Tensor) -> bool:
    """Whether Python may read t's values: only on a CPU (a GPU would have to wait), not compiled and not under vmap."""
    if t.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return all(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def add_at(values: Tensor, at: Tensor, size: int) -> Tensor:
    """[rows, size]: each row's values [rows, k] added at the positions `at`, in an order that repeats."""
    out = values.new_zeros(values.shape[0], size)
    if not values.is_cuda:
        return out.scatter_add(-1, at, values)
    # a GPU's scatter adds equal positions in any order; its index_put sorts the positions first
    rows = torch.arange(len(values), device=values.device).unsqueeze(-1).expand_as(at)
    return out.index_put((rows, at), values, accumulate=True)


def flat(t: Tensor) -> Tensor:
    """[rows, size], contiguous, so that the order of a row's sum does not depend on its place in memory."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]).contiguous()
