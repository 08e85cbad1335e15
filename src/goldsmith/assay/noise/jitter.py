"""Runs of the golden with every number rounded once more, as an equivalent formula might round.

Legal orders change only sums. If all keys of a softmax are equal after rounding they change nothing, whereas a kernel
that joins its parts through their logarithms rounds at the size of the logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..support.dispatch_mode import DispatchMode

RUNS = 4


class Jitter(DispatchMode):
    """Dispatch mode that moves each new floating-point result up or down by a unit of its dtype.

    Whole numbers stay, because a cast to integers that follows `round` would truncate what lies below.
    """

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten._softmax.default and out.numel()
        ):  # computed from its logarithm, as kernels join parts
            return torch.exp(args[0] - self._moved(torch.logsumexp(args[0], args[1], keepdim=True))).to(out.dtype)
        if not isinstance(out, Tensor) or not out.is_floating_point() or func._schema.is_mutable or not out.numel():
            return out
        place = out.untyped_storage().data_ptr()
        if any(isinstance(a, Tensor) and a.untyped_storage().data_ptr() == place for a in args):
            return out  # a view
        return self._moved(out)

    def _moved(self, out: Tensor) -> Tensor:
        signs = torch.randint(0, 2, out.shape, generator=self.generator).to(out.device, out.dtype) * 2 - 1
        eps = torch.finfo(out.dtype).eps
        whole = (out == out.round()) & (out.abs() <= 2 / eps)
        return torch.where(whole, out, out * (1 + signs * eps))


def runs(
    evaluate: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], leaves: Mapping[str, Tensor], seed: int
) -> list[dict[str, Tensor]]:
    """RUNS results of `evaluate`, each with other random roundings; runs that raise are left out."""
    results = []
    for i in range(RUNS):
        try:
            with Jitter(seed + i):
                results.append(evaluate({n: t.clone() for n, t in leaves.items()}))
        except (RuntimeError, TypeError):  # without a plain storage a view cannot be recognised
            continue
    return results
