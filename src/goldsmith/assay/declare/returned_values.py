"""Names for the values that a candidate or golden returns: outputs, and gradients of inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError

_BASES = ("y", "z", "out", "result")
_LAST = "my_result"  # where all of these are names of something else
BARE = (*_BASES, f"{_LAST}0")  # names of a result that is one tensor


class UnusableResult(Exception):
    """The candidate returned a tensor without numbers, which is its own fault."""


def names_of(
    result: object,
    names: tuple[str, ...] | None,
    who: str,
    source: str = "the target declares",
    unavailable: Collection[str] = (),
) -> list[tuple[str, object]]:
    """A return value as pairs (output name, value); `source` says in an error where the known names come from.

    Default names are y, or y0, y1, ...; if one of them is `unavailable`, z, out or result replaces y.
    """
    if isinstance(result, Mapping):  # methods of its own may show something else at each look
        items = dict.items(result) if isinstance(result, dict) else result.items()
        return [(str(name), value) for name, value in items]
    values = _held(result) if isinstance(result, list | tuple) else [result]
    fits = names is not None and len(names) == len(values)
    if isinstance(result, list) and values and not fits and all(_is_number(v) for v in values):
        raise TargetError(f"outputs: the {who} returned a list of {len(values)} numbers; return them as one tensor")
    expected_names = _free(len(values), isinstance(result, list | tuple), unavailable) if names is None else names
    if len(expected_names) != len(values):
        count = "1 result" if len(values) == 1 else f"{len(values)} results"
        raise TargetError(
            f"outputs: the {who} returned {count}, but {source} {len(expected_names)}: {', '.join(expected_names)}"
        )
    return list(zip(expected_names, values, strict=True))


def _held(result: list | tuple) -> list[object]:
    """What a list or tuple holds, whatever its class makes of `iter`."""
    return list(list.__iter__(result) if isinstance(result, list) else tuple.__iter__(result))


def own_names(names: Sequence[str], supply: Mapping[str, object], saved: Collection[str], who: str, sent: bool) -> None:
    """Raises TargetError if a result has the name of an input, scalar, gradient or output gradient.

    who: the start of the message; sent: whether the candidate receives output gradients, as grad_<output>.
    """
    free = _free(len(names), len(names) > 1, [*supply, *names])
    example = ", ".join(repr(n) for n in free) + ("," if len(names) == 1 else "")
    advice = f"choose other names, outputs=({example})"
    for name in names:
        if name in supply:
            case_values = f"case values: {', '.join(supply)}"
            raise TargetError(f"{who} {name!r} is also the name of a case value; {case_values}; {advice}")
        if name.endswith(".grad"):
            tensor = name.removesuffix(".grad")
            raise TargetError(f"{who} {name!r} is also the name of the gradient of {tensor}; {advice}")
    gradients = {f"grad_{n}": n for n in names if sent and n not in saved}
    for name in (*supply, *names):
        if name in gradients:
            output = gradients[name]
            raise TargetError(f"{who} {name!r} is also the name of the output gradient of {output!r}; {advice}")


def _free(count: int, several: bool, unavailable: Collection[str]) -> tuple[str, ...]:
    """Unused names for results: y, or y0, y1, ... for several, or the next free base name."""
    for base in _BASES:
        names = tuple(f"{base}{i}" for i in range(count)) if several else (base,)
        if not any(n in unavailable or f"grad_{n}" in unavailable for n in names):
            return names
    return tuple(f"{_LAST}{i}" for i in range(count))


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)


def only_tensors(pairs: list[tuple[str, object]], who: str) -> dict[str, Tensor]:
    """Results by name, without those that are None; numbers become tensors."""
    named = {}
    for name, value in pairs:
        if value is None:
            continue
        if not isinstance(value, Tensor):
            if not _is_number(value):
                raise TargetError(
                    f"outputs: the {who}'s {name!r} is of type {type(value).__name__}, not a tensor or number"
                )
            value = torch.tensor(value)
        if who == "candidate":
            _plain(value, name)
        _judgeable(value, f"outputs: the {who}'s {name!r}")
        _holds_numbers(value, name, who)
        named[name] = value
    return named


def _plain(value: Tensor, name: str) -> None:
    """Raises for a tensor whose methods are not torch's own: what it shows need not be what its memory holds."""
    if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnusableResult(f"{name} is a {type(value).__name__}, a subclass of torch.Tensor; return plain tensors")
    replaced = sorted(n for n in getattr(value, "__dict__", {}) if hasattr(Tensor, n))
    if replaced:
        raise UnusableResult(f"{name} has attributes of its own in place of torch's: {', '.join(replaced)}")


def _holds_numbers(value: Tensor, name: str, who: str) -> None:
    if value.is_meta and who == "golden":
        raise TargetError(f"outputs: the golden's {name!r} is on the meta device and has no values; use cpu or cuda")
    if value.is_meta:
        raise UnusableResult(f"{name} is on the meta device, whose tensors hold no numbers")


def _judgeable(value: Tensor, label: str) -> None:
    if value.is_complex():
        raise TargetError(f"{label} is complex, which cannot be judged; return torch.view_as_real(...) of it")
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        raise TargetError(f"{label} is {_kind(value)}, which cannot be judged; return it as a plain dense tensor")
    if value.is_floating_point() and value.dtype.itemsize == 1:
        dtype = str(value.dtype).removeprefix("torch.")
        raise TargetError(f"{label} is {dtype}, which cannot be judged; return .float() of it, which is exact")


def _kind(value: Tensor) -> str:
    return "quantized" if value.is_quantized else "nested" if value.is_nested else f"of layout {value.layout}"


def name_gradients(result: object, expected: tuple[str, ...], who: str) -> dict[str, Tensor | None]:
    """The gradients that a backward returned (a dict, or a tuple in the order of `grads`), by input name."""
    if isinstance(result, Mapping):
        unknown = [n for n in result if n not in expected]
        if unknown:
            raise TargetError(
                f"{who}: returned a gradient for {unknown[0]!r}, expected gradients for: {', '.join(expected)}"
            )
        return _gradients({n: result.get(n) for n in expected}, who)
    values = tuple(result) if isinstance(result, list | tuple) else (result,)
    if len(values) != len(expected):
        raise TargetError(f"{who}: returned {len(values)} gradients, expected {len(expected)}: {', '.join(expected)}")
    return _gradients(dict(zip(expected, values, strict=True)), who)


def _gradients(named: dict[str, Any], who: str) -> dict[str, Tensor | None]:
    for name, grad in named.items():
        if grad is not None and not isinstance(grad, Tensor):
            raise TargetError(f"{who}: the gradient of {name!r} is of type {type(grad).__name__}, not a tensor")
        if grad is not None:
            _holds_numbers(grad, f"{name}.grad", "golden" if who.startswith("golden") else "candidate")
    return named
