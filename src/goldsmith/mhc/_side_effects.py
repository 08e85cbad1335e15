"""Detects side effects of a norm: random numbers that a call draws, and tensors or attributes that it changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLE = 64
_STATELESS = (nn.RMSNorm, nn.LayerNorm, nn.Identity)


def repeats(function: object) -> bool:
    """Whether the function is known to have no side effects: None, or a stateless norm of torch without hooks."""
    if isinstance(function, nn.Module) and type(function) in _STATELESS:
        return not (function._forward_hooks or function._forward_pre_hooks)
    return function is None


class State:
    """Snapshot of what a call of `function` may change: random generators, and a module's tensors and attributes.

    Attributes are compared by identity (numbers and strings by value): changes inside a list or another object go
    unnoticed.
    """

    def __init__(self, function: object, device: torch.device) -> None:
        owner = getattr(function, "__self__", function)  # a bound method belongs to a module
        self._modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
        self._device = device
        self._drawn = _Drawn() if _is_capturing(device) else None
        self._before = self._now()

    @contextmanager
    def watching(self) -> Iterator[None]:
        if self._drawn is None:
            yield
        else:
            with self._drawn:
                yield

    def has_changed(self) -> bool:
        now = self._now()
        drawn = self._drawn is not None and self._drawn.any
        return drawn or len(now) != len(self._before) or not all(map(_equal, self._before, now))

    def _now(self) -> list[tuple[object, object]]:
        """Each object in a fixed order, with its version or generator state where it can change in place."""
        generators: list[torch.Generator] = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._device.index])
        records: list[tuple[object, object]] = []
        for module in self._modules:
            for attributes in (vars(module), module._parameters, module._buffers):
                records += [
                    (value, value._version if isinstance(value, Tensor) else None) for value in attributes.values()
                ]
            generators += [value for value in vars(module).values() if isinstance(value, torch.Generator)]
        if self._drawn is None:
            records += [(g, g.get_state().numpy().tobytes()) for g in generators]
        return records


def _equal(before: tuple[object, object], after: tuple[object, object]) -> bool:
    (value, state), (value_after, state_after) = before, after
    plain = isinstance(value, (int, float, str))
    return state == state_after and (value == value_after if plain else value is value_after)


class _Drawn(TorchDispatchMode):
    """Records whether an operator draws random numbers: during CUDA graph capture generator states cannot be read."""

    any = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sample(t: Tensor) -> Tensor:
    """A copy of about SAMPLE elements at even distances, starting with the first."""
    flat = t.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()


def same(a: Tensor, b: Tensor) -> bool:
    """Equality of all elements, where NaN equals NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
