"""Whether a module or function does the same when it is called again: what a call of it draws, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLE = 64
_STATELESS = (nn.RMSNorm, nn.LayerNorm, nn.Identity)


def repeats(function: Any) -> bool:
    """Known to draw nothing and to keep no state, so that nobody needs to watch it."""
    if type(function) in _STATELESS:
        return not (function._forward_hooks or function._forward_pre_hooks)
    return function is None


class State:
    """What a call of `function` may change besides its result: generators, and a module's tensors and attributes.

    Attributes are compared as they stand: what changes inside a list or an object of another kind is not seen.
    """

    def __init__(self, function: Any, device: torch.device) -> None:
        owner = getattr(function, "__self__", function)  # of a method
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

    def _now(self) -> list[tuple[Any, Any]]:
        """Every object, in a fixed order, and what of it can change while it stays the same object."""
        generators: list[torch.Generator] = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[self._device.index])
        records: list[tuple[Any, Any]] = []
        for module in self._modules:
            for attributes in (vars(module), module._parameters, module._buffers):
                records += [
                    (value, value._version if isinstance(value, Tensor) else None) for value in attributes.values()
                ]
            generators += [value for value in vars(module).values() if isinstance(value, torch.Generator)]
        if self._drawn is None:
            records += [(g, g.get_state().numpy().tobytes()) for g in generators]
        return records


def _equal(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    (value, state), (value_after, state_after) = before, after
    plain = isinstance(value, (int, float, str))
    return state == state_after and (value == value_after if plain else value is value_after)


class _Drawn(TorchDispatchMode):
    """While a CUDA graph is captured no generator may be asked for its state; the operators say whether they draw."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sample(t: Tensor) -> Tensor:
    """Numbers at even distances, the first among them, as they are now."""
    flat = t.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()


def same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
