"""Checks of arguments. Each message names the argument, what came, what was expected, and what would work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class ShapeError(ValueError):
    """Shapes that do not fit together; the message lists all arguments."""


def check_shapes(
    op: str, arguments: Mapping[str, tuple[Tensor, str]], *, hint: str = ""
) -> dict[str, int | tuple[int, ...]]:
    """Check shapes against patterns; returns the sizes by name, for example {"batch": (1,), "n": 4, "dim": 64}.

    A pattern is a list of names and numbers separated by spaces; a leading `*name` takes all leading dimensions. The
    first argument that uses a name fixes its size. Raises ShapeError, listing every argument, if another one disagrees.
    """
    sizes: dict[str, int | tuple[int, ...]] = {}
    setter: dict[str, str] = {}
    for name, (tensor, pattern) in arguments.items():
        words = pattern.split()
        shape = tuple(tensor.shape)
        lead = words[0][1:] if words and words[0].startswith("*") else None
        fixed = words[1:] if lead is not None else words
        if len(shape) < len(fixed) or (lead is None and len(shape) != len(fixed)):
            wanted = f"at least {len(fixed)}" if lead is not None else str(len(fixed))
            _fail(op, f"{name} has {len(shape)} dimensions, expected {wanted}", arguments, hint)
        split = len(shape) - len(fixed)
        named_sizes: list[tuple[str, int | tuple[int, ...]]] = [] if lead is None else [(lead, shape[:split])]
        named_sizes += zip(fixed, shape[split:], strict=True)
        for word, size in named_sizes:
            if word.isdigit():
                if size != int(word):
                    _fail(op, f"{name} has size {size} where {word} is needed", arguments, hint)
            elif word not in sizes:
                sizes[word], setter[word] = size, name
            elif sizes[word] != size:
                ours, others = f"{word}={_text(size)}", f"{word}={_text(sizes[word])}"
                if setter[word] == name:
                    _fail(op, f"{name} has {others} and {ours}, which must be equal", arguments, hint)
                _fail(op, f"{name} has {ours}, but {setter[word]} has {others}", arguments, hint)
    return sizes


def _fail(op: str, problem: str, arguments: Mapping[str, tuple[Tensor, str]], hint: str) -> None:
    lines = [f"{op}: {problem}"]
    shapes = {name: _text(tuple(t.shape)) + "," for name, (t, _) in arguments.items()}
    first, second = max(map(len, shapes)) + 1, max(map(len, shapes.values()))
    for name, (_, pattern) in arguments.items():
        lines.append(f"  {name + ':':{first}} {shapes[name]:{second}} expected [{', '.join(pattern.split())}]")
    if hint:
        lines.append(f"  {hint}")
    raise ShapeError("\n".join(lines))


def _text(size: int | tuple[int, ...]) -> str:
    return str(list(size)) if isinstance(size, tuple) else str(size)


def check_dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{op}: {name} is {str(tensor.dtype).removeprefix('torch.')}, expected one of: {wanted}")


def kind(value: object) -> str:
    """The kind of a value, in words: a list, an int."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is {kind(value)}, expected a torch.Tensor")
    if value.is_nested:
        raise TypeError(f"{op}: {name} is nested, expected a dense tensor: {name}.to_padded_tensor(0.0), or its parts")
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise TypeError(f"{op}: {name} is {layout}, expected a dense tensor: {name}.to_dense()")


def check_same_device(op: str, tensors: Mapping[str, Tensor | None]) -> None:
    present = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(present))
    for name, tensor in present.items():
        if tensor.device != present[first].device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, but {first} is on {present[first].device}; "
                "move them to one device"
            )


def check_choice(op: str, name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name}={value!r} is unknown; choose one of: {', '.join(repr(c) for c in choices)}")


def check_at_least(op: str, name: str, value: float, least: float) -> None:
    """Check that a number is at least `least`; NaN is refused, too."""
    if not value >= least:
        raise ValueError(f"{op}: {name}={value!r}, expected a number of at least {least}")
