"""Exponentials and logarithms of mixed bases, and log-sums without their maximum.

Kernels compute 2^(x log2 e) and keep the logarithm of a sum to base 2. One of the two conversion factors is easily
forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...graph.node import Node
from ..change import Change, instead

_LN2, _LOG2E = math.log(2.0), 1 / math.log(2.0)
# given x, its maximum m, and s = log(sum(exp(x - m))): (text, the log-softmax, cause)
_Parts = Callable[[Tensor, Tensor, Tensor], Tensor]
_SOFTMAX: tuple[tuple[str, str, _Parts], ...] = (
    ("wrong_factor", "is times 1/ln 2 within, as if its numbers were to base 2", lambda x, m, s: _LOG2E * (x - m - s)),
    ("wrong_factor", "is times ln 2 within, as if its numbers were to base e", lambda x, m, s: _LN2 * (x - m - s)),
    ("wrong_factor", "has its argument to base e, and all else to base 2", lambda x, m, s: _LN2 * x - m - s),
    ("wrong_factor", "has its argument to base 2, and all else to base e", lambda x, m, s: _LOG2E * x - m - s),
    ("wrong_factor", "has the logarithm of its sum to base 2, and all else to base e",
     lambda x, m, s: x - _LOG2E * (m + s)),
    ("wrong_factor", "has the logarithm of its sum to base e, and all else to base 2",
     lambda x, m, s: x - _LN2 * (m + s)),
    ("wrong_factor", "adds a logarithm to base e to a maximum to base 2", lambda x, m, s: x - m - _LN2 * s),
    ("wrong_factor", "adds a logarithm to base 2 to a maximum to base e", lambda x, m, s: x - m - _LOG2E * s),
    ("missing_term", "lacks the maximum in the logarithm of its sum", lambda x, m, s: x - s),
    ("missing_term", "has the maximum alone for the logarithm of its sum", lambda x, m, s: x - m),
)  # fmt: skip
_SUM: tuple[tuple[str, str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("wrong_factor", "is to base 2", lambda m, s: _LOG2E * (m + s)),
    ("wrong_factor", "is taken to base e of numbers to base 2", lambda m, s: _LN2 * (m + s)),
    ("wrong_factor", "adds a logarithm to base e to a maximum to base 2", lambda m, s: m + _LN2 * s),
    ("wrong_factor", "adds a logarithm to base 2 to a maximum to base e", lambda m, s: m + _LOG2E * s),
    ("missing_term", "lacks the maximum", lambda m, s: s),
    ("missing_term", "is the maximum alone", lambda m, s: m),
    ("missing_term", "adds the sum itself to the maximum", lambda m, s: m + s.exp()),
)
_PRIOR = 0.5


def changes(call: Node) -> Iterator[Change]:
    """Changes of a softmax, its logarithm, or a logsumexp."""
    if call.name == "logsumexp":
        yield from _of_sums(call)
        return
    axis, log = call.args[1], call.name == "_log_softmax"
    for cause, text, parts in _SOFTMAX:

        def other(x: Tensor, *args: object, parts: _Parts = parts, **kwargs: object) -> Tensor:
            m = x.amax(axis, keepdim=True)
            log_probs = parts(x, m, torch.logsumexp(x, axis, keepdim=True) - m)
            return log_probs if log else torch.exp(log_probs)

        yield Change(cause, f"{call.expression} {text}", call.index, instead(other), {}, _PRIOR)


def _of_sums(call: Node) -> Iterator[Change]:
    axes = call.args[1]
    for cause, text, parts in _SUM:

        def other(x: Tensor, dim: object, keepdim: bool = False, parts: Callable = parts) -> Tensor:
            m = x.amax(axes, keepdim=keepdim)
            return parts(m, torch.logsumexp(x, axes, keepdim) - m)

        yield Change(cause, f"{call.expression} {text}", call.index, instead(other), {}, _PRIOR)
